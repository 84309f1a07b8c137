"""Cache of issuers' keys, one per process: fetched in tasks of their own, renewed in time, kept for a while.

Law: a request never fetches; it waits for the one fetch of its provider, for a bounded time. Keys are fetched
again when they are old, and when a token has an unknown key id, but at most every `RETRY_SECONDS`, so that
invented key ids cost the issuer nothing. While the issuer does not answer, known keys are used until they are
`KEEP_SECONDS` old; then nothing from it is accepted, because a key may have been withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.auth.web_identity.issuer_client import FETCH_TIMEOUT, IssuerError, fetch_key_set
from meshd.auth.web_identity.key_set import KeySetError, parse_key_set
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.auth.web_identity.key_set import KeySet
    from meshd.control.roles import IdentityProvider
    from meshd.util.clock import Clock

RENEW_SECONDS: Final = 300.0
"""Age from which on keys are fetched again, while the old ones are used."""
RETRY_SECONDS: Final = 10.0
"""Least time between two fetches of one provider's keys."""
KEEP_SECONDS: Final = 24 * 3600.0
"""Age up to which keys are used although the issuer does not answer."""
_log = logging.getLogger("meshd.auth")


class _Entry(msgspec.Struct):
    """The keys of one value of a provider. Times are on the monotonic clock."""

    provider: IdentityProvider
    keys: KeySet | None = None
    fetched: float = float("-inf")
    tried: float = float("-inf")
    error: str = ""
    fetching: asyncio.Task[None] | None = None


class KeyCache:
    """The keys of every provider that was asked for. Use it on one event loop."""

    def __init__(
        self,
        clock: Clock,
        fetch: Callable[[IdentityProvider], Awaitable[KeySet]] = fetch_key_set,
    ) -> None:
        self._clock, self._fetch = clock, fetch
        self._entries: dict[str, _Entry] = {}
        self._tasks = BackgroundTasks("issuer keys")

    def __repr__(self) -> str:
        return f"<KeyCache of {len(self._entries)} providers>"

    async def aclose(self) -> None:
        """Cancel running fetches."""
        await self._tasks.aclose()

    async def current_keys(self, provider: IdentityProvider) -> KeySet:
        """Return the keys of a provider. Raises IssuerError."""
        entry, now = self._entry(provider), self._clock.monotonic()
        if entry.keys is not None and now - entry.fetched < KEEP_SECONDS:
            if now - entry.fetched >= RENEW_SECONDS:
                self._begin_fetch(entry)
            return entry.keys
        await self._wait(entry)
        if entry.keys is None or self._clock.monotonic() - entry.fetched >= KEEP_SECONDS:
            raise IssuerError(entry.error or "the issuer's keys are not known")
        return entry.keys

    async def newer_keys(self, provider: IdentityProvider, known: KeySet) -> KeySet | None:
        """Return other keys than `known`, which lack a key; None if there are none, or if the issuer was
        asked
        a moment ago."""
        entry = self._entry(provider)
        if provider.jwks:
            return None
        if entry.keys is known:
            await self._wait(entry)
        return None if entry.keys is known else entry.keys

    def _entry(self, provider: IdentityProvider) -> _Entry:
        """Return the entry of a provider, a new one if the provider has changed."""
        entry = self._entries.get(provider.name)
        if entry is None or entry.provider != provider:
            entry = self._entries[provider.name] = _Entry(provider)
        if provider.jwks and entry.keys is None:
            try:
                entry.keys, entry.fetched = parse_key_set(provider.jwks), float("inf")
            except KeySetError as error:
                raise IssuerError(str(error)) from None
        return entry

    async def _wait(self, entry: _Entry) -> None:
        """Wait for a fetch, which is begun unless one ended a moment ago."""
        self._begin_fetch(entry)
        if entry.fetching is not None:
            await asyncio.wait((entry.fetching,), timeout=2 * FETCH_TIMEOUT)

    def _begin_fetch(self, entry: _Entry) -> None:
        now = self._clock.monotonic()
        if entry.fetching is None and now - entry.tried >= RETRY_SECONDS:
            entry.tried = now
            entry.fetching = self._tasks.spawn(self._renew(entry), entry.provider.name)

    async def _renew(self, entry: _Entry) -> None:
        try:
            entry.keys = await self._fetch(entry.provider)
        except IssuerError as error:
            entry.error = str(error)
            metrics.issuer_fetches.labels("failed").inc()
            _log.warning("cannot fetch an issuer's keys", extra={"idp": entry.provider.name, "why": error})
        else:
            entry.fetched, entry.error = self._clock.monotonic(), ""
            metrics.issuer_fetches.labels("ok").inc()
        finally:
            entry.fetching = None
