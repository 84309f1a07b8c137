"""Validation of JSON Web Tokens: a strict parse, then signature, issuer, audience and times, against one
provider and its keys.

Law: pure; keys and the time come in as arguments. A token has three base64url parts, JSON objects without
duplicate names. The algorithm must be one that the provider allows and that the key is made for. PyJWT
verifies the signature; claims are read from the strict parse, because PyJWT takes the last of two claims of
the same name, and its clock is the machine's. No claim of an unverified token may be shown to anybody.
https://www.rfc-editor.org/rfc/rfc7515 (compact serialization), rfc7519 (claims), rfc8725 (best practices)
https://openid.net/specs/openid-connect-core-1_0.html#IDTokenValidation
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.auth.web_identity.key_set import ALGORITHM_KINDS
from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.web_identity.key_set import KeySet, VerificationKey
    from meshd.control.roles import IdentityProvider

MAX_TOKEN_BYTES: Final = 20_000
"""AWS's limit, too."""
_MAX_KEY_ID: Final = 1024
_PART = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
LEEWAY_SECONDS: Final = 60
"""By how much the clocks of issuer and node may differ."""
_MAX_SUBJECT: Final = 255
_MAX_AUDIENCES: Final = 20
# Verifying costs up to a millisecond; a token without a key id must not cost a hundred.
_MAX_TRIES: Final = 8


class TokenRejectedError(Exception):
    """The token is not accepted. The message says why and quotes nothing of the token."""


class TokenExpiredError(TokenRejectedError):
    """The token would be accepted if it had not expired."""


class UnknownKeyError(TokenRejectedError):
    """No key of the key set has the token's key id: the issuer may have new keys."""


@dataclass(frozen=True, slots=True, repr=False)
class UnverifiedToken:
    """A parsed token. `key_id` is None if the header has no `kid`."""

    text: str
    algorithm: str
    key_id: str | None
    claims: Mapping[str, Any]


def parse_token(text: str) -> UnverifiedToken:
    """Parse a compact JWS whose payload is a JSON object. Raises TokenRejectedError."""
    if len(text) > MAX_TOKEN_BYTES:
        raise TokenRejectedError(f"the token has more than {MAX_TOKEN_BYTES:,} characters")
    parts = text.split(".")
    if len(parts) != 3:
        raise TokenRejectedError("the token is not a signed JWT of three parts")
    header = _object("header", parts[0])
    claims = _object("payload", parts[1])
    _decode("signature", parts[2])
    # RFC 7515 §4.1.11: a token with extensions that must be understood is rejected by who does not; `b64`
    # (RFC 7797) is one of them.
    if "crit" in header or "b64" in header:
        raise TokenRejectedError("the token's header has extensions (crit) that this server does not know")
    if "typ" in header and str(header["typ"]).lower() not in _TYPES:
        raise TokenRejectedError("the token's header says that it is not a JWT (typ)")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str):
        raise TokenRejectedError("the token's header names no algorithm (alg)")
    if key_id is not None and not (isinstance(key_id, str) and 0 < len(key_id) <= _MAX_KEY_ID):
        raise TokenRejectedError("the token's header has an invalid key id (kid)")
    return UnverifiedToken(text, algorithm, key_id, claims)


def _object(what: str, part: str) -> Mapping[str, Any]:
    try:
        # Bytes could also be UTF-16 for the standard library's parser.
        document = read_json(_decode(what, part).decode("utf-8"))
    except (PlanError, UnicodeDecodeError):
        raise TokenRejectedError(f"the token's {what} is not a JSON object in UTF-8") from None
    if not isinstance(document, dict):
        raise TokenRejectedError(f"the token's {what} is not a JSON object in UTF-8")
    return document


def _decode(what: str, part: str) -> bytes:
    """Decode base64url without padding, in its only canonical form."""
    data = b""
    if _PART.fullmatch(part) is not None:
        with suppress(binascii.Error):
            data = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    if not data or base64.urlsafe_b64encode(data).rstrip(b"=").decode() != part:
        raise TokenRejectedError(f"the token's {what} is not base64url")
    return data


class ValidToken(msgspec.Struct, frozen=True):
    """A validated token. `audience` is the one of its audiences that the provider accepts; `expires` is in
    seconds since 1970."""

    issuer: str
    subject: str
    audience: str
    expires: float
    claims: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<ValidToken of {self.subject!r} from {self.issuer}>"


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
