"""Packed rows of consecutive steps, requested together: the bytes of single frames, in one block of
memory."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshd.batches.assembly import assembler as assembler_module
from meshd.batches.assembly import packed_frame_builder
from meshd.batches.assembly.frame_cache import FrameCache
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress, common_block
from meshd.core.memory_frames import MemoryAccount, is_sealed, make_block
from meshwire.frame import tensor_frame
from tests.component.batches.test_direct_rows import BATCH, PACKS, frame, packed, refuse
from tests.component.batches.test_raw_rows import FILES, Node
from tests.support.call_counts import Calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshd.core.frame_address import Frame

STEPS = 8
MOST_CALLS = 1000
"""Calls of Python and C functions for a batch of 48 rows, of some 230 pieces, of a series of eight."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


async def requested(node: Node, plan: str, first: int, count: int, rows: int = BATCH) -> Sequence[Frame]:
    node.assembler._cache.clear()
    return await node.assembler.get_frames(FrameAddress(plan, 1, first, batch=rows), count)


def contents(frames: Sequence[Frame]) -> list[bytes]:
    found = []
    for one in frames:
        found.append(os.pread(one.fd, one.size, one.offset))
        tensor_frame.verify_frame(found[-1])
        one.close()
    return found


@pytest.mark.parametrize("kind", ["lines", "tar", "objects"])
@pytest.mark.parametrize("pack", PACKS)
def test_frames_of_a_series_are_those_of_single_requests(node: Node, kind: str, pack: dict[str, Any]) -> None:
    async def run() -> None:
        node.assembler._cache = FrameCache(64 << 20)
        plan = await packed(node, kind, **pack)
        steps = -(-(await node.assembler.catalog.plan(plan)).samples // BATCH)
        alone = [await frame(node, plan, 1, step) for step in range(steps)]  # with padding at the end
        for first in range(0, steps, STEPS):
            wanted = alone[first : first + STEPS]
            frames = await requested(node, plan, first, len(wanted))
            block = common_block(frames)
            assert (block is not None) == (len(wanted) > 1)
            assert block is None or is_sealed(frames[0].fd, block.size)
            assert contents(frames) == wanted
        for step in range(steps - 2, steps):  # those that are cached, one by one
            found = await node.assembler.get_frame(FrameAddress(plan, 1, step, batch=BATCH))
            assert found.result == "hit"
            assert contents([found]) == [alone[step]]
        short = await requested(node, plan, steps - 3, STEPS)  # there are no more
        assert contents(short) == alone[-3:]

    asyncio.run(run())


def test_a_batch_of_a_series_takes_fewer_calls(node: Node) -> None:
    async def run() -> float:
        plan = await packed(node, "lines", segments=False, positions="none")
        contents(await requested(node, plan, 0, 4))
        calls = Calls()
        with calls:
            frames = await requested(node, plan, 4, STEPS)
        assert common_block(frames) is not None
        contents(frames)
        return calls.count / STEPS

    calls = asyncio.run(run())
    assert 100 < calls < MOST_CALLS, calls


def test_frames_whose_bytes_are_not_cached_are_read_in_a_thread(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, waited = os.preadv, set[str]()

    def uncached(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        waited.add(threading.current_thread().name)
        return read(fd, buffers, offset, flags)

    async def run() -> None:
        plan = await packed(node, "lines")
        wanted = contents(await requested(node, plan, 0, STEPS))
        monkeypatch.setattr(os, "preadv", uncached)
        assert contents(await requested(node, plan, 0, STEPS)) == wanted

    asyncio.run(run())
    assert waited
    assert threading.main_thread().name not in waited


@pytest.mark.parametrize("why", ["not direct", "large"])
def test_what_cannot_be_built_together_is_built_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def run() -> None:
        plan = await packed(node, "lines")
        wanted = contents(await requested(node, plan, 0, STEPS))
        if why == "large":
            monkeypatch.setattr(assembler_module, "MAX_SERIES_BYTES", 1000)
        else:
            monkeypatch.setattr(packed_frame_builder, "DirectRows", refuse)
        frames = await requested(node, plan, 0, STEPS)
        assert common_block(frames) is None
        assert contents(frames) == wanted

    asyncio.run(run())


def test_a_deleted_object_is_named(node: Node) -> None:
    async def run() -> None:
        plan = await packed(node, "lines")
        contents(await requested(node, plan, 0, STEPS))
        for file in range(FILES):
            await node.store.delete("b", f"d/{file}.txt")
        with pytest.raises(BatchError) as caught:
            await requested(node, plan, 0, STEPS)
        assert caught.value.code == "SnapshotChanged"

    asyncio.run(run())


def test_the_memory_of_a_block_counts_until_its_last_frame_is_gone() -> None:
    memory = MemoryAccount()
    frames = make_block([5000, 1, 4096], memory)
    assert [one.offset for one in frames] == [0, 8192, 12288]
    assert memory.bytes == 16384
    for number, one in enumerate(frames):
        os.pwrite(one.fd, bytes([number + 1]) * one.size, one.offset)
    handle = frames[1].hand_out("miss")
    last = frames.pop()
    frames.clear()
    assert memory.bytes == 16384
    assert os.pread(last.fd, last.size, last.offset) == b"\3" * 4096
    del last, one
    assert memory.bytes == 16384  # the handle has a frame
    assert os.pread(handle.fd, handle.size, handle.offset) == b"\2"
    handle.close()
    assert memory.bytes == 0
