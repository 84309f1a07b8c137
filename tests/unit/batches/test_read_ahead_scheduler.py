"""ReadScheduler: windows of the epoch in order, within the budget; no batch waits for more than its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.batches.read_ahead import scheduler as module
from meshd.batches.read_ahead.extents import plan_reads
from meshd.batches.read_ahead.read_hints import PlannedFrame
from meshd.batches.read_ahead.scheduler import CONTENDED_IDLE_SECONDS, IDLE_SECONDS, ReadScheduler
from meshd.batches.read_ahead.window_lookup import DiskReads
from meshd.batches.read_ahead.windows import (
    MIN_WINDOW_BYTES,
    SEEK_BYTES,
    SHORT_SEEK_BYTES,
    awaited_size,
    first_size,
    has_room,
    next_size,
)
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.plan.epoch_order import snapshot_order
from meshwire.plan.plan_spec import parse_spec, plan_hash
from meshwire.plan.shuffle import ShuffleSpec, shuffle_order
from tests.support.manual_clock import ManualClock
from tests.unit.batches import test_read_cost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.batches.read_ahead.disk_reader import DiskWork
    from meshwire.dataset.snapshot import Snapshot

SAMPLES, SIZE, BATCH = 2000, 1 << 20, 10
BUDGET = 8 * MIN_WINDOW_BYTES


class Arm:
    """A disk whose reads end when the test says so."""

    def __init__(self, device: int, clock: object) -> None:
        self.works: list[DiskWork] = []
        self.urgent: list[DiskWork] = []
        arms.append(self)

    def submit(self, work: DiskWork) -> None:
        self.works.append(work)

    def prioritize(self, work: DiskWork) -> None:
        self.urgent.append(work)

    def close(self) -> None:
        for work in self.works:
            work.on_done()


arms: list[Arm] = []


class Lookup:
    """Looks up windows: notes their samples; `disk`: they are on a disk, else in the page cache."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []
        self.disk = True
        self.error: Exception | None = None
        self.slow: list[asyncio.Event] = []  # the next lookups end when these are set

    async def reads_of(self, snapshot: Snapshot, samples: Any) -> list[DiskReads]:
        self.windows.append(samples.tolist())
        if self.slow:
            await self.slow.pop(0).wait()
        if self.error is not None:
            raise self.error
        if not self.disk:
            return []
        table = np.arange(len(samples), dtype=np.int64)
        return [DiskReads(1, ["file"], plan_reads(table * 0, table * SIZE, table * 0 + SIZE))]


class World:
    """A plan of SAMPLES objects of 1 MiB, and a scheduler with a disk to command."""

    def __init__(self, shuffle: dict[str, Any]) -> None:
        listing = [(f"d/{number:05d}.bin", "0" * 32, SIZE) for number in range(SAMPLES)]
        fields = parse_fields({"image": {"ext": "bin"}})
        self.snapshot = build_from_objects(listing, source="s3://b/d/", fields=fields).snapshot
        spec = parse_spec({"seed": 3, "shuffle": shuffle})
        digest = plan_hash(self.snapshot.hash, spec)
        outputs = {"image": FieldOutput("uint8", (4,))}
        self.plan = Plan(digest, self.snapshot.hash, "b", SAMPLES, spec, outputs)
        self.clock, self.lookup = ManualClock(), Lookup()
        self.scheduler = ReadScheduler(self.lookup, self.clock, BUDGET)  # type: ignore[arg-type]

    def order(self, epoch: int = 0) -> list[int]:
        order = snapshot_order(self.plan.spec, self.snapshot, epoch)
        return [int(sample) for sample in order.samples_at(np.arange(SAMPLES))]

    def ask(self, step: int, epoch: int = 0) -> FrameAddress:
        address = FrameAddress(self.plan.hash, epoch, step, batch=BATCH)
        self.scheduler.frame_requested(PlannedFrame(self.plan, self.snapshot, address))
        return address

    async def wait_until_read(self, address: FrameAddress) -> None:
        """Wait until the bytes of a frame's batch have been read ahead; at once if none are to be."""
        await (await self.scheduler.arrivals(address)).until_read()

    def read_all(self) -> None:
        """Let the reads end that are queued at the disk."""
        for arm in arms:
            while arm.works:
                arm.works.pop(0).on_done()


