"""The cache manager: runs the eviction policy in one process; others query it over a Unix socket.

Law: the policy decides, the cache store deletes, and compaction frees the space. Reads are reported in
batches, because nobody waits for them. Hit statistics cover the last ten minutes of all processes.
Invariant: the cache never holds the only copy of anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.origins.cache.cache_store import (
    NEAR_CACHE_NAME,
    Piece,
    cache_name,
)
from meshd.origins.eviction.policy_api import EvictionSettings
from meshd.origins.eviction.segment_policy import SegmentPolicy
from meshd.rpc.unix_messages import StreamClosedError, accept_streams, connect, listen
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from meshd.control.buckets import BucketTable
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.eviction.policy_api import Eviction, Item
    from meshd.rpc.unix_messages import MessageStream


_MINUTES: Final = 10


class Usage(msgspec.Struct, frozen=True):
    """Of the last ten minutes: pieces that were read from the cache (`hits`), pieces that were fetched
    (`misses`). `idle`: seconds since the last of either, or since counting began."""

    hits: int
    misses: int
    idle: float


class HitStats:
    """By name in the cache."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._minutes: dict[str, deque[tuple[int, int, int]]] = {}
        self._last: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Uses of {len(self._last)} buckets>"

    def count_reads(self, shelf: str, hits: int, misses: int, now: float) -> None:
        """Something was read."""
        minutes = self._minutes.setdefault(shelf, deque(maxlen=_MINUTES))
        minute = int(now // 60)
        if minutes and minutes[-1][0] == minute:
            _, before, missed = minutes.pop()
            hits, misses = hits + before, misses + missed
        minutes.append((minute, hits, misses))
        self._last[shelf] = now

    def usage_of(self, shelf: str, now: float) -> Usage:
        """What is known of one."""
        since = int(now // 60) - _MINUTES
        lately = [(hits, misses) for minute, hits, misses in self._minutes.get(shelf, ()) if minute > since]
        idle = now - self._last.get(shelf, now if self._began is None else self._began)
        return Usage(sum(hits for hits, _ in lately), sum(misses for _, misses in lately), max(0.0, idle))

    def retain_only(self, shelves: Collection[str], now: float) -> None:
        """Only these are there any more. Counting begins with the first call."""
        self._began = now if self._began is None else self._began
        for shelf in self._last.keys() - set(shelves):
            del self._last[shelf], self._minutes[shelf]


class AdmitRequest(msgspec.Struct, frozen=True, tag="ask"):
    """May this stay?"""

    number: int
    piece: Piece


class ReadReport(msgspec.Struct, frozen=True, tag="read"):
    """These were read from the cache."""

    pieces: list[Piece]


class UsageRequest(msgspec.Struct, frozen=True, tag="look"):
    """How much is this bucket read?"""

    number: int
    shelf: str


class ManagerReply(msgspec.Struct, frozen=True):
    """The answer to either."""

    number: int
    kept: bool = False
    usage: Usage | None = None


_log = logging.getLogger("meshd.cache")
_BUNDLE: Final = 500  # reads told at once
_EVERY: Final = 0.5  # seconds between bundles
_DEAD_SHARE: Final = 0.3  # of a data file from which on it is written anew
_RESERVE: Final = 1 << 30  # bytes of the disks that the cache leaves free, or a twentieth of them
_PATIENCE: Final = 2.0  # seconds for the keeper's word; then what was read is kept


class CacheManagerClient:
    """See Keeper. Use on one event loop only; `run` it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: MessageStream | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[ManagerReply]] = {}
        self._notes: list[Piece] = []
        self._full = asyncio.Event()
        self._tasks = BackgroundTasks("keeper")

    def __repr__(self) -> str:
        return f"<RemoteKeeper {self._path.name}, {len(self._notes)} reads to tell>"

    def record_read(self, piece: Piece) -> None:
        if len(self._notes) < 100 * _BUNDLE:
            self._notes.append(piece)
        if len(self._notes) >= _BUNDLE:
            self._full.set()

    async def admit_piece(self, piece: Piece) -> bool:
        word = await self._answer(AdmitRequest(next(self._numbers), piece))
        return word is None or word.kept  # it is being replaced; then it sees what there is

    async def bucket_usage(self, shelf: str) -> Usage | None:
        word = await self._answer(UsageRequest(next(self._numbers), shelf))
        return None if word is None else word.usage

    async def _answer(self, question: AdmitRequest | UsageRequest) -> ManagerReply | None:
        answer: asyncio.Future[ManagerReply] = asyncio.get_running_loop().create_future()
        self._asked[question.number] = answer
        try:
            await self._send(question)
            return await asyncio.wait_for(answer, _PATIENCE)
        except (OSError, StreamClosedError, TimeoutError):
            return None
        finally:
            self._asked.pop(question.number, None)

    async def run(self) -> None:
        """Tell what was read, until cancelled."""
        try:
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._full.wait(), _EVERY)
                self._full.clear()
                notes, self._notes = self._notes, []
                for at in range(0, len(notes), _BUNDLE):
                    with suppress(OSError, StreamClosedError):
                        await self._send(ReadReport(notes[at : at + _BUNDLE]))
        finally:
            if self._stream is not None:
                self._stream.close()
            await self._tasks.aclose()

    async def _send(self, message: AdmitRequest | ReadReport | UsageRequest) -> None:
        if self._stream is None:
            self._stream = await connect(self._path)
            self._tasks.spawn(self._listen(self._stream), "listen")
        await self._stream.send(message)

    async def _listen(self, stream: MessageStream) -> None:
        try:
            while True:
                body, _ = await stream.receive()
                word = msgspec.convert(body, ManagerReply)
                answer = self._asked.get(word.number)
                if answer is not None and not answer.done():
                    answer.set_result(word)
        except StreamClosedError:
            pass
        finally:
            stream.close()
            if self._stream is stream:
                self._stream = None


class CacheManager:
    """The policy at work. One a node: the steward's."""

    def __init__(self, shelf: CacheStore, buckets: BucketTable, capacity: int, segment: int) -> None:
        self._cache_store, self._buckets = shelf, buckets
        stats = shelf.cache.stats()
        free = sum(disk.free for disk in stats.disks)
        self._most = capacity or max(1, (free + stats.live_bytes + stats.dead_bytes) // 2)
        self._policy = SegmentPolicy(
            EvictionSettings(self._most, min(segment, max(1 << 20, self._most // 16)))
        )
        self._pins: set[Item] = set()
        self._planned: dict[str, int] = {}  # pieces of the present epoch
        self._numbers: dict[tuple[str, int], int] = {}
        self._loose: list[asyncio.Task[None]] = []
        self._uses = HitStats()
        self._restore()

    def __repr__(self) -> str:
        return f"<CacheKeeper {self._policy!r}>"

    def _restore(self) -> None:
        for piece, file in self._cache_store.all_pieces():
            number = self._numbers.setdefault((piece.shelf, file), len(self._numbers))
            with suppress(ValueError):  # a remnant
                self._policy.restore(number, _item(piece), piece.size)

    async def serve(self, path: Path) -> None:
        """Answer the processes of the node until cancelled."""
        listener = listen(path)
        try:
            await accept_streams(listener, self._converse)
        finally:
            listener.close()

    async def _converse(self, stream: MessageStream) -> None:
        while True:
            body, _ = await stream.receive()
            message, now = (
                msgspec.convert(body, AdmitRequest | ReadReport | UsageRequest),
                asyncio.get_running_loop().time(),
            )
            if isinstance(message, UsageRequest):
                await stream.send(ManagerReply(message.number, usage=self._uses.usage_of(message.shelf, now)))
            elif isinstance(message, AdmitRequest):
                self._uses.count_reads(message.piece.shelf, 0, 1, now)
                kept = await self.admit_piece(message.piece)
                await stream.send(ManagerReply(message.number, kept))
            else:
                for shelf, count in Counter(piece.shelf for piece in message.pieces).items():
                    self._uses.count_reads(shelf, count, 0, now)
                for piece in message.pieces:
                    if self._there(piece):
                        await self.admit_piece(piece, new=False)

    def _there(self, piece: Piece) -> bool:
        return self._policy.size_of(_item(piece)) is not None

    async def admit_piece(self, piece: Piece, *, new: bool = True) -> bool:
        """Whether what was read stays; room is made for it."""
        decision = self._policy.decide(_item(piece), piece.size)
        await self.evict(decision.evictions)
        kept = decision.hit or decision.segment is not None
        if not kept and not new:
            await self._drop([piece])
        return kept

    async def evict(self, evictions: Iterable[Eviction]) -> None:
        """Do what the policy has decided: what it moves stays where it is."""
        for eviction in evictions:
            metrics.cache_evicted.inc(eviction.freed)
            await self._drop([_piece(item) for item in eviction.drop])

    async def _drop(self, pieces: list[Piece]) -> None:
        try:
            await asyncio.gather(*[self._cache_store.evict_piece(piece) for piece in pieces])
        except StoreError as error:
            _log.warning("eviction failed; it is tried again", extra={"why": str(error)})

    async def sweep(self) -> None:
        """What is done now and then: quotas, pins and room as they are now; what must go goes."""
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

    async def _forget_bucket(self, shelf: str) -> None:
        """A bucket is gone, or was made anew: what was cached of the old one goes."""
        self._numbers = {name: number for name, number in self._numbers.items() if name[0] != shelf}
        pieces = [piece for piece, _ in self._cache_store.all_pieces() if piece.shelf == shelf]
        for piece in pieces:
            self._policy.remove(_item(piece))
        await self._drop(pieces)

    async def _compact(self, *, pressed: bool) -> None:
        cache = self._cache_store.cache
        for file in cache.compaction_candidates(_DEAD_SHARE / 3 if pressed else _DEAD_SHARE):
            try:
                await cache.compact(file)
            except StoreError as error:
                _log.warning("a segment of the cache cannot be compacted", extra={"why": str(error)})
            await asyncio.sleep(0)
        await cache.purge_retired_files()

    # --- what is known of reads to come

    def plan(self, name: str, now: Sequence[Piece], later: Sequence[Piece]) -> None:
        """The pieces that a plan reads in the present epoch and in the next, in order."""
        self._planned[name] = len(now)
        self._policy.plan(name, map(_item, (*now, *later)))

    def advance(self, name: str, share: float) -> None:
        """So much of the present epoch was read."""
        if name in self._planned:
            self._policy.advance(name, int(share * self._planned[name]))

    def unplan(self, name: str) -> None:
        """The plan's reads to come are not known any more."""
        if self._planned.pop(name, None) is not None:
            self._policy.unplan(name)

    def usage_by_bucket(self) -> dict[str, Any]:
        """What is kept, by bucket."""
        kept: dict[str, int] = defaultdict(int)
        for piece, _ in self._cache_store.all_pieces():
            kept[piece.shelf.rpartition("@")[0]] += piece.size
        return {"capacity": self._policy.settings.capacity, "used": self._policy.used, "buckets": dict(kept)}


def _item(piece: Piece) -> Item:
    key = piece.key if piece.number < 0 else f"{piece.key}\0{piece.number:08x}"
    return piece.shelf, key


def _piece(item: Item) -> Piece:
    key, cut, number = item[1].partition("\0")
    return Piece(item[0], key, int(number, 16) if cut else -1)
