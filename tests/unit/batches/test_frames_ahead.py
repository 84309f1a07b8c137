"""Frames that are built before their requests, while a disk reads their window."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshd.batches.assembly.assembler import AHEAD_SHARE, Assembler
from meshd.batches.assembly.frame_buffer import planned_size
from meshd.config import TransformSettings
from meshd.core.frame_address import FrameAddress
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.telemetry import metrics
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.single_node_objects import single_node_objects
from tests.unit.batches.test_assembly_frames import SAMPLES, Bench, HalfRead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.batches.read_ahead.read_hints import PlannedFrame

BATCH = 5
STEPS = SAMPLES // BATCH


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.close()


async def reading_bench(bench: Bench, frames: float) -> tuple[str, HalfRead]:
    """A plan, and a disk that reads all its samples as one window; the new assembler may build so many frames
    ahead."""
    digest = await bench.plan()
    plan = await bench.assembler.catalog.plan(digest)
    snapshot = await bench.assembler.catalog.snapshot(plan.snapshot)
    size = planned_size(plan, snapshot, FrameAddress(digest, 0, 0, batch=BATCH))
    assert size is not None
    reading = HalfRead(bench.store, snapshot)
    bench.assembler = Assembler(
        bench.store,
        bench.renderer,
        TransformSettings(1, int(frames * AHEAD_SHARE * size)),
        ArchiveService(LocalArchives(bench.store, list[str]().append), single_node_objects(bench.store)),
        read_ahead=reading,  # type: ignore[arg-type]
    )
    return digest, reading


async def settled(bench: Bench, wanted: int) -> int:
    """The rows that were rendered, a moment after they were as many as are wanted."""
    async with asyncio.timeout(WAIT_TIMEOUT):
        while bench.renderer.rows < wanted:
            bench.renderer.called.clear()
            await bench.renderer.called.wait()
    await asyncio.sleep(0.05)
    return bench.renderer.rows


def counted(result: str) -> float:
    return float(metrics.frames.labels(result)._value.get())


def test_frames_are_built_while_their_window_is_read(bench: Bench) -> None:
    async def run() -> None:
        plain_digest = await bench.plan()
        addresses = [FrameAddress(plain_digest, 0, step, batch=BATCH) for step in range(STEPS)]
        plain = [(await bench.get(address))[0]["image"] for address in addresses]
        digest, reading = await reading_bench(bench, frames=STEPS)
        assert digest == plain_digest
        bench.renderer.rows, misses = 0, counted("miss")
        first = asyncio.create_task(bench.get(addresses[0]))
        reading.read(SAMPLES)  # all bytes are there, but the window has not ended
        assert await settled(bench, SAMPLES) == SAMPLES
        assert np.array_equal((await first)[0]["image"], plain[0])
        reading.window.finish()
        for address, wanted in zip(addresses[1:], plain[1:], strict=True):
            views, result = await bench.get(address)
            assert np.array_equal(views["image"], wanted)
            assert result == "miss"  # it was made for this request
        assert bench.renderer.rows == SAMPLES
        assert counted("miss") == misses + STEPS  # each was made for the request that came later
        assert (await bench.get(addresses[1]))[1] == "hit"
        assert counted("miss") == misses + STEPS
        await bench.assembler.aclose()

    asyncio.run(run())


def test_no_frame_is_built_ahead_of_what_is_in_memory(bench: Bench) -> None:
    async def run() -> None:
        digest, reading = await reading_bench(bench, frames=STEPS)
        reading.window.finish()
        bench.renderer.rows = 0
        await bench.get(FrameAddress(digest, 0, 0, batch=BATCH))
        assert await settled(bench, BATCH) == BATCH

    asyncio.run(run())


def test_what_is_built_ahead_is_bounded(bench: Bench) -> None:
    async def run() -> None:
        digest, reading = await reading_bench(bench, frames=2.5)
        bench.renderer.rows = 0
        getting = asyncio.create_task(bench.get(FrameAddress(digest, 0, 0, batch=BATCH)))
        reading.read(SAMPLES)
        assert await settled(bench, 3 * BATCH) == 3 * BATCH
        await getting
        await bench.get(FrameAddress(digest, 0, 1, batch=BATCH))  # no longer ahead: there is room for another
        await bench.get(FrameAddress(digest, 0, 3, batch=BATCH))
        assert await settled(bench, 5 * BATCH) == 5 * BATCH
        await bench.assembler.aclose()

    asyncio.run(run())


def test_rows_that_are_built_ahead_leave_room_for_other_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr("meshd.batches.assembly.assembler.MAX_ROWS", AHEAD_SHARE * BATCH)
        other = await bench.plan(seed=4)
        digest, reading = await reading_bench(bench, frames=STEPS)
        bench.renderer.gate = asyncio.Event()
        getting = [asyncio.create_task(bench.get(FrameAddress(digest, 0, 0, batch=BATCH)))]
        reading.read(SAMPLES)
        async with asyncio.timeout(WAIT_TIMEOUT):
            await bench.renderer.called.wait()
        await asyncio.sleep(0.05)
        getting.append(asyncio.create_task(bench.get(FrameAddress(other, 0, 0, batch=BATCH))))
        await asyncio.sleep(0.05)
        bench.renderer.gate.set()
        await asyncio.gather(*getting)
        await bench.assembler.aclose()

    asyncio.run(run())


def test_the_rows_of_another_window_are_not_built_ahead(bench: Bench) -> None:
    async def run() -> None:
        digest, reading = await reading_bench(bench, frames=STEPS)
        reading.window.end = 3 * BATCH - 1
        bench.renderer.rows = 0
        getting = asyncio.create_task(bench.get(FrameAddress(digest, 0, 0, batch=BATCH)))
        reading.read(SAMPLES)
        assert await settled(bench, 2 * BATCH) == 2 * BATCH
        await getting
        await bench.assembler.aclose()

    asyncio.run(run())


def test_the_readers_place_is_that_of_its_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reader that is given many frames from the cache looks as if it had ended, and nothing is read
    ahead for it any more."""

    async def run() -> None:
        digest, reading = await reading_bench(bench, frames=2)
        requested = list[int]()

        def note(frame: PlannedFrame) -> None:
            requested.append(frame.address.step)

        monkeypatch.setattr(reading, "frame_requested", note)
        bench.renderer.rows = 0
        getting = asyncio.create_task(bench.get(FrameAddress(digest, 0, 0, batch=BATCH)))
        reading.read(SAMPLES)
        assert await settled(bench, 3 * BATCH) == 3 * BATCH
        await getting
        assert requested == [0]
        for step in (1, 2, 2):
            await bench.get(FrameAddress(digest, 0, step, batch=BATCH))
        assert requested == [0, 1, 2]
        await bench.assembler.aclose()

    asyncio.run(run())


def test_a_frame_that_fails_ahead_is_left_to_its_request(bench: Bench) -> None:
    async def run() -> None:
        digest, reading = await reading_bench(bench, frames=STEPS)
        bench.renderer.bad = dict.fromkeys(range(SAMPLES), "op")
        getting = asyncio.create_task(bench.get(FrameAddress(digest, 0, 0, batch=BATCH)))
        reading.read(SAMPLES)
        await settled(bench, BATCH)
        with pytest.raises(Exception, match="no good"):
            await getting
        bench.renderer.bad = {}
        reading.window.finish()
        views, result = await bench.get(FrameAddress(digest, 0, 1, batch=BATCH))
        assert len(views["image"]) == BATCH
        assert result == "miss"
        await bench.assembler.aclose()

    asyncio.run(run())
