"""The cache manager: runs the eviction policy in one process; others query it over a Unix socket.

The policy decides, the cache store deletes, and compaction frees the space. Reads are reported in batches,
because nothing waits for them. Hit statistics cover the last ten minutes of all processes. The cache never
holds the only copy of anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.origins.cache.cache_store import (
    NEAR_CACHE_NAME,
    Piece,
    cache_name,
)
from meshd.origins.eviction.policy_api import EvictionSettings
from meshd.origins.eviction.segment_policy import SegmentPolicy
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import Method, ProcessLostError
from meshd.rpc.process_server import ProcessServer
from meshd.rpc.unix_messages import listen
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from meshd.control.buckets import BucketTable
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.eviction.policy_api import Eviction, Item
    from meshd.rpc.process_server import ServerCall


_MINUTES: Final = 10


class Usage(msgspec.Struct, frozen=True):
    """The reads of the last ten minutes: pieces read from the cache (`hits`) and pieces fetched (`misses`).
    `idle`: seconds since the last read, or since counting began."""

    hits: int
    misses: int
    idle: float


class HitStats:
    """Read statistics by cache name of the bucket."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._minutes: dict[str, deque[tuple[int, int, int]]] = {}
        self._last: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<HitStats of {len(self._last)} buckets>"

    def count_reads(self, cache_bucket: str, hits: int, misses: int, now: float) -> None:
        """Add reads of a bucket."""
        minutes = self._minutes.setdefault(cache_bucket, deque(maxlen=_MINUTES))
        minute = int(now // 60)
        if minutes and minutes[-1][0] == minute:
            _, before, missed = minutes.pop()
            hits, misses = hits + before, misses + missed
        minutes.append((minute, hits, misses))
        self._last[cache_bucket] = now

    def usage_of(self, cache_bucket: str, now: float) -> Usage:
        """Return the statistics of a bucket."""
        since = int(now // 60) - _MINUTES
        lately = [
            (hits, misses) for minute, hits, misses in self._minutes.get(cache_bucket, ()) if minute > since
        ]
        idle = now - self._last.get(cache_bucket, now if self._began is None else self._began)
        return Usage(sum(hits for hits, _ in lately), sum(misses for _, misses in lately), max(0.0, idle))

    def retain_only(self, shelves: Collection[str], now: float) -> None:
        """Forget all other buckets. Counting begins with the first call."""
        self._began = now if self._began is None else self._began
        for cache_bucket in self._last.keys() - set(shelves):
            del self._last[cache_bucket], self._minutes[cache_bucket]


class AdmitRequest(msgspec.Struct, frozen=True):
    """Asks whether a piece may stay in the cache."""

    piece: Piece


class ReadReport(msgspec.Struct, frozen=True):
    """Reports pieces that were read from the cache."""

    pieces: list[Piece]


class UsageRequest(msgspec.Struct, frozen=True):
    """Asks how much a bucket is read."""

    cache_bucket: str


# Ordered: an eviction that was decided is carried out even if the caller has given up.
ADMIT: Method[AdmitRequest, bool] = Method("admit", AdmitRequest, bool, ordered=True)
USAGE: Method[UsageRequest, Usage] = Method("usage", UsageRequest, Usage, ordered=True)
REPORT_READS: Method[ReadReport, None] = Method("report-reads", ReadReport, None, ordered=True)


_log = logging.getLogger("meshd.cache")
_BUNDLE: Final = 500  # reads in one report
_EVERY: Final = 0.5  # seconds between bundles
_DEAD_SHARE: Final = 0.3  # share of dead bytes from which a data file is compacted
_RESERVE: Final = 1 << 30  # bytes of the disks that stay free, or a twentieth of the disks if less
_PATIENCE: Final = 2.0  # seconds to wait for the manager's answer; after that, the piece is cached


class CacheManagerClient:
    """Access to the cache manager from other processes. Use on one event loop only; start `run`."""

    def __init__(self, path: Path) -> None:
        self._client = ProcessClient(path)
        self._notes: list[Piece] = []
        self._first, self._full = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        return f"<CacheManagerClient of {self._client!r}, {len(self._notes)} reads to report>"

    def record_read(self, piece: Piece) -> None:
        """Record that a piece was read from the cache."""
        if len(self._notes) < 100 * _BUNDLE:
            self._notes.append(piece)
            self._first.set()
        if len(self._notes) >= _BUNDLE:
            self._full.set()

    async def admit_piece(self, piece: Piece) -> bool:
        """Return whether a piece that was just read is cached; the manager makes room for it."""
        try:
            async with timeout(_PATIENCE):
                return await self._client.call(ADMIT, AdmitRequest(piece))
        except (ProcessLostError, TimeoutError):
            return True  # the manager is being restarted, and finds the piece when it starts

    async def bucket_usage(self, cache_bucket: str) -> Usage | None:
        """Return how much a bucket is read; None if that is unknown."""
        try:
            async with timeout(_PATIENCE):
                return await self._client.call(USAGE, UsageRequest(cache_bucket))
        except (ProcessLostError, TimeoutError):
            return None

    async def run(self) -> None:
        """Report reads until cancelled."""
        try:
            while True:
                await self._first.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._full.wait(), _EVERY)
                self._first.clear()
                self._full.clear()
                notes, self._notes = self._notes, []
                for at in range(0, len(notes), _BUNDLE):
                    with suppress(ProcessLostError):
                        await self._client.notify(REPORT_READS, ReadReport(notes[at : at + _BUNDLE]))
        finally:
            await self._client.aclose()


class CacheManager:
    """Applies the eviction policy. One instance per node, in the coordinator."""

    def __init__(self, cache_store: CacheStore, buckets: BucketTable, capacity: int, segment: int) -> None:
        self._cache_store, self._buckets = cache_store, buckets
        stats = cache_store.cache.stats()
        free = sum(disk.free for disk in stats.disks)
        self._most = capacity or max(1, (free + stats.live_bytes + stats.dead_bytes) // 2)
        self._policy = SegmentPolicy(
            EvictionSettings(self._most, min(segment, max(1 << 20, self._most // 16)))
        )
        self._pins: set[Item] = set()
        self._planned: dict[str, int] = {}  # pieces of the current epoch
        self._numbers: dict[tuple[str, int], int] = {}
        self._uses = HitStats()
        self._restore()

    def __repr__(self) -> str:
        return f"<CacheManager {self._policy!r}>"

    def _restore(self) -> None:
        for piece, file in self._cache_store.all_pieces():
            number = self._numbers.setdefault((piece.cache_bucket, file), len(self._numbers))
            with suppress(ValueError):  # a remnant of an earlier run
                self._policy.restore(number, _item(piece), piece.size)

    async def serve(self, path: Path) -> None:
        """Answer the processes of the node until cancelled."""
        server = ProcessServer()
        server.register(ADMIT, self._on_admit)
        server.register(USAGE, self._on_usage)
        server.register(REPORT_READS, self._on_reads)
        with listen(path) as listener:
            await server.serve_forever(listener)

    async def _on_admit(self, request: AdmitRequest, call: ServerCall) -> bool:
        self._uses.count_reads(request.piece.cache_bucket, 0, 1, asyncio.get_running_loop().time())
        return await self.admit_piece(request.piece)

    async def _on_usage(self, request: UsageRequest, call: ServerCall) -> Usage:
        return self._uses.usage_of(request.cache_bucket, asyncio.get_running_loop().time())

    async def _on_reads(self, report: ReadReport, call: ServerCall) -> None:
        now = asyncio.get_running_loop().time()
        for cache_bucket, count in Counter(piece.cache_bucket for piece in report.pieces).items():
            self._uses.count_reads(cache_bucket, count, 0, now)
        for piece in report.pieces:
            if self._there(piece):
                await self.admit_piece(piece, new=False)

    def _there(self, piece: Piece) -> bool:
        return self._policy.size_of(_item(piece)) is not None

    async def admit_piece(self, piece: Piece, *, new: bool = True) -> bool:
        """Decide whether a piece that was read stays, and make room for it."""
        decision = self._policy.decide(_item(piece), piece.size)
        await self.evict(decision.evictions)
        kept = decision.hit or decision.segment is not None
        if not kept and not new:
            await self._drop([piece])
        return kept

    async def evict(self, evictions: Iterable[Eviction]) -> None:
        """Carry out evictions of the policy. Pieces that it moves stay in their data files."""
        for eviction in evictions:
            metrics.cache_evicted.inc(eviction.freed)
            await self._drop([_piece(item) for item in eviction.drop])

    async def _drop(self, pieces: list[Piece]) -> None:
        try:
            await asyncio.gather(*[self._cache_store.evict_piece(piece) for piece in pieces])
        except StoreError as error:
            _log.warning("eviction failed; it will be retried", extra={"why": str(error)})

    async def sweep(self) -> None:
        """Apply the current quotas, pins and disk space, and evict what exceeds them. Runs periodically."""
        backed = {
            cache_name(bucket): bucket for bucket in self._buckets.list_all() if bucket.origin is not None
        }
        origins = {name: bucket.origin for name, bucket in backed.items() if bucket.origin is not None}
        self._apply_pins({(name, prefix) for name, origin in origins.items() for prefix in origin.pins})
        quotas = {name: origin.quota for name, origin in origins.items() if origin.quota}
        self._uses.retain_only((*origins, NEAR_CACHE_NAME), asyncio.get_running_loop().time())
        gone = {name for name, _ in self._numbers if name not in origins and name != NEAR_CACHE_NAME}
        for name in gone:
            await self._forget_bucket(name)
        stats = self._cache_store.cache.stats()
        physical = stats.live_bytes + stats.dead_bytes
        free = sum(disk.free for disk in stats.disks)
        reserve = min(_RESERVE, sum(disk.total for disk in stats.disks) // 20)
        capacity = max(1, min(self._most, physical + free - reserve))
        self._policy.settings = replace(self._policy.settings, capacity=capacity, quotas=quotas)
        if self._policy.used > capacity * self._policy.settings.high or quotas:
            await self.evict(self._policy.sweep())
        metrics.cache_capacity.set(capacity)
        metrics.cache_plans.set(len(self._planned))
        metrics.cache_bytes.set(physical)
        await self._compact(pressed=physical > capacity)

    def _apply_pins(self, pins: set[Item]) -> None:
        for bucket, prefix in pins - self._pins:
            self._policy.pin(bucket, prefix)
        for bucket, prefix in self._pins - pins:
            self._policy.unpin(bucket, prefix)
        self._pins = pins

    async def _forget_bucket(self, cache_bucket: str) -> None:
        """Evict everything of a bucket that was deleted, perhaps created again."""
        self._numbers = {name: number for name, number in self._numbers.items() if name[0] != cache_bucket}
        pieces = [piece for piece, _ in self._cache_store.all_pieces() if piece.cache_bucket == cache_bucket]
        for piece in pieces:
            self._policy.remove(_item(piece))
        await self._drop(pieces)

    async def _compact(self, *, pressed: bool) -> None:
        cache = self._cache_store.cache
        for file in cache.compactor.candidates(_DEAD_SHARE / 3 if pressed else _DEAD_SHARE):
            try:
                await cache.compactor.compact(file)
            except StoreError as error:
                _log.warning("cannot compact a segment of the cache", extra={"why": str(error)})
            await asyncio.sleep(0)
        await cache.compactor.purge(cache.checkpointer.synced_before)

    # --- future reads

    def plan(self, name: str, now: Sequence[Piece], later: Sequence[Piece]) -> None:
        """Set the pieces that a plan reads in the current epoch and in the next, in order."""
        self._planned[name] = len(now)
        self._policy.plan(name, map(_item, (*now, *later)))

    def advance(self, name: str, share: float) -> None:
        """Record that this share of the current epoch was read."""
        if name in self._planned:
            self._policy.advance(name, int(share * self._planned[name]))

    def unplan(self, name: str) -> None:
        """Forget the future reads of a plan."""
        if self._planned.pop(name, None) is not None:
            self._policy.unplan(name)


def _item(piece: Piece) -> Item:
    key = piece.key if piece.number < 0 else f"{piece.key}\0{piece.number:08x}"
    return piece.cache_bucket, key


def _piece(item: Item) -> Piece:
    key, cut, number = item[1].partition("\0")
    return Piece(item[0], key, int(number, 16) if cut else -1)
