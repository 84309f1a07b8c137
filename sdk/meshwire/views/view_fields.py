"""Checks of the fields that documents of all view kinds share.

Law: every fault raises PlanError with the path of the field.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from meshwire import names
from meshwire.strict_json import PlanError, checked_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDING = re.compile(r"\.[A-Za-z0-9_.+-]{1,32}")
_MAX_ENDINGS = 32
_MAX_BUCKETS = 64


def checked_ending(value: Any, path: str) -> str:
    """Return `value` if it is a key ending such as `.jpg`. Raises PlanError."""
    text = checked_text(value, path, at_most=33)
    if _ENDING.fullmatch(text) is None:
        raise PlanError(path, f"expected an ending such as '.jpg', not {text!r}")
    return text


def checked_match(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the endings in `match`; empty means every key. Raises PlanError."""
    value = document.get("match", [])
    if not isinstance(value, list) or len(value) > _MAX_ENDINGS:
        raise PlanError("match", f"expected a list of at most {_MAX_ENDINGS} endings such as '.jpg'")
    return tuple(checked_ending(item, f"match[{number}]") for number, item in enumerate(value))


def checked_prefix(document: Mapping[str, Any]) -> str:
    """Return the key prefix in `prefix`. Raises PlanError."""
    prefix = checked_text(document.get("prefix", ""), "prefix", at_most=1024)
    if prefix:
        try:
            names.check_key(prefix)
        except names.NameProblemError as error:
            raise PlanError("prefix", str(error)) from None
    return prefix


def checked_source(document: Mapping[str, Any], bucket: str) -> str:
    """Check that `source`, if given, is the bucket of the view, and return it. Raises PlanError."""
    if document.get("source", bucket) != bucket:
        raise PlanError("source", f"the view belongs to the bucket {bucket!r}")
    return bucket


def checked_also(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the further buckets in `also`, which a node fills in. Raises PlanError."""
    value = document.get("also", [])
    if not isinstance(value, list) or len(value) > _MAX_BUCKETS:
        raise PlanError("also", f"expected a list of at most {_MAX_BUCKETS} buckets")
    return tuple(checked_text(item, f"also[{number}]", at_most=63) for number, item in enumerate(value))
