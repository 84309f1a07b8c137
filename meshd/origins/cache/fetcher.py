"""Fetcher: fetches each piece from its origin once, for all waiters in every process of the node.

The hash of a key determines its worker, which alone fetches, checks, writes back and evicts the key. Fetch
limits apply per process and per bucket, so a slow origin delays only its own bucket. Data received before a
write to the key is never cached after that write.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece, cache_name
from meshd.origins.cache.in_flight import FetchSpool, InFlightPiece
from meshd.origins.client.origin_api import (
    OriginChangedError,
    OriginDownError,
    OriginError,
    OriginMissingError,
    OriginPieceError,
)
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks, SingleFlight

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.cache.peer_cache import PeerCacheClient
    from meshd.origins.client.origin_api import ObjectFacts, OriginResponse
    from meshd.origins.client.origin_pool import OriginPool


class FetchLimits:
    """Limits concurrent fetches: `total` for all buckets, `each` per bucket."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = asyncio.Semaphore(total), each
        self._shares: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def __repr__(self) -> str:
        return f"<FetchLimits of {len(self._shares)} buckets>"

    @asynccontextmanager
    async def acquire_slot(self, bucket: str) -> AsyncGenerator[None, None]:
        """Hold a slot for the length of the block."""
        share, users = self._shares.get(bucket, (asyncio.Semaphore(self._each), 0))
        self._shares[bucket] = (share, users + 1)
        try:
            async with share, self._total:
                yield
        finally:
            share, users = self._shares[bucket]
            if users == 1:
                del self._shares[bucket]
            else:
                self._shares[bucket] = (share, users - 1)


_log = logging.getLogger("meshd.origins")
_AT_ONCE: Final = 64  # concurrent fetches of one process
_EACH: Final = 40  # of them for one bucket: waiters for a slow origin leave room for others
_TRIES: Final = 4  # attempts for a piece whose bytes stop arriving
_REMEMBERED: Final = 100_000  # keys whose last write is remembered
_SPARED: Final = 15.0  # seconds after a disk failure during which pieces are received in memory
_PAUSE: Final = 0.1  # seconds before the second attempt, doubled for each further one

PieceName = tuple[str, str, int]


