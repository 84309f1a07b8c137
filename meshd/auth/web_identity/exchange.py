"""Exchange of a token for temporary credentials of a role, as AWS's AssumeRoleWithWebIdentity does it.

A token may be exchanged any number of times until it expires, as on AWS: training pods restart. An unknown
role, and a token that its role does not trust, give the same answer, so that nobody learns which roles exist.
Every trust condition of a role must be met, each by any of its values. A claim that is a list has every value
in it; numbers and objects have none. A value without wildcards is compared exactly.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshd.auth.identities.admin_errors import AdminError
from meshd.auth.web_identity.issuer_client import IssuerError
from meshd.auth.web_identity.token_validation import (
    TokenExpiredError,
    TokenRejectedError,
    UnknownKeyError,
    check_provider,
    parse_token,
    validate_token,
)
from meshwire.iam.wildcards import Glob
from meshwire.sts_query import AssumedRole, StsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.auth.identity import Identity
    from meshd.auth.web_identity.key_cache import KeyCache
    from meshd.auth.web_identity.token_validation import UnverifiedToken, ValidToken
    from meshd.control.roles import IdentityProvider, Role, RoleTable, TrustCondition
    from meshd.util.clock import Clock
    from meshwire.sts_query import WebIdentityRequest

MIN_SECONDS: Final = 900
DEFAULT_SECONDS: Final = 3600
_SESSION_NAME = re.compile(r"[\w+=,.@-]{2,64}", re.ASCII)
_MAX_POLICY_BYTES: Final = 2048
_NOT_AUTHORIZED: Final = "Not authorized to perform sts:AssumeRoleWithWebIdentity"
_log = logging.getLogger("meshd.auth")


class Exchanged(NamedTuple):
    """The answer to the client, and the identity of the issued credentials."""

    answer: AssumedRole
    identity: Identity


class WebIdentityExchange:
    """Exchanges tokens for credentials. One per worker."""

    def __init__(self, table: RoleTable, sessions: CredentialService, keys: KeyCache, clock: Clock) -> None:
        self._table, self._sessions, self._keys, self._clock = table, sessions, keys, clock

    def __repr__(self) -> str:
        return f"<WebIdentityExchange of {self._table!r}>"

    async def aclose(self) -> None:
        """Cancel running fetches of issuers' keys."""
        await self._keys.aclose()

    async def exchange(self, wanted: WebIdentityRequest) -> Exchanged:
        """Return temporary credentials. Raises StsError: ValidationError, AccessDenied, InvalidIdentityToken,
        ExpiredTokenException, IDPCommunicationError, MalformedPolicyDocument, PackedPolicyTooLarge."""
        if not _SESSION_NAME.fullmatch(wanted.session_name):
            raise StsError("ValidationError", "RoleSessionName has 2 to 64 letters, digits or _+=,.@-")
        try:
            token = parse_token(wanted.token)
        except TokenRejectedError as error:
            raise StsError("InvalidIdentityToken", _sentence(error)) from None
        role = self._table.roles().get(wanted.role)
        provider = self._provider_of(token, role)
        valid = await self._validate(token, provider)
        if role is None or role.provider != provider.name:
            raise StsError("AccessDenied", _NOT_AUTHORIZED)
        unmet = unmet_condition(role.conditions, valid.claims)
        if unmet is not None:
            fields = {"role": role.name, "idp": provider.name, "subject": valid.subject, "claim": unmet.claim}
            _log.warning("a role does not trust a valid token", extra=fields)
            raise StsError("AccessDenied", _NOT_AUTHORIZED)
        return self._issue(wanted, role, provider, valid)

    def _provider_of(self, token: UnverifiedToken, role: Role | None) -> IdentityProvider:
        """Return the provider whose issuer the token names: the role's, where several clusters' issuers have
        the same name. Raises StsError InvalidIdentityToken."""
        issuer = token.claims.get("iss")
        named = {name: each for name, each in self._table.providers().items() if each.issuer == issuer}
        if not named:
            raise StsError(
                "InvalidIdentityToken", "No identity provider is registered for the token's issuer."
            )
        if role is not None and role.provider in named:
            return named[role.provider]
        return next(iter(named.values()))

    async def _validate(self, token: UnverifiedToken, provider: IdentityProvider) -> ValidToken:
        now = self._clock.now_ms() / 1000
        try:
            check_provider(token, provider)
            keys = await self._keys.current_keys(provider)
            try:
                return validate_token(token, provider, keys, now)
            except UnknownKeyError:
                newer = await self._keys.newer_keys(provider, keys)
                if newer is None:
                    raise
                return validate_token(token, provider, newer, now)
        except TokenExpiredError as error:
            raise StsError("ExpiredTokenException", _sentence(error)) from None
        except TokenRejectedError as error:
            raise StsError("InvalidIdentityToken", _sentence(error)) from None
        except IssuerError:
            # What exactly is wrong with the issuer is in the log; an anonymous client need not know it.
            raise StsError(
                "IDPCommunicationError",
                f"The keys of the identity provider {provider.name} cannot be fetched.",
            ) from None

    def _issue(
        self, wanted: WebIdentityRequest, role: Role, provider: IdentityProvider, token: ValidToken
    ) -> Exchanged:
        seconds = _duration(wanted.duration_seconds, role)
        if len(wanted.policy.encode()) > _MAX_POLICY_BYTES:
            raise StsError("PackedPolicyTooLarge", f"Policy has more than {_MAX_POLICY_BYTES} bytes.")
        try:
            document, identity = self._sessions.issue_for_role(
                role, seconds, wanted.session_name, token.subject, wanted.policy
            )
        except AdminError as error:
            if error.code == "InvalidPolicy":
                raise StsError("MalformedPolicyDocument", error.message) from None
            raise StsError("AccessDenied", _NOT_AUTHORIZED) from None
        answer = AssumedRole(
            access_key=document.access_key_id,
            secret_key=document.secret_access_key,
            session_token=document.session_token,
            expiration=document.expiration,
            role=role.name,
            session_name=wanted.session_name,
            subject=token.subject,
            audience=token.audience,
            provider=provider.issuer,
        )
        return Exchanged(answer, identity)


def _duration(wanted: int | None, role: Role) -> int:
    """Return the lifetime of the credentials in seconds. Raises StsError ValidationError."""
    if wanted is None:
        return min(DEFAULT_SECONDS, role.max_seconds)
    if wanted < MIN_SECONDS:
        raise StsError("ValidationError", f"DurationSeconds must be at least {MIN_SECONDS}.")
    if wanted > role.max_seconds:
        raise StsError(
            "ValidationError",
            "The requested DurationSeconds exceeds the MaxSessionDuration set for this role.",
        )
    return wanted


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + "."


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
