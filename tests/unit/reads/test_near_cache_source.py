"""A GET through the near cache: aligned parts in order, a few ahead, and none left in memory."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import pytest

from meshd.core.frame_address import FrameAddress
from meshd.core.memory_frames import MemoryAccount, MemoryFrame, make_block
from meshd.core.peer_source import ReadFailure
from meshd.core.read_source import FailoverRead
from meshd.origins.cache import near_cache
from meshd.origins.cache.near_cache import NearCacheStore
from meshd.peer_reads.peer_fetcher import FetchedParts, append_bytes
from meshd.reads import near_cache_reader
from meshd.reads.near_cache_reader import NearCacheSource
from meshd.store.records import Record
from meshwire.errors import S3Error
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.peer_source import ObjectRange
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.origins.cache.cache_store import Piece
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.store import Store

DATA = bytes(range(251)) * 4
PART = 100


class _Peers:
    """Supplies parts of DATA, except the one at `lost`."""

    def __init__(self, lost: int = -1) -> None:
        self.memory, self.lost, self.asked = MemoryAccount(), lost, list[int]()

    async def fetch_parts(self, parts: Sequence[ObjectRange], memory: MemoryAccount) -> FetchedParts:
        (part,) = parts
        self.asked.append(part.offset)
        room = MemoryFrame(0, memory)
        await asyncio.sleep(0)
        assert (part.bucket, part.key, part.etag, part.size) == ("b", "k", "e", len(DATA))
        if part.offset == self.lost:
            return FetchedParts(room, [ReadFailure("Busy", "nobody answers")])
        return FetchedParts(room, [append_bytes(room, DATA[part.offset : part.offset + part.length])])

    def read(self, offset: int, length: int) -> FailoverRead:
        record = Record(len(DATA), "e", 1, 1, ())
        source = NearCacheSource(cast("RemoteObjects", self), self.memory, "b", "k", record)
        return FailoverRead([source], offset, length, "s3://b/k")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_cache_reader, "_PART", PART)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, len(DATA)), (0, 1), (99, 2), (150, 700), (len(DATA) - 1, 1)]
)
def test_any_range_is_read_in_order_from_aligned_parts(offset: int, length: int) -> None:
    async def run() -> None:
        peers = _Peers()
        assert (
            b"".join([piece async for piece in peers.read(offset, length).pieces()])
            == (DATA[offset : offset + length])
        )
        assert peers.asked == list(range(offset - offset % PART, offset + length, PART))
        assert peers.memory.bytes == 0

    asyncio.run(run())


def test_two_parts_are_fetched_ahead_and_released_if_the_client_leaves() -> None:
    async def run() -> None:
        peers = _Peers()
        async with aclosing(peers.read(0, len(DATA)).groups()) as groups:
            async for spans in groups:
                await asyncio.sleep(0.01)
                assert os.pread(spans[0].fd, spans[0].length, spans[0].offset) == DATA[:PART]
                assert peers.asked == [0, PART, 2 * PART]
                assert peers.memory.bytes == 3 * PART
                break
        assert peers.memory.bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("lost", [0, 300])
def test_a_part_that_no_node_has_ends_the_read_where_it_begins(lost: int) -> None:
    async def run() -> None:
        peers, came = _Peers(lost), bytearray()

        async def read() -> None:
            async for piece in peers.read(0, len(DATA)).pieces():
                came.extend(piece)

        with pytest.raises(S3Error, match="nobody answers") as caught:
            await read()
        assert caught.value.code == "SlowDown"
        assert came == DATA[:lost]
        assert peers.memory.bytes == 0

    asyncio.run(run())


class _Manager:
    """Admits every piece."""

    async def admit_piece(self, piece: Piece) -> bool:
        return True

    def record_read(self, piece: Piece) -> None: ...


def test_a_batch_that_shares_its_memory_is_cached_with_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_cache, "LARGEST", 3000)

    async def run() -> None:
        cache = NearCacheStore(
            cast("Store", MemoryStore(ManualClock())), cast("CacheManagerClient", _Manager())
        )
        address, made = FrameAddress("a" * 64, 0, 1), make_block([5000, 5000], MemoryAccount())
        for number, one in enumerate(made, 1):
            os.pwrite(one.fd, bytes([number]) * one.size, one.offset)
            one.rows = number
        frame = made[1].hand_out("miss")
        cache.keep_frame(address, frame)
        frame.close()
        for _ in range(1000):  # until it is written
            if await cache.get_frame(address) is not None:
                break
            await asyncio.sleep(0.01)
        assert await cache.get_frame(address) == ([b"\2" * 3000, b"\2" * 2000], 2)
        await cache.aclose()

    asyncio.run(run())
