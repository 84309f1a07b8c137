"""Keys fetched from issuers that are honest, down, slow, or lie; and how long they are used."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from meshd.auth.web_identity import issuer_client
from meshd.auth.web_identity.issuer_client import IssuerError, fetch_key_set
from meshd.auth.web_identity.key_cache import KEEP_SECONDS, RENEW_SECONDS, RETRY_SECONDS, KeyCache
from meshd.auth.web_identity.key_set import MAX_KEY_SET_BYTES, parse_key_set
from meshd.control.roles import IdentityProvider
from tests.support.certificates import Authority
from tests.support.manual_clock import ManualClock
from tests.support.oidc_issuer import DISCOVERY, KEYS, OidcIssuer, SigningKey, key_set, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

    from meshd.auth.web_identity.key_set import KeySet

FIRST, SECOND = SigningKey("first", "ES256"), SigningKey("second", "ES256")


@pytest.fixture
def issuer() -> Iterator[OidcIssuer]:
    with OidcIssuer() as running:
        running.keys = [FIRST]
        yield running


def provider(running: OidcIssuer, **more: Any) -> IdentityProvider:
    fields = {"name": "p", "issuer": running.url, "audiences": ("mesh",), "allow_http": True, **more}
    return IdentityProvider(**fields)


def fetch(wanted: IdentityProvider) -> KeySet:
    return asyncio.run(fetch_key_set(wanted))


def refusal(wanted: IdentityProvider) -> str:
    with pytest.raises(IssuerError) as refused:
        fetch(wanted)
    return str(refused.value)


def test_keys_are_found_by_discovery_or_where_the_provider_says(issuer: OidcIssuer) -> None:
    assert [key.key_id for key in fetch(provider(issuer)).keys] == ["first"]
    assert issuer.asked == [DISCOVERY, KEYS]
    assert fetch(provider(issuer, jwks_uri=issuer.url + KEYS)).keys
    assert issuer.asked[2:] == [KEYS]


def test_http_needs_permission_and_https_a_known_authority(issuer: OidcIssuer, tmp_path: Path) -> None:
    assert "https://" in refusal(provider(issuer, allow_http=False))
    assert not issuer.asked
    authority = Authority(tmp_path)
    pair, context = authority.issue(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with OidcIssuer(context) as secure:
        assert "certificate" in refusal(provider(secure, allow_http=False))
        assert fetch(provider(secure, allow_http=False, ca=authority.cert.read_text())).keys
        # What it discovers must be https, too.
        where = json.dumps({"issuer": secure.url, "jwks_uri": issuer.url + KEYS})
        secure.documents[DISCOVERY] = lambda handler: send(handler, where)
        trusted = provider(secure, allow_http=False, ca=authority.cert.read_text())
        assert "https://" in refusal(trusted)


def discovery(running: OidcIssuer, **changes: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    document = {"issuer": running.url, "jwks_uri": running.url + KEYS, **changes}
    return lambda handler: send(handler, json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"issuer": "https://other.example"}, "another issuer"),
        ({"issuer": None}, "another issuer"),
        ({"jwks_uri": None}, "jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "https://"),
        ({"jwks_uri": "http://user:secret@127.0.0.1/"}, "user"),
        ({"jwks_uri": "http://127.0.0.1:1/keys"}, "private network"),
        ({"jwks_uri": "http://localhost:22/"}, "private network"),
        ({"jwks_uri": "http://169.254.169.254/latest/meta-data"}, "private network"),
        ({"jwks_uri": "http://[::1]/keys"}, "private network"),
        ({"jwks_uri": "http://0.0.0.0/keys"}, "private network"),
        ({"jwks_uri": "http://127.0.0.1:x/keys"}, "URL"),
        ({"jwks_uri": "http://127.0.0.1/ke ys\r\nHost: x"}, "blank or control"),
    ],
)
def test_a_discovery_document_that_lies_is_refused(
    issuer: OidcIssuer, changes: dict[str, Any], told: str
) -> None:
    issuer.documents[DISCOVERY] = discovery(issuer, **changes)
    assert told in refusal(provider(issuer))
    assert issuer.asked == [DISCOVERY]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(issuer: OidcIssuer, status: int) -> None:
    moved = {"Location": issuer.url + "/elsewhere"}
    issuer.documents[KEYS] = lambda handler: send(handler, "{}", status, moved)
    assert "redirects are not followed" in refusal(provider(issuer))
    assert "/elsewhere" not in issuer.asked


@pytest.mark.parametrize("body", ["", "{", "[]", '{"keys": []}', '{"keys": "x"}', "\x00", "<html></html>"])
def test_documents_that_are_none_are_refused(issuer: OidcIssuer, body: str) -> None:
    issuer.documents[KEYS] = lambda handler: send(handler, body)
    assert refusal(provider(issuer))
    issuer.documents = {DISCOVERY: lambda handler: send(handler, body)}
    assert refusal(provider(issuer))


def test_errors_of_the_issuer_are_told(issuer: OidcIssuer) -> None:
    issuer.documents[KEYS] = lambda handler: send(handler, "{}", 503)
    assert "503" in refusal(provider(issuer))
    assert refusal(provider(issuer, issuer="http://127.0.0.1:1"))
    assert refusal(provider(issuer, issuer="http://no-such-host.invalid"))


def test_long_documents_are_not_read_to_their_end(issuer: OidcIssuer) -> None:
    issuer.documents[KEYS] = lambda handler: send(handler, " " * (MAX_KEY_SET_BYTES + 1))
    assert "more than" in refusal(provider(issuer))

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not issuer.stopping.is_set():
            handler.wfile.write(b" " * 4096)

    issuer.documents[KEYS] = endless
    assert "more than" in refusal(provider(issuer))


def test_an_issuer_that_never_ends_is_given_up(issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issuer_client, "FETCH_TIMEOUT", 0.3)

    def silent(handler: BaseHTTPRequestHandler) -> None:
        issuer.stopping.wait(20)

    def drop_by_drop(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not issuer.stopping.wait(0.02):
            handler.wfile.write(b" ")

    def endless_head(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not issuer.stopping.wait(0.02):
            handler.wfile.write(b"X-More: x\r\n")

    for way in (silent, drop_by_drop, endless_head):
        issuer.documents[KEYS] = way
        assert refusal(provider(issuer))


# --- the cache ----------------------------------------------------------------------------------------------


class Source:
    """What a cache fetches from: `keys` or an error, perhaps after a gate opens."""

    def __init__(self) -> None:
        self.keys: list[SigningKey] = [FIRST]
        self.down = False
        self.fetched = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, _: IdentityProvider) -> KeySet:
        self.fetched += 1
        await self.gate.wait()
        if self.down:
            raise IssuerError("it is down")
        return parse_key_set(key_set(*self.keys))


def with_cache(scenario: Callable[[KeyCache, Source, ManualClock], Any]) -> None:
    async def run() -> None:
        clock, source = ManualClock(), Source()
        cache = KeyCache(clock, source.fetch)
        try:
            await scenario(cache, source, clock)
        finally:
            await cache.aclose()

    asyncio.run(run())


PROVIDER = IdentityProvider(name="p", issuer="https://issuer.example", audiences=("mesh",))


def test_many_requests_wait_for_one_fetch() -> None:
    async def scenario(cache: KeyCache, source: Source, clock: ManualClock) -> None:
        found = await asyncio.gather(*(cache.current_keys(PROVIDER) for _ in range(50)))
        assert source.fetched == 1
        assert len({id(keys) for keys in found}) == 1

    with_cache(scenario)


def test_old_keys_are_used_while_new_ones_are_fetched() -> None:
    async def scenario(cache: KeyCache, source: Source, clock: ManualClock) -> None:
        first = await cache.current_keys(PROVIDER)
        clock.advance(RENEW_SECONDS)
        source.gate.clear()
        assert await cache.current_keys(PROVIDER) is first
        await asyncio.sleep(0)
        assert source.fetched == 2
        source.gate.set()
        await asyncio.sleep(0.01)
        assert await cache.current_keys(PROVIDER) is not first

    with_cache(scenario)


def test_unknown_key_ids_cause_one_fetch_every_few_seconds() -> None:
    async def scenario(cache: KeyCache, source: Source, clock: ManualClock) -> None:
        first = await cache.current_keys(PROVIDER)
        source.keys = [FIRST, SECOND]
        assert await cache.newer_keys(PROVIDER, first) is None  # asked a moment ago
        assert source.fetched == 1
        clock.advance(RETRY_SECONDS)
        newer = await cache.newer_keys(PROVIDER, first)
        assert newer is not None
        assert newer.has_key_id("second")
        for _ in range(100):
            await cache.newer_keys(PROVIDER, newer)
        assert source.fetched == 2

    with_cache(scenario)


def test_keys_outlive_an_issuer_that_is_down_for_a_bounded_time() -> None:
    async def scenario(cache: KeyCache, source: Source, clock: ManualClock) -> None:
        first = await cache.current_keys(PROVIDER)
        source.down = True
        clock.advance(KEEP_SECONDS - 1)
        assert await cache.current_keys(PROVIDER) is first
        await asyncio.sleep(0.01)
        clock.advance(RETRY_SECONDS)
        with pytest.raises(IssuerError, match="it is down"):
            await cache.current_keys(PROVIDER)
        source.down = False
        clock.advance(RETRY_SECONDS)
        assert await cache.current_keys(PROVIDER)

    with_cache(scenario)


def test_a_changed_provider_has_no_keys_of_the_old_one() -> None:
    async def scenario(cache: KeyCache, source: Source, clock: ManualClock) -> None:
        await cache.current_keys(PROVIDER)
        other = IdentityProvider(name="p", issuer="https://other.example", audiences=("mesh",))
        source.down = True
        with pytest.raises(IssuerError):
            await cache.current_keys(other)
        stored = IdentityProvider(
            name="p", issuer="https://other.example", audiences=("mesh",), jwks=key_set(SECOND)
        )
        fetched = source.fetched
        found = await cache.current_keys(stored)
        assert found.has_key_id("second")
        assert await cache.newer_keys(stored, found) is None
        assert source.fetched == fetched

    with_cache(scenario)
