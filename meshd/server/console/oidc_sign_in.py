"""Sign-in to the console at an identity provider: OpenID Connect's authorization code flow with PKCE.

The node redirects the browser to the provider of the configured role; the provider redirects it back with a
code. The node exchanges the code for an ID token, and the token for temporary credentials of the role, with
the same checks as for any web identity. The state of a sign-in is in a sealed cookie that expires after some
minutes; the node stores nothing.
https://openid.net/specs/openid-connect-core-1_0.html#CodeFlowAuth, RFC 7636
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

import msgspec

from meshd.auth.web_identity.issuer_client import IssuerError, discover_sign_in, exchange_code
from meshd.auth.web_identity.token_validation import TokenRejectedError, parse_token
from meshwire.errors import S3Error
from meshwire.sts_query import StsError, WebIdentityRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.auth.identities.console_sessions import ConsoleSessions
    from meshd.auth.web_identity.exchange import WebIdentityExchange
    from meshd.config import ConsoleOidc
    from meshd.control.roles import IdentityProvider, RoleTable
    from meshd.util.clock import Clock

COOKIE_SECONDS: Final = 600
_KEY: Final = "console oidc"
_CODE_BYTES: Final = 32
_MAX_CODE: Final = 4096
_log = logging.getLogger("meshd.auth")


class _Begun(msgspec.Struct, frozen=True, array_like=True):
    """A sign-in in progress. `verifier`: that of PKCE; `expires` in seconds since 1970."""

    state: str
    nonce: str
    verifier: str
    expires: int


class OidcSignIn:
    """Signs people in at the provider of a role. One per process. `derive` derives keys from the mesh's
    secret."""

    def __init__(
        self,
        settings: ConsoleOidc,
        roles: RoleTable,
        exchange: WebIdentityExchange,
        sessions: ConsoleSessions,
        derive: Callable[[str], bytes],
        clock: Clock,
    ) -> None:
        self._settings, self._roles, self._exchange = settings, roles, exchange
        self._sessions, self._derive, self._clock = sessions, derive, clock

    def __repr__(self) -> str:
        return f"<OidcSignIn as {self._settings.role}>"

    async def begin(self, callback: str) -> tuple[str, str]:
        """Return the URL to which the browser goes, and the cookie of the sign-in. `callback`: the URL to
        which it comes back. Raises S3Error AccessDenied, ServiceUnavailable."""
        provider = self._provider()
        try:
            endpoints = await discover_sign_in(provider)
        except IssuerError as error:
            raise _unreachable(provider, error) from None
        begun = _Begun(
            secrets.token_urlsafe(24),
            secrets.token_urlsafe(24),
            secrets.token_urlsafe(48),
            self._clock.now_ms() // 1000 + COOKIE_SECONDS,
        )
        challenge = base64.urlsafe_b64encode(hashlib.sha256(begun.verifier.encode()).digest()).rstrip(b"=")
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": callback,
            "scope": "openid",
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": challenge.decode(),
            "code_challenge_method": "S256",
        }
        joint = "&" if "?" in endpoints.authorization else "?"
        return f"{endpoints.authorization}{joint}{urlencode(query)}", self._seal(begun)

    async def finish(self, query: str, cookie: str, callback: str) -> str:
        """Return the cookie of a console session. Raises S3Error AccessDenied, ServiceUnavailable."""
        begun = self._open(cookie)
        try:
            given = dict(parse_qsl(query, max_num_fields=16))
        except ValueError:  # more fields than any provider sends
            given = {}
        if not hmac.compare_digest(given.get("state", "").encode(errors="replace"), begun.state.encode()):
            raise S3Error(
                "AccessDenied", "This sign-in was not started in this browser: start again at /console."
            )
        code = given.get("code", "")
        if not code or len(code) > _MAX_CODE:
            why = given.get("error", "no code")[:80]
            raise S3Error(
                "AccessDenied", f"The identity provider did not sign you in ({why}). Try again at /console."
            )
        provider = self._provider()
        token = await self._id_token(provider, code, begun.verifier, callback)
        wanted = WebIdentityRequest(self._settings.role, "console", token)
        try:
            answer = (await self._exchange.exchange(wanted)).answer
        except StsError as error:
            raise S3Error("AccessDenied", f"You may not sign in here: {error.message}") from None
        self._check_token(token, begun.nonce)
        return self._sessions.sign_in(answer.access_key, answer.secret_key, answer.session_token)

    async def _id_token(self, provider: IdentityProvider, code: str, verifier: str, callback: str) -> str:
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": callback,
            "client_id": self._settings.client_id,
            "code_verifier": verifier,
        }
        try:
            if self._settings.secret is not None:
                fields["client_secret"] = self._settings.secret.read_text(encoding="utf-8").strip()
            endpoints = await discover_sign_in(provider)
            return await exchange_code(provider, endpoints.token, fields)
        except (IssuerError, OSError) as error:
            raise _unreachable(provider, error) from None

    def _check_token(self, token: str, nonce: str) -> None:
        """Require that a token, which is known to be valid, was made for this sign-in of this client. Raises
        S3Error AccessDenied."""
        try:
            claims = parse_token(token).claims
        except TokenRejectedError:
            claims = {}
        audience = claims.get("aud")
        clients = audience if isinstance(audience, list) else [audience]
        same = hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode())
        if not same or self._settings.client_id not in clients:
            raise S3Error(
                "AccessDenied",
                "The identity provider sent a token of another sign-in or client. Try again at /console.",
            )

    def _provider(self) -> IdentityProvider:
        role = self._roles.roles().get(self._settings.role)
        provider = None if role is None else self._roles.providers().get(role.provider)
        if provider is None:
            raise S3Error(
                "AccessDenied",
                f"The role {self._settings.role} of console-oidc-role, or its provider, does not exist: ask "
                "root to add it.",
            )
        return provider

    def _seal(self, begun: _Begun) -> str:
        payload = msgspec.msgpack.encode(begun)
        code = hmac.digest(self._derive(_KEY), payload, "sha256")
        return base64.urlsafe_b64encode(code + payload).rstrip(b"=").decode()

    def _open(self, cookie: str) -> _Begun:
        again = S3Error(
            "AccessDenied", "The sign-in has expired, or was started elsewhere: start again at /console."
        )
        try:
            sealed = base64.b64decode(cookie + "=" * (-len(cookie) % 4), altchars=b"-_", validate=True)
            code, payload = sealed[:_CODE_BYTES], sealed[_CODE_BYTES:]
            if not hmac.compare_digest(code, hmac.digest(self._derive(_KEY), payload, "sha256")):
                raise again
            begun = msgspec.msgpack.decode(payload, type=_Begun)
        except (binascii.Error, ValueError):
            raise again from None
        if self._clock.now_ms() // 1000 >= begun.expires:
            raise again
        return begun


def _unreachable(provider: IdentityProvider, error: Exception) -> S3Error:
    _log.warning("cannot sign users in", extra={"idp": provider.name, "why": str(error)[:300]})
    return S3Error(
        "ServiceUnavailable",
        f"The identity provider {provider.name} is unreachable or returned an error. Try again; the node's "
        "log has the details.",
    )
