"""NearCacheStore: evictable local copies of parts and batches of other nodes, e.g. on GPU hosts.

Copies are named by content (a part by its ETag, a batch by its address), so a copy stays valid whatever
happens to the name. Every copy can be fetched again. Nothing waits for a copy to be written.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING, Final

import msgspec
from awscrt.checksums import crc32c

from meshd.origins.cache.cache_store import NEAR_CACHE_NAME, Piece
from meshd.store.errors import StoreError
from meshd.store.records import Meta
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.frame_address import Frame, FrameAddress
    from meshd.core.peer_source import ObjectRange
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.store.records import Record
    from meshd.store.store import Store

LARGEST: Final = 8 << 20
"""Maximum bytes of a copy; larger batches are cached in pieces, larger parts not at all."""
_WAITING: Final = 256 << 20
"""Maximum bytes that wait to be written; further copies are not cached."""
_AT_ONCE: Final = 16


class _Whole(msgspec.Struct, frozen=True, array_like=True):
    """The head of a batch that is cached in pieces."""

    size: int
    rows: int


class NearCacheStore:
    """Reads and writes near-cache copies. One instance per process. `manager` decides what stays."""

    def __init__(self, cache: Store, manager: CacheManagerClient) -> None:
        self._cache, self._cache_manager = cache, manager
        self._tasks, self._slots = BackgroundTasks("near-cache"), asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<NearCacheStore, {self._waiting} bytes to be written>"

    async def aclose(self) -> None:
        """Drop the copies that wait to be written."""
        await self._tasks.aclose()

    async def get_parts(self, parts: Sequence[ObjectRange]) -> list[bytes | None]:
        """Return the cached bytes of these parts; None for each part that is not cached."""
        records = [self._cache.get(NEAR_CACHE_NAME, part_name(part)) for part in parts]
        if not any(records):
            found: list[bytes | None] = [None] * len(parts)
        else:
            found = await asyncio.to_thread(lambda: [self._read(record) for record in records])
        for part, record, data in zip(parts, records, found, strict=True):
            metrics.near_cache_reads.labels("part", "miss" if data is None else "hit").inc()
            if record is not None and data is not None:
                self._cache_manager.record_read(Piece(NEAR_CACHE_NAME, part_name(part), -1, record.size))
        return found

    async def get_frame(self, address: FrameAddress) -> tuple[list[bytes], int] | None:
        """Return a batch's bytes and rows, if all of it is cached."""
        found = await asyncio.to_thread(self._frame, frame_key(address))
        metrics.near_cache_reads.labels("frame", "miss" if found is None else "hit").inc()
        return found

    def _frame(self, name: str) -> tuple[list[bytes], int] | None:
        head = self._read(self._cache.get(NEAR_CACHE_NAME, name))
        if head is None:
            return None
        whole = msgspec.msgpack.decode(head, type=_Whole)
        pieces: list[bytes] = []
        for number in range(-(-whole.size // LARGEST)):
            data = self._read(self._cache.get(NEAR_CACHE_NAME, f"{name}.{number}"))
            if data is None:
                return None
            pieces.append(data)
            self._cache_manager.record_read(Piece(NEAR_CACHE_NAME, f"{name}.{number}", -1, len(data)))
        return pieces, whole.rows

    def _read(self, record: Record | None) -> bytes | None:
        """Return the bytes of a copy, if it is intact (blocking)."""
        if record is None:
            return None
        try:
            data = self._cache.read_range(record, 0, record.size)
        except StoreError:  # just evicted
            return None
        return data if _sum(data) == record.etag else None

    def keep_parts(self, fd: int, kept: Sequence[tuple[ObjectRange, int, int]]) -> None:
        """Cache parts, given as (part, offset, length) in shared memory. The caller may free it at once."""
        pieces = [(part_name(part), offset, length) for part, offset, length in kept if 0 < length <= LARGEST]
        self._keep(fd, pieces)

    def keep_frame(self, address: FrameAddress, frame: Frame) -> None:
        """Cache a batch. The caller may close the frame at once."""
        name, size = frame_key(address), frame.size
        pieces = [
            (f"{name}.{number}", frame.offset + start, min(LARGEST, size - start))
            for number, start in enumerate(range(0, size, LARGEST))
        ]
        self._keep(frame.fd, pieces, (name, msgspec.msgpack.encode(_Whole(size, frame.rows))))

    def _keep(
        self, fd: int, pieces: Sequence[tuple[str, int, int]], last: tuple[str, bytes] | None = None
    ) -> None:
        size = sum(length for _, _, length in pieces)
        if not pieces or self._waiting + size > _WAITING:
            return
        self._waiting += size
        self._tasks.spawn(self._write(os.dup(fd), size, pieces, last), "keep")

    async def _write(
        self, fd: int, size: int, pieces: Sequence[tuple[str, int, int]], last: tuple[str, bytes] | None
    ) -> None:
        try:
            async with self._slots:
                for name, offset, length in pieces:
                    if self._cache.get(NEAR_CACHE_NAME, name) is None:
                        await self._put(name, await asyncio.to_thread(os.pread, fd, length, offset))
                if last is not None and self._cache.get(NEAR_CACHE_NAME, last[0]) is None:
                    await self._put(*last)
        except StoreError:
            metrics.near_cache_refused.inc()
        finally:
            self._waiting -= size
            os.close(fd)

    async def _put(self, name: str, data: bytes) -> None:
        if not await self._cache_manager.admit_piece(Piece(NEAR_CACHE_NAME, name, -1, len(data))):
            metrics.near_cache_refused.inc()
            return
        writer = self._cache.writer(NEAR_CACHE_NAME, name, size=len(data))
        try:
            await writer.write(data)
            await writer.commit(Meta(_sum(data)))
        except BaseException:
            await writer.abort()
            raise


def part_name(part: ObjectRange) -> str:
    """Return the name of a part's copy."""
    text = "\0".join(map(str, part))
    return hashlib.blake2b(text.encode(), digest_size=20, person=b"mesh-near-part").hexdigest()


def frame_key(address: FrameAddress) -> str:
    """Return the name of a batch's copy."""
    text = "\0".join(str(getattr(address, name)) for name in address.__struct_fields__)
    return hashlib.blake2b(text.encode(), digest_size=20, person=b"mesh-near-frame").hexdigest()


def _sum(data: bytes) -> str:
    return f"{crc32c(data):08x}"
