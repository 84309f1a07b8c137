"""Trust conditions of roles: which claims a token must have to assume a role.

Every condition must be met, each by any of its values. A claim that is a list has every value in it; numbers
and objects have none. A value without wildcards is compared exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshwire.iam.wildcards import Glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.control.roles import TrustCondition

_MISSING: Final = object()
_MAX_VALUES: Final = 1000


def unmet_condition(conditions: Iterable[TrustCondition], claims: Mapping[str, Any]) -> TrustCondition | None:
    """Return the first condition that the claims do not meet, or None."""
    return next((each for each in conditions if not _is_met(each, claims)), None)


def _is_met(condition: TrustCondition, claims: Mapping[str, Any]) -> bool:
    values = _claim_values(claims, condition.claim)
    if not condition.wildcard:
        return not values.isdisjoint(condition.values)
    patterns = [Glob(text) for text in condition.values]
    return any(pattern.matches(value, _no_variable) for pattern in patterns for value in values)


def _no_variable(_: str) -> None:
    """Resolve no policy variable: patterns of conditions have none."""


def _claim_values(claims: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the values of a claim, as texts; none if it is missing."""
    value = _pointed_at(claims, name) if name.startswith("/") else claims.get(name, _MISSING)
    listed = value if isinstance(value, list) else [value]
    return frozenset(_text(each) for each in listed[:_MAX_VALUES] if isinstance(each, str | bool))


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"


def _pointed_at(claims: Mapping[str, Any], pointer: str) -> Any:
    """Return what a JSON pointer (RFC 6901) leads to, through objects only."""
    found: Any = claims
    for step in pointer[1:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return _MISSING
        found = found[name]
    return found
