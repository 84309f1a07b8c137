"""Sessions of the web console: a sealed cookie that stands for an access key for some minutes.

The node stores nothing about a session. The cookie names the key under an HMAC of the mesh's secret, so every
process of every node can open it, and nothing but a node can make one. It contains no secret key. The rights
are those that the key has at each request; a session ends when its key is disabled, replaced or removed, when
the sessions of the key or of its user are revoked, and when its time is over.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING, Final

import msgspec

from meshwire.errors import S3Error
from meshwire.sigv4 import Credential

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.auth.identity import Identity
    from meshd.util.clock import Clock

IDLE_SECONDS: Final = 1800
"""A session ends this long after the page last renewed it; pages renew it while somebody uses them."""
MAX_SECONDS: Final = 12 * 3600
"""A session is never renewed beyond this time after the sign-in."""
MAX_COOKIE: Final = 3800  # browsers keep cookies of up to 4096 bytes, name and attributes included
_CODE_BYTES: Final = 32
_COOKIE_KEY, _CSRF_KEY = "console cookie", "console csrf"
_ENDED: Final = "The session has ended: sign in again."


class _Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a cookie. Times are in seconds since 1970. `token`: the session token of temporary
    credentials; `mark`: of a permanent key, its fingerprint at the sign-in."""

    access_key: str
    token: str
    signed_in: int
    expires: int
    mark: bytes


class ConsoleSession(msgspec.Struct, frozen=True):
    """An open session. `credential` signs requests for it; `expires` is in seconds since 1970; `csrf` is the
    text that the page sends back with each of its requests."""

    identity: Identity
    credential: Credential
    expires: int
    csrf: str

    def __repr__(self) -> str:
        return f"<ConsoleSession of {self.identity.user_id}>"


class ConsoleSessions:
    """Makes and opens cookies. One per process. `derive` derives keys from the mesh's secret."""

    def __init__(self, credentials: CredentialService, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._credentials, self._derive, self._clock = credentials, derive, clock

    def sign_in(self, access_key: str, secret_key: str, token: str) -> str:
        """Return the cookie of a new session. `token` is empty for a permanent key.

        Raises S3Error AccessDenied for a wrong pair, with the same words whether the key exists or not.
        """
        try:
            known = self._credentials.resolve(access_key, token or None)
        except S3Error:
            hmac.compare_digest(secret_key.encode(), b"-" * 40)  # an unknown key costs the same time
            known = None
        if known is None or not hmac.compare_digest(known.secret_key.encode(), secret_key.encode()):
            raise S3Error("AccessDenied", "The access key does not exist, or the secret key is wrong.")
        now = self._clock.now_ms() // 1000
        mark = b"" if token else self._credentials.key_mark(access_key)
        return self._seal(_Claims(access_key, token, now, now + IDLE_SECONDS, mark))

    def open(self, cookie: str) -> ConsoleSession:
        """Return the session of a cookie. Raises S3Error AccessDenied if it has ended or is forged."""
        claims = self._claims(cookie)
        if self._clock.now_ms() // 1000 >= claims.expires:
            raise S3Error("AccessDenied", _ENDED)
        if not claims.token and self._credentials.key_mark(claims.access_key) != claims.mark:
            raise S3Error("AccessDenied", _ENDED)
        try:
            known = self._credentials.resolve(claims.access_key, claims.token or None)
        except S3Error as error:
            raise S3Error("AccessDenied", _ENDED) from error
        credential = Credential(claims.access_key, known.secret_key, claims.token or None)
        csrf = hmac.digest(self._derive(_CSRF_KEY), self._csrf_text(claims), "sha256").hex()
        return ConsoleSession(known.identity, credential, claims.expires, csrf)

    def renew(self, cookie: str) -> str:
        """Return the cookie with a later end. Raises S3Error AccessDenied if the session has ended."""
        self.open(cookie)
        claims = self._claims(cookie)
        now = self._clock.now_ms() // 1000
        latest = claims.signed_in + MAX_SECONDS
        return self._seal(msgspec.structs.replace(claims, expires=min(now + IDLE_SECONDS, latest)))

    @staticmethod
    def _csrf_text(claims: _Claims) -> bytes:
        return f"{claims.access_key}\0{claims.signed_in}\0".encode() + claims.mark

    def _seal(self, claims: _Claims) -> str:
        payload = msgspec.msgpack.encode(claims)
        cookie = base64.urlsafe_b64encode(self._code(payload) + payload).rstrip(b"=").decode()
        if len(cookie) > MAX_COOKIE:
            raise S3Error(
                "AccessDenied",
                "These temporary credentials are too long for a cookie: sign in with other credentials.",
            )
        return cookie

    def _claims(self, cookie: str) -> _Claims:
        try:
            sealed = base64.b64decode(cookie + "=" * (-len(cookie) % 4), altchars=b"-_", validate=True)
            code, payload = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
            if not hmac.compare_digest(code, self._code(payload)):
                raise S3Error("AccessDenied", _ENDED)
            return msgspec.msgpack.decode(payload, type=_Claims)
        except (binascii.Error, ValueError) as error:  # msgspec's errors are ValueErrors
            raise S3Error("AccessDenied", _ENDED) from error

    def _code(self, payload: bytes) -> bytes:
        return hmac.digest(self._derive(_COOKIE_KEY), payload, "sha256")