def running(shuffle: dict[str, Any], story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(shuffle)
        try:
            await story(world)
        finally:
            await world.scheduler.aclose()

    asyncio.run(run())


async def settled() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(20):
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> None:
    arms.clear()
    monkeypatch.setattr(module, "DiskReader", Arm)


@pytest.mark.parametrize("shuffle", [{"kind": "global"}, {"kind": "none"}, {"kind": "blocks", "shards": 1}])
def test_windows_are_the_epoch_in_order_each_sample_once(shuffle: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for step in range(SAMPLES // BATCH):
            waiting = asyncio.create_task(world.wait_until_read(world.ask(step)))
            while not waiting.done():
                await asyncio.sleep(0)
                world.read_all()
        await settled()
        read = [sample for window in world.lookup.windows for sample in window]
        assert read[:SAMPLES] == world.order()
        assert read[SAMPLES:] == world.order(1)[: len(read) - SAMPLES]  # the first window of the next epoch
        assert 0 < len(read) - SAMPLES < SAMPLES
        assert all(len(window) * SIZE <= BUDGET // 2 for window in world.lookup.windows)
        assert len(world.lookup.windows) > 1

    running(shuffle, story)


@pytest.mark.parametrize("shuffle", [{"kind": "global"}, {"kind": "none"}, {"kind": "blocks", "shards": 1}])
def test_an_estimate_of_the_cost_cuts_windows_of_the_same_sizes(shuffle: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        for step in range(SAMPLES // BATCH):
            waiting = asyncio.create_task(world.wait_until_read(world.ask(step)))
            while not waiting.done():
                await asyncio.sleep(0)
                world.read_all()
        await settled()
        read = [len(window) for window in world.lookup.windows]
        lookup = test_read_cost.Lookup(SIZE)
        # In a thread: it has a loop of its own.
        await asyncio.to_thread(
            test_read_cost.estimated, world.snapshot, lookup, [shuffle], BUDGET, batch=BATCH
        )
        cut = [asked.size for asked in lookup.asked]
        assert sum(cut) == SAMPLES
        if shuffle["kind"] == "blocks":  # the shards are in another order
            assert max(cut) == max(read)
        else:
            assert cut == read[: len(cut)]

    running(shuffle, story)


def test_a_batch_waits_until_its_window_is_read_and_the_disk_hears_of_it() -> None:
    async def story(world: World) -> None:
        waiting = asyncio.create_task(world.wait_until_read(world.ask(0)))
        await settled()
        assert not waiting.done()
        assert arms[0].urgent or arms[0].works[0].urgent
        world.read_all()
        await asyncio.wait_for(waiting, 30)

    running({"kind": "none"}, story)


def test_windows_reach_the_disk_in_the_order_of_the_epoch() -> None:
    """The first one is looked up slowly; the disk does not begin with the second."""

    async def story(world: World) -> None:
        found = asyncio.Event()
        world.lookup.slow = [found]
        world.ask(0)
        await settled()
        assert not arms
        found.set()
        await settled()
        sizes = [len(work.reads) for work in arms[0].works]
        assert len(sizes) > 1
        assert sizes == [len(window) for window in world.lookup.windows]
        assert sizes[0] < sizes[1]

    running({"kind": "global"}, story)


def test_reads_for_other_nodes_wait_for_the_window_that_brings_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshd.batches.read_ahead.scheduler.WAIT_SECONDS", 60.0)

    async def story(world: World) -> None:
        def wait(*places: tuple[str, int]) -> asyncio.Task[None]:
            pieces = tuple((path, number * SIZE, SIZE) for path, number in places)
            return asyncio.create_task(world.scheduler.wait_for_pieces(pieces))

        await asyncio.wait_for(wait(("file", 3)), 30)  # nothing is read ahead
        world.ask(0)
        await settled()
        works = list(arms[0].works)  # all windows of this lookup lie at the beginning of the file
        others = [wait(("elsewhere", 3)), wait(("file", 1_000_000))]
        waiting = [wait(("file", 3)), wait(("file", 1), ("file", 5))]
        await asyncio.wait_for(asyncio.gather(*others), 30)
        for finished, done in ((3, [False, False]), (4, [True, False]), (6, [True, True])):
            for work in works:
                work.finished = finished
                work.on_progress()
            await asyncio.sleep(0.02)
            assert [each.done() for each in waiting] == done
        monkeypatch.setattr("meshd.batches.read_ahead.scheduler.WAIT_SECONDS", 0.1)
        never = wait(("file", 6))
        await asyncio.wait_for(never, 30)  # a window that is late is not waited for without end

    running({"kind": "none"}, story)


def test_windows_ahead_stay_within_the_budget_and_follow_the_reader() -> None:
    async def story(world: World) -> None:
        world.ask(0)
        await settled()
        world.read_all()
        held = sum(len(window) for window in world.lookup.windows) * SIZE
        assert BUDGET // 2 < held <= BUDGET
        before = len(world.lookup.windows)
        await settled()
        assert len(world.lookup.windows) == before  # nothing was consumed
        world.ask(100)  # 100 batches of 10 MiB later: several windows are behind it
        await settled()
        assert len(world.lookup.windows) > before

    running({"kind": "none"}, story)


def test_windows_of_small_blocks_fill_the_budget() -> None:
    """A window that may have 64 MiB, but ends with a block at 34, is taken for 34."""
    starts, mib = np.arange(0, 257, 16), 1 << 20
    blocks = shuffle_order(ShuffleSpec("blocks", 4), starts, 1, 0)
    full = shuffle_order(ShuffleSpec(), starts, 1, 0)
    for order, held, room in (
        (blocks, [34, 34], True),
        (blocks, [34, 34, 34], False),
        (blocks, [100], False),
        (blocks, [], True),
        (full, [34, 34], False),
        (full, [34], True),
    ):
        assert has_room(order, [each * mib for each in held], 64 * mib, 128 * mib) == room


def test_blocks_end_windows_so_that_no_shard_is_read_twice() -> None:
    async def story(world: World) -> None:
        for step in range(0, SAMPLES // BATCH, 10):
            world.ask(step)
            await settled()
            world.read_all()
        shard = [[sample // 1024 for sample in window] for window in world.lookup.windows]
        assert len(shard) > 8
        assert all(max(each) == min(each) for each in shard)  # blocks of one shard: 1,024 samples, 1 GiB

    running({"kind": "blocks", "shards": 1}, story)


def test_requests_in_flight_may_arrive_in_any_order() -> None:
    async def story(world: World) -> None:
        for step in (2, 3, 0, 1):
            world.ask(step)
        await settled()
        assert world.lookup.windows[0][0] == world.order()[0]
        assert len({window[0] for window in world.lookup.windows}) == len(world.lookup.windows)

    running({"kind": "global"}, story)


def test_a_request_before_the_first_window_has_one_of_its_own() -> None:
    async def story(world: World) -> None:
        world.ask(40)
        await settled()
        world.read_all()
        waiting = asyncio.create_task(world.wait_until_read(world.ask(30)))
        await settled()
        assert not waiting.done()
        world.read_all()
        await asyncio.wait_for(waiting, 30)
        read = [sample for window in world.lookup.windows for sample in window]
        assert sorted(read) == sorted(set(read))
        assert set(world.order()[300:310]) <= set(read)

    running({"kind": "global"}, story)


def test_readers_at_different_places_have_windows_of_their_own() -> None:
    async def story(world: World) -> None:
        world.ask(0)
        await settled()
        world.ask(150)
        await settled()
        order = world.order()
        first = {window[0] for window in world.lookup.windows}
        assert {order[0], order[1500 - 4 * BATCH]} <= first
        world.ask(0, epoch=1)
        await settled()
        assert world.order(1)[0] in {window[0] for window in world.lookup.windows}

    running({"kind": "global"}, story)


def test_a_cached_window_and_one_that_cannot_be_looked_up_hold_nobody_up() -> None:
    async def story(world: World) -> None:
        world.lookup.disk = False
        await asyncio.wait_for(world.wait_until_read(world.ask(0)), 30)
        world.lookup.error = OSError("the index is gone")
        await asyncio.wait_for(world.wait_until_read(world.ask(199)), 30)
        assert not arms

    running({"kind": "global"}, story)


def test_a_reader_that_stops_gives_its_memory_back() -> None:
    async def story(world: World) -> None:
        world.ask(0)
        await settled()
        works = list(arms[0].works)
        waiting = asyncio.create_task(world.wait_until_read(FrameAddress(world.plan.hash, 0, 0, batch=BATCH)))
        await settled()
        world.clock.advance(IDLE_SECONDS + 1)
        world.ask(0, epoch=5)  # another reader comes
        await asyncio.wait_for(waiting, 30)
        assert all(work.cancelled for work in works)

    running({"kind": "none"}, story)


def test_a_reader_that_has_ended_leaves_its_share_to_others_and_a_slow_one_keeps_it() -> None:
    async def story(world: World) -> None:
        world.ask(0)
        world.clock.advance(20)
        world.ask(1)
        await settled()
        slow = list(arms[0].works)
        world.ask(150)
        await settled()
        ended = [work for work in arms[0].works if work not in slow]
        world.ask(0, epoch=5)
        await settled()
        assert not any(work.cancelled for work in slow + ended)
        world.clock.advance(CONTENDED_IDLE_SECONDS + 1)
        world.ask(1, epoch=5)
        assert ended
        assert all(work.cancelled for work in ended)
        assert not any(work.cancelled for work in slow)

    running({"kind": "global"}, story)


def test_closing_lets_every_waiting_batch_go() -> None:
    async def run() -> None:
        world = World({"kind": "global"})
        waiting = asyncio.create_task(world.wait_until_read(world.ask(0)))
        await settled()
        assert not waiting.done()
        await world.scheduler.aclose()
        await asyncio.wait_for(waiting, 30)

    asyncio.run(run())


class HalfDecoded:
    """A decoded cache that has every sample with an even number."""

    def find_all(self, program: str, snapshot: str, samples: Any) -> Any:
        return samples % 2 == 0


def test_samples_that_are_decoded_already_are_not_read_ahead() -> None:
    async def story(world: World) -> None:
        world.scheduler = ReadScheduler(
            world.lookup,  # type: ignore[arg-type]
            world.clock,
            BUDGET,
            HalfDecoded(),  # type: ignore[arg-type]
        )
        waiting = asyncio.create_task(world.wait_until_read(world.ask(0)))
        await settled()
        first = world.lookup.windows[0]
        assert first == [sample for sample in world.order() if sample % 2][: len(first)]
        world.read_all()
        await settled()
        assert waiting.done()

    running({"kind": "global"}, story)


def test_all_samples_are_read_ahead_for_a_job_that_does_not_use_the_decoded_ones() -> None:
    """`cache="off"` beside a job that keeps them: else each of these would cost a seek."""

    async def story(world: World) -> None:
        world.scheduler = ReadScheduler(
            world.lookup,  # type: ignore[arg-type]
            world.clock,
            BUDGET,
            HalfDecoded(),  # type: ignore[arg-type]
        )
        address = FrameAddress(world.plan.hash, 0, 0, batch=BATCH)
        world.scheduler.frame_requested(PlannedFrame(world.plan, world.snapshot, address, kept_bytes=0))
        waiting = asyncio.create_task(world.wait_until_read(address))
        await settled()
        first = world.lookup.windows[0]
        assert first == world.order()[: len(first)]
        world.ask(1)  # a job with the same plan that uses them reads the same windows
        await settled()
        assert all(
            found == world.order()[at : at + len(found)]
            for at, found in zip((0, len(first)), world.lookup.windows, strict=False)
        )
        world.read_all()
        await settled()
        assert waiting.done()

    running({"kind": "global"}, story)


def test_a_batch_is_built_whatever_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def story(world: World) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(module, "DiskReader", no_thread)
            await asyncio.wait_for(world.wait_until_read(world.ask(0)), 30)
        with monkeypatch.context() as broken:
            broken.setattr(module, "cut_window", no_thread)
            await asyncio.wait_for(world.wait_until_read(world.ask(0, epoch=1)), 30)
        with monkeypatch.context() as broken:
            broken.setattr(module, "snapshot_order", no_thread)
            await asyncio.wait_for(world.wait_until_read(world.ask(0, epoch=2)), 30)

    running({"kind": "global"}, story)


def test_samples_of_a_warm_up_are_read_behind_all_windows() -> None:
    async def story(world: World) -> None:
        wanted = np.arange(5, 25, dtype=np.int64)
        reading = asyncio.create_task(world.scheduler.read_samples(world.snapshot, wanted))
        await settled()
        [work] = arms[0].works
        assert (work.background, work.urgent, work.rank) == (True, False, 2)
        assert world.lookup.windows == [wanted.tolist()]
        assert not reading.done()
        world.read_all()
        await reading
        world.lookup.disk = False  # nothing to read, or not on a rotational disk
        await world.scheduler.read_samples(world.snapshot, wanted)
        world.lookup.disk = True
        dropped = asyncio.create_task(world.scheduler.read_samples(world.snapshot, wanted))
        await settled()
        [work] = arms[0].works
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        assert work.cancelled

    running({"kind": "global"}, story)


@pytest.mark.parametrize("batch", [1, BATCH, 100])
def test_a_batch_of_a_full_shuffle_waits_for_no_more_seeks_than_it_has_rows(batch: int) -> None:
    """Its window lies scattered over the disk: of all its samples, each costs a short seek."""
    world = World({"kind": "global"})
    order = snapshot_order(world.plan.spec, world.snapshot, 0)
    seeks = awaited_size(order, batch, world.snapshot, 1.0) / SIZE
    assert seeks >= batch
    assert seeks * (SIZE + SHORT_SEEK_BYTES) <= 1.05 * batch * SEEK_BYTES or seeks < 2 * batch
    # Together, the small windows are the one in whose place they are.
    sizes, usual = [awaited_size(order, batch, world.snapshot, 1.0)], first_size(order, batch)
    while sizes[-1] < usual:
        sizes.append(next_size(order, sizes[-1], BUDGET, usual))
    assert usual - sizes[0] - len(sizes) <= sum(sizes[:-1]) <= usual
    assert sizes[-1] == min(2 * usual, BUDGET)
    # Of a node with less data, the window is dense: reading through the gaps takes less time than seeks.
    dense = MIN_WINDOW_BYTES / SAMPLES / SIZE
    assert awaited_size(order, batch, world.snapshot, dense) == first_size(order, batch)


def test_only_windows_that_a_batch_waits_for_are_small() -> None:
    async def story(world: World) -> None:
        world.ask(0)
        await settled()
        world.read_all()
        assert len(world.lookup.windows[0]) < 2 * BATCH
        for _ in range(5):  # a reader of its own, far from the other; when it has all windows, the next epoch
            world.ask(SAMPLES // BATCH - 1)
            await settled()
            world.read_all()
        assert world.order(1)[: MIN_WINDOW_BYTES // SIZE] in world.lookup.windows

    running({"kind": "global"}, story)
