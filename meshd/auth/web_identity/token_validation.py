"""Validation of tokens: signature, issuer, audience and times, against one provider and its keys.

Law: pure; keys and the time come in as arguments. The algorithm must be one that the provider allows and that
the key is made for. PyJWT verifies the signature; claims are read from the strict parse, because PyJWT takes
the last of two claims of the same name, and its clock is the machine's.
https://openid.net/specs/openid-connect-core-1_0.html#IDTokenValidation
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshd.auth.web_identity.key_set import ALGORITHM_KINDS
from meshd.auth.web_identity.token_parser import TokenExpiredError, TokenRejectedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.web_identity.key_set import KeySet, VerificationKey
    from meshd.auth.web_identity.token_parser import UnverifiedToken
    from meshd.control.roles import IdentityProvider

LEEWAY_SECONDS: Final = 60
"""By how much the clocks of issuer and node may differ."""
_MAX_SUBJECT: Final = 255
_MAX_AUDIENCES: Final = 20
# Verifying costs up to a millisecond; a token without a key id must not cost a hundred.
_MAX_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class ValidToken:
    """A validated token. `audience` is the one of its audiences that the provider accepts; `expires` is in
    seconds since 1970."""

    issuer: str
    subject: str
    audience: str
    expires: float
    claims: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<ValidToken of {self.subject!r} from {self.issuer}>"


class UnknownKeyError(TokenRejectedError):
    """No key of the key set has the token's key id: the issuer may have new keys."""


def check_provider(token: UnverifiedToken, provider: IdentityProvider) -> None:
    """Return if the token claims to be the provider's, and its algorithm is allowed. This needs no keys.
    Raises TokenRejectedError."""
    if token.algorithm not in provider.algorithms or token.algorithm not in ALGORITHM_KINDS:
        allowed = ", ".join(provider.algorithms)
        raise TokenRejectedError(f"the token's algorithm is not allowed for this provider ({allowed} are)")
    if token.claims.get("iss") != provider.issuer:
        raise TokenRejectedError("the token is not from the issuer of the role's provider (iss)")


def validate_token(
    token: UnverifiedToken, provider: IdentityProvider, keys: KeySet, now: float
) -> ValidToken:
    """Return the validated token. `now`: seconds since 1970. Raises TokenRejectedError, of which
    UnknownKeyError and TokenExpiredError are kinds."""
    check_provider(token, provider)
    if not keys.has_key_id(token.key_id):
        raise UnknownKeyError("the token is signed with a key that its issuer does not publish (kid)")
    _verify_signature(token, keys)
    claims = token.claims
    audience = _audience(claims.get("aud"), provider.audiences)
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= _MAX_SUBJECT or not subject.isprintable():
        raise TokenRejectedError(f"the token's subject (sub) is not a text of 1 to {_MAX_SUBJECT} characters")
    expires = _check_times(claims, now)
    return ValidToken(provider.issuer, subject, audience, expires, claims)


def _verify_signature(token: UnverifiedToken, keys: KeySet) -> None:
    for key in keys.candidates(token.key_id, token.algorithm)[:_MAX_TRIES]:
        if _is_signed_by(token, key):
            return
    raise TokenRejectedError("the token's signature is not valid")


def _is_signed_by(token: UnverifiedToken, key: VerificationKey) -> bool:
    from jwt import PyJWS
    from jwt.exceptions import PyJWTError

    try:
        PyJWS().decode_complete(token.text, key.load(token.algorithm), algorithms=[token.algorithm])
    except (PyJWTError, ValueError):
        return False
    return True


def _audience(claim: object, accepted: tuple[str, ...]) -> str:
    given = [claim] if isinstance(claim, str) else claim
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_AUDIENCES:
        raise TokenRejectedError("the token has no audience (aud)")
    if not all(isinstance(each, str) for each in given):
        raise TokenRejectedError("the token's audiences (aud) are not texts")
    found = next((each for each in accepted if each in given), None)
    if found is None:
        raise TokenRejectedError("the token is for another audience (aud) than those of the provider")
    return found


def _check_times(claims: Mapping[str, Any], now: float) -> float:
    """Check `nbf`, `iat` and `exp`; return the latter."""
    expires = _time(claims, "exp")
    if expires is None:
        raise TokenRejectedError("the token does not expire (exp)")
    for name in ("nbf", "iat"):
        begins = _time(claims, name)
        if begins is not None and begins > now + LEEWAY_SECONDS:
            raise TokenRejectedError(f"the token is not valid yet ({name}); do the clocks differ?")
    if expires <= now - LEEWAY_SECONDS:
        raise TokenExpiredError("the token has expired (exp)")
    return expires


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """Return a claim in seconds since 1970, or None if it is absent."""
    value = claims.get(name)
    if name not in claims:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TokenRejectedError(f"the token's {name} is not a time")
    return float(value)
