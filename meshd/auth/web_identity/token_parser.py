"""JSON Web Tokens, parsed strictly: three base64url parts, JSON objects without duplicate names.

Nothing is verified here, and no claim of an unverified token may be shown to anybody.
https://www.rfc-editor.org/rfc/rfc7515 (compact serialization), rfc7519 (claims), rfc8725 (best practices)
"""

from __future__ import annotations

import base64
import binascii
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TOKEN_BYTES: Final = 20_000
"""AWS's limit, too."""
_MAX_KEY_ID: Final = 1024
_PART = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})


class TokenRejectedError(Exception):
    """The token is not accepted. The message says why and quotes nothing of the token."""


class TokenExpiredError(TokenRejectedError):
    """The token would be accepted if it had not expired."""


@dataclass(frozen=True, slots=True, repr=False)
class UnverifiedToken:
    """A parsed token. `key_id` is None if the header has no `kid`; `signed` is what the signature covers."""

    text: str
    algorithm: str
    key_id: str | None
    claims: Mapping[str, Any]
    signed: bytes
    signature: bytes


def parse_token(text: str) -> UnverifiedToken:
    """Parse a compact JWS whose payload is a JSON object. Raises TokenRejectedError."""
    if len(text) > MAX_TOKEN_BYTES:
        raise TokenRejectedError(f"the token has more than {MAX_TOKEN_BYTES:,} characters")
    parts = text.split(".")
    if len(parts) != 3:
        raise TokenRejectedError("the token is not a signed JWT of three parts")
    header = _object("header", parts[0])
    claims = _object("payload", parts[1])
    signature = _decode("signature", parts[2])
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
    signed = f"{parts[0]}.{parts[1]}".encode("ascii")
    return UnverifiedToken(text, algorithm, key_id, claims, signed, signature)


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
