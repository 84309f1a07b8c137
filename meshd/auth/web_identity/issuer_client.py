"""Client of token issuers: fetches an issuer's discovery document and its key set.

Law: https only, unless the provider says otherwise; no redirects, no credentials, bounded in size and time.
The discovery document must name the issuer that it was fetched from. Keys at another host than the issuer's
are fetched only from public addresses, so that an issuer cannot make a node read its own network; a provider
that names the URL of its keys is not restricted, since an administrator wrote it.
https://openid.net/specs/openid-connect-discovery-1_0.html
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from meshd.auth.web_identity.key_set import MAX_KEY_SET_BYTES, KeySetError, parse_key_set
from meshd.rpc.http_connection import HttpConnection
from meshd.util.timeouts import timeout
from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from urllib.parse import SplitResult

    from meshd.auth.web_identity.key_set import KeySet
    from meshd.control.roles import IdentityProvider
    from meshd.rpc.http_connection import PeerUnreachableError, ResponseHead

FETCH_TIMEOUT: Final = 5.0
"""Seconds for one document, from the name lookup to its last byte."""
_DISCOVERY: Final = "/.well-known/openid-configuration"
_MAX_DISCOVERY_BYTES: Final = 64 << 10


class IssuerError(Exception):
    """The issuer's documents could not be fetched, or are not what they must be."""


async def fetch_key_set(provider: IdentityProvider) -> KeySet:
    """Return the present keys of a provider. Raises IssuerError."""
    url, restricted = provider.jwks_uri, False
    if not url:
        url = await _key_set_url(provider)
        restricted = urlsplit(url).netloc != urlsplit(provider.issuer).netloc
    body = await _fetch(url, provider, MAX_KEY_SET_BYTES, public_only=restricted)
    try:
        return parse_key_set(body)
    except KeySetError as error:
        raise IssuerError(f"{url}: {error}") from None


class SignInEndpoints(msgspec.Struct, frozen=True):
    """Where an issuer signs people in, and where it exchanges codes for tokens."""

    authorization: str
    token: str


async def discover_sign_in(provider: IdentityProvider) -> SignInEndpoints:
    """Return the endpoints for signing in by a code. Raises IssuerError."""
    document = await _discover(provider)
    found = [document.get(f"{name}_endpoint") for name in ("authorization", "token")]
    for url in found:
        if not isinstance(url, str):
            raise IssuerError(f"{provider.issuer} publishes no authorization_endpoint or no token_endpoint")
        check_url(url, allow_http=provider.allow_http)
    return SignInEndpoints(*map(str, found))


async def exchange_code(provider: IdentityProvider, url: str, fields: Mapping[str, str]) -> str:
    """Return the ID token that a token endpoint gives for a code (RFC 6749, 4.1.3). Raises IssuerError."""
    restricted = urlsplit(url).netloc != urlsplit(provider.issuer).netloc
    body = await _fetch(
        url, provider, _MAX_DISCOVERY_BYTES, public_only=restricted, form=urlencode(fields).encode()
    )
    token = _parse_document(url, body).get("id_token")
    if not isinstance(token, str):
        raise IssuerError(f"{url}: the answer has no ID token")
    return token


async def _key_set_url(provider: IdentityProvider) -> str:
    url = (await _discover(provider)).get("jwks_uri")
    if not isinstance(url, str):
        raise IssuerError(f"{provider.issuer}{_DISCOVERY} does not name the key set (jwks_uri)")
    return url


def _parse_document(where: str, body: bytes) -> dict[str, Any]:
    try:
        document = read_json(body.decode("utf-8"))
    except (PlanError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict):
        raise IssuerError(f"{where} is not a JSON document")
    return document


async def _discover(provider: IdentityProvider) -> dict[str, Any]:
    """Return the discovery document."""
    where = provider.issuer.rstrip("/") + _DISCOVERY
    body = await _fetch(where, provider, _MAX_DISCOVERY_BYTES, public_only=False)
    document = _parse_document(where, body)
    if document.get("issuer") != provider.issuer:
        raise IssuerError(f"{where} describes another issuer than the provider's; they must be equal")
    return document


