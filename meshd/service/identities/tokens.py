"""Session tokens: claims that only this mesh can have written.

Law: a token is read only after its authentication code held; the secret key that goes with it is derived
from it, so that nothing about it is kept. Invariant: one token has one spelling; other text is refused.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from meshd.control.nodesecret import NodeSecret

_HEAD = "mesht1."
_CODE_BYTES = 32
MAX_TOKEN = 12_000


class TokenError(ValueError):
    """The text is no token of this mesh."""


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a token says. Times in seconds since 1970; `parent` is the key it was made with, `mark` that
    key's fingerprint at the time; each of `policies` must allow what is done, beside the parent's."""

    access_key: str
    user_id: str
    parent: str
    mark: bytes
    issued: int
    expires: int
    name: str = ""
    policies: tuple[str, ...] = ()


class TokenSeal:
    """Writes and reads tokens."""

    def __init__(self, secret: NodeSecret) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "<TokenSeal>"

    def write(self, claims: Claims) -> str:
        """The token. Raises TokenError when it would be longer than a header should be."""
        payload = msgspec.msgpack.encode(claims)
        token = _HEAD + base64.urlsafe_b64encode(self._code(payload) + payload).rstrip(b"=").decode()
        if len(token) > MAX_TOKEN:
            raise TokenError(f"the token would have {len(token):,} characters; {MAX_TOKEN:,} are allowed")
        return token

    def read(self, token: str) -> Claims:
        """What a token says. Raises TokenError for everything `write` did not write."""
        sealed = _bytes(token)
        code, payload = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(payload)):
            raise TokenError("not written here")
        try:
            return msgspec.msgpack.decode(payload, type=Claims)
        except msgspec.DecodeError as error:
            raise TokenError("written by another version") from error

    def secret_key(self, token: str) -> str:
        """The secret key that belongs to a token."""
        derived = hmac.digest(self._secret.derive("session secret"), token.encode(), "sha256")
        return "mss-" + base64.urlsafe_b64encode(derived)[:40].decode()

    def fingerprint(self, access_key: str, secret_key: str, rounds: tuple[int, int] = (0, 0)) -> bytes:
        """Tells a key pair from another with the same access key, and from itself before what was issued with
        it was revoked (`rounds` of its user and of it)."""
        told = f"\0{rounds[0]}\0{rounds[1]}" if any(rounds) else ""
        text = f"{access_key}\0{secret_key}{told}".encode()
        return hmac.digest(self._secret.derive("session parent"), text, "sha256")[:16]

    def _code(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret.derive("session token"), _HEAD.encode() + payload, "sha256")


def _bytes(token: str) -> bytes:
    """What a token's text stands for. Raises TokenError unless it is the one spelling of it."""
    text = token.removeprefix(_HEAD)
    if len(token) > MAX_TOKEN or not token.startswith(_HEAD) or not text.isascii():
        raise TokenError("not the form of a token")
    try:
        sealed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise TokenError("not the form of a token") from error
    if base64.urlsafe_b64encode(sealed).rstrip(b"=").decode() != text:
        raise TokenError("not the form of a token")
    return sealed