class Fetcher:
    """Fetches the keys of this process. One instance per worker."""

    def __init__(
        self,
        origins: OriginPool,
        cache_store: CacheStore,
        manager: CacheManagerClient,
        cache_client: PeerCacheClient | None = None,
    ) -> None:
        self._origins, self._cache_store, self._cache_manager = origins, cache_store, manager
        self._peer_cache = cache_client
        self._flights: dict[PieceName, InFlightPiece] = {}
        self._checks: SingleFlight[tuple[str, str], ObjectFacts] = SingleFlight()
        self._slots = FetchLimits(_AT_ONCE, _EACH)
        self._writes: dict[tuple[str, str], int] = {}  # number of a key's last write
        self._numbers = itertools.count(1)
        self._spared_until = 0.0
        self._before = 0  # number for keys whose own was dropped
        self._tasks = BackgroundTasks("fetcher")

    def __repr__(self) -> str:
        return f"<Fetcher {len(self._flights)} under way>"

    def start_fetch(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        """Return the flight of a piece, existing or new, acquired for the caller."""
        name = (cache_name(bucket), key, number)
        flight = self._flights.get(name)
        if flight is not None and flight.error is None and _serves(flight, etag):
            metrics.origin_joined.inc()
            return flight.acquire()
        flight = self._flights[name] = InFlightPiece()
        self._tasks.spawn(self._run(bucket, key, number, etag, flight), "fetch")
        return flight.acquire()

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts:
        """Return the object's current facts at the origin. Raises OriginError."""
        facts, _ = await self._checks.run((cache_name(bucket), key), lambda: self._check(bucket, key))
        return facts

    async def _check(self, bucket: Bucket, key: str) -> ObjectFacts:
        metrics.origin_checks.inc()
        writes = self._count(bucket, key)
        try:
            facts = await self._origins.origin_for(bucket).head(key)
        except OriginMissingError:
            if writes == self._count(bucket, key):
                await self._note_deleted(bucket, key)
            raise
        if writes == self._count(bucket, key):
            await self._learn(bucket, key, facts)
        return facts

    async def _run(self, bucket: Bucket, key: str, number: int, etag: str, flight: InFlightPiece) -> None:
        name, writes = (cache_name(bucket), key, number), self._count(bucket, key)
        draft = FetchSpool(flight, in_memory=asyncio.get_running_loop().time() < self._spared_until)
        try:
            async with self._slots.acquire_slot(bucket.name):
                if await self._serve_cached(bucket, key, number, etag, flight):
                    return
                await self._fetch(bucket, key, number, etag, draft, writes)
                if flight.error is None:
                    await self._keep(bucket, key, number, draft, writes)
        except StoreError as error:
            self._spared_until = asyncio.get_running_loop().time() + _SPARED
            _log.warning(
                "the cache cannot write fetched data", extra={"bucket": bucket.name, "why": str(error)}
            )
            flight.fail(OriginPieceError(f"the cache cannot write data fetched from the origin: {error}"))
        except Exception as error:
            if not isinstance(error, OriginError):
                _log.exception("a fetch failed", extra={"bucket": bucket.name})
            if isinstance(error, OriginDownError):
                self._origins.failure_log(bucket).record_failure(error)
            if isinstance(error, OriginChangedError):  # the cached facts are outdated
                with suppress(OriginError):
                    await self.check_origin(bucket, key)
            flight.fail(error if isinstance(error, OriginError) else OriginDownError(str(error)))
        finally:
            if not flight.done:
                flight.fail(OriginDownError("the fetch was cancelled; retry"))
            if self._flights.get(name) is flight:
                del self._flights[name]
            await draft.aclose()
            flight.release()

    async def _serve_cached(
        self, bucket: Bucket, key: str, number: int, etag: str, flight: InFlightPiece
    ) -> bool:
        """Serve the flight from the cache if the piece was cached after the caller's lookup."""
        facts = self._cache_store.cached_facts(bucket, key)
        if facts is None or (
            facts.etag != etag if etag else not self._cache_store.is_fresh(bucket, key, facts.etag)
        ):
            return False
        whole = facts.size <= CHUNK_BYTES
        if whole and number:
            return False
        found = await asyncio.to_thread(
            self._cache_store.bytes_of, bucket, key, facts, -1 if whole else number
        )
        if found is None:
            return False
        flight.set_response(facts, len(found))
        flight.append_bytes(found)
        flight.finish()
        return True

    async def _fetch(
        self, bucket: Bucket, key: str, number: int, etag: str, draft: FetchSpool, writes: int
    ) -> None:
        flight = draft.flight
        lent = (
            None
            if self._peer_cache is None
            else await self._peer_cache.fetch_piece(bucket, key, number, etag)
        )
        if lent is None:
            metrics.origin_fetches.inc()
        for attempt in range(_TRIES):
            try:
                reply = lent or await self._request_piece(bucket, key, number, etag, flight)
                if flight.facts is None:
                    if lent is None and writes == self._count(bucket, key):
                        await self._learn(bucket, key, reply.facts)
                    await draft.begin_spool(self._cache_store, bucket, key, number, reply)
                lent = None
                await draft.receive(reply)
                flight.check()
            except OriginMissingError:
                if not flight.have and writes == self._count(bucket, key):
                    await self._note_deleted(bucket, key)
                raise
            except OriginDownError:
                lent = None
                # Failures before the first response are retried by obstore.
                if attempt == _TRIES - 1 or flight.facts is None:
                    raise
                await asyncio.sleep(_PAUSE * 2**attempt)
            else:
                flight.finish()
                return

    async def _request_piece(
        self, bucket: Bucket, key: str, number: int, etag: str, flight: InFlightPiece
    ) -> OriginResponse:
        """Request the missing bytes of a piece from the origin."""
        seen, start = flight.facts.etag if flight.facts else etag, number * CHUNK_BYTES
        origin = self._origins.origin_for(bucket)
        return await origin.get(key, start + flight.have, CHUNK_BYTES - flight.have, etag=seen)

    async def _learn(self, bucket: Bucket, key: str, facts: ObjectFacts) -> None:
        """Record the origin's facts; a cached copy of another version is dropped."""
        self._cache_store.mark_fresh(bucket, key, facts.etag)
        held = self._cache_store.cached_facts(bucket, key)
        if held is not None and held.etag != facts.etag:
            await self._drop(bucket, key)

    async def _note_deleted(self, bucket: Bucket, key: str) -> None:
        self._cache_store.mark_fresh(bucket, key, "")
        await self._drop(bucket, key)

    async def _drop(self, bucket: Bucket, key: str) -> None:
        with suppress(StoreError):
            await self._cache_store.drop_object(bucket, key)

    async def _keep(self, bucket: Bucket, key: str, number: int, draft: FetchSpool, writes: int) -> None:
        flight = draft.flight
        facts = flight.facts
        assert facts is not None
        whole = facts.size <= CHUNK_BYTES
        if (whole and number) or writes != self._count(bucket, key):
            return
        piece = Piece(cache_name(bucket), key, -1 if whole else number, flight.length)
        if not await self._cache_manager.admit_piece(piece):
            metrics.cache_refused.inc()
            return
        if writes != self._count(bucket, key):
            return
        try:
            await self._cache_store.commit_piece(
                bucket,
                key,
                number,
                facts,
                await draft.finished_writer(self._cache_store, bucket, key, number),
            )
        except StoreError as error:
            _log.warning("cannot cache fetched data", extra={"bucket": bucket.name, "why": str(error)})
            return
        if writes != self._count(bucket, key):  # a write happened meanwhile
            await self._drop(bucket, key)

    # --- writes

    def _count(self, bucket: Bucket, key: str) -> int:
        return self._writes.get((cache_name(bucket), key), self._before)

    async def forget_object(self, bucket: Bucket, key: str) -> None:
        """Forget an object before and after a write to it: cached knowledge is void from here on, and pieces
        in flight are not cached."""
        name = (cache_name(bucket), key)
        if len(self._writes) >= _REMEMBERED:
            self._before = next(self._numbers)
            self._writes.clear()
        self._writes[name] = next(self._numbers)
        for flown in [flown for flown in self._flights if flown[:2] == name]:
            del self._flights[flown]
        await self._drop(bucket, key)
        self._cache_store.record_write(bucket, key)

    async def aclose(self) -> None:
        await self._tasks.aclose()


def _serves(flight: InFlightPiece, etag: str) -> bool:
    return not etag or flight.facts is None or flight.facts.etag == etag