def check_url(url: str, *, allow_http: bool) -> SplitResult:
    """Return the parts of a URL from which documents may be fetched. Raises IssuerError."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise IssuerError("an invalid URL") from None
    if parts.scheme not in (("http", "https") if allow_http else ("https",)):
        raise IssuerError("the URL must begin with https://" + (" or http://" if allow_http else ""))
    if not parts.hostname or parts.username is not None or parts.fragment or not _is_plain(url):
        raise IssuerError("the URL must have a host, and no user, fragment, blank or control character")
    return parts


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and " " not in url and len(url) <= 2048


async def _fetch(
    url: str, provider: IdentityProvider, limit: int, *, public_only: bool, form: bytes | None = None
) -> bytes:
    """GET a document, or POST a form."""
    try:
        where = check_url(url, allow_http=provider.allow_http)
        async with timeout(FETCH_TIMEOUT):
            tls = _tls_context(provider.ca)
            return await _request(where, tls, limit, public_only=public_only, form=form)
    except IssuerError as error:
        raise IssuerError(f"{url[:200]!r}: {error}") from None
    except TimeoutError:
        raise IssuerError(f"{url[:200]!r}: no complete answer within {FETCH_TIMEOUT:g} s") from None
    except (OSError, ValueError) as error:
        raise IssuerError(f"{url[:200]!r}: {str(error)[:200] or type(error).__name__}") from None


def _tls_context(ca: str) -> ssl.SSLContext:
    """Return a context that trusts the provider's authorities alone, or else the machine's. Raises
    ssl.SSLError."""
    return ssl.create_default_context(cadata=ca or None)


async def _request(
    where: SplitResult, tls: ssl.SSLContext, limit: int, *, public_only: bool, form: bytes | None
) -> bytes:
    loop = asyncio.get_running_loop()
    host, secure = where.hostname or "", where.scheme == "https"
    port = where.port or (443 if secure else 80)
    address = await _resolve(host, port, public_only=public_only)
    _, connection = await loop.create_connection(
        lambda: HttpConnection(host),
        address,  # the one that was checked, even if the name resolves to another one now
        port,
        ssl=tls if secure else None,
        server_hostname=host if secure else None,
    )
    try:
        target = (where.path or "/") + (f"?{where.query}" if where.query else "")
        document = _Document(limit)
        head = f"{'GET' if form is None else 'POST'} {target} HTTP/1.1\r\nHost: {where.netloc}\r\n"
        head += "Accept: application/json\r\nUser-Agent: meshd\r\nConnection: close\r\n"
        if form is not None:
            head += f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(form)}\r\n"
        sent = f"{head}\r\n".encode("ascii") + (form or b"")
        connection.send_request(document, sent, patience=FETCH_TIMEOUT)
        return await document.received
    finally:
        connection.abort()


async def _resolve(host: str, port: int, *, public_only: bool) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
    addresses = [str(each[4][0]) for each in found]
    if public_only:
        addresses = [each for each in addresses if ipaddress.ip_address(each).is_global]
    if not addresses:
        raise IssuerError(
            "the keys are at another host than the issuer, in a private network; set the provider's jwks_uri "
            "if that is meant"
        )
    return addresses[0]


class _Document:
    """The body of a response with status 200 and at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._pieces, self._size = limit, list[bytes](), 0
        self.received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_continue(self) -> None:
        """No request announces a body."""

    def on_head(self, head: ResponseHead) -> None:
        if 300 <= head.status < 400:
            self._fail(IssuerError(f"it answers {head.status}; redirects are not followed"))
        elif head.status != 200:
            self._fail(IssuerError(f"it answers {head.status}"))
        elif (head.length or 0) > self._limit:
            self._fail(IssuerError(f"the document has more than {self._limit:,} bytes"))

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self._fail(IssuerError(f"the document has more than {self._limit:,} bytes"))
        else:
            self._pieces.append(data)

    def on_end(self) -> None:
        if not self.received.done():
            self.received.set_result(b"".join(self._pieces))

    def on_error(self, error: PeerUnreachableError) -> None:
        self._fail(IssuerError(str(error)))

    def _fail(self, error: IssuerError) -> None:
        self._pieces.clear()
        if not self.received.done():
            self.received.set_exception(error)
