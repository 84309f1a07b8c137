"""The assembler over the in-memory store, with rows rendered inline: sharing, limits, bad samples,
trouble.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from awscrt.checksums import crc32c

from meshd.batches.assembly.assembler import DERIVED_ROWS, Assembler
from meshd.batches.assembly.bad_sample_ledger import LIMIT, BadSample, BadSampleLedger, read_ledger
from meshd.batches.assembly.frame_buffer import combine_row_crcs
from meshd.batches.assembly.frame_cache import FrameCache
from meshd.batches.read_ahead.arrivals import Arrivals, Progress, Window
from meshd.batches.read_ahead.disk_reader import DiskWork
from meshd.batches.read_ahead.extents import Reads
from meshd.config import TransformSettings
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import DerivedAddress, FrameAddress, RowsAddress
from meshd.core.memory_frames import MemoryAccount, MemoryFrame, make_block
from meshd.core.plan_record import FieldOutput, Plan
from meshd.core.sample_locations import slice_locations
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.records import Location, Meta
from meshd.transform.messages import Failure
from meshd.transform.renderer import RenderResult, RowChecksums
from meshd.util.tenant_limits import tenant_scope
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.frame import tensor_frame
from meshwire.plan.plan_spec import parse_spec, plan_hash
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.messages import FailureKind
    from meshd.transform.renderer import RowWork
    from meshwire.dataset.build_snapshot import Snapshot

SAMPLES = 30


class Stamper:
    """Renders a row as 4 bytes: the sample's first one, and the position. `bad`: samples that fail, and
    how.
    """

    def __init__(self) -> None:
        self.rows = self.calls = 0
        self.bad: dict[int, FailureKind] = {}
        self.called = asyncio.Event()
        self.gate: asyncio.Event | None = None

    async def render(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[RowWork],
        *,
        frame_fd: int,
        frame_bytes: int,
        targets: Sequence[tuple[int, int] | None],
        assets: Sequence[Any] = (),
        samples: SampleSet | None = None,
        early: bool = False,
    ) -> RenderResult:
        self.calls += 1
        self.called.set()
        if self.gate is not None:
            await self.gate.wait()
        self.rows += len(rows)
        target = targets[0]
        assert target is not None
        failures, sums = [], {}
        for work in rows:
            ((path, offset, length, *_),) = work.sources[0]
            fd = os.open(path, os.O_RDONLY)
            sample = os.pread(fd, length, offset)[0]
            os.close(fd)
            if sample in self.bad:
                failures.append(Failure(work.row, 0, self.bad[sample], "stamp", "no good"))
            row = bytes([sample, work.position % 256, epoch, 0])
            sums[work.row] = crc32c(row)
            os.pwrite(frame_fd, row, target[0] + 4 * work.row)
        return RenderResult(failures, checksums=[RowChecksums(tuple(sums), (tuple(sums.values()),))])


class Bench:
    """A store with a snapshot of SAMPLES objects, and an assembler over it."""

    def __init__(self, cache: int = 1 << 20) -> None:
        self.store = MemoryStore(ManualClock())
        self.renderer = Stamper()
        self.assembler = Assembler(
            self.store,
            self.renderer,
            TransformSettings(1, cache),
            ArchiveService(LocalArchives(self.store, list[str]().append), single_node_objects(self.store)),
            node="n1",
        )

    async def fill(self) -> Snapshot:
        listing = []
        for sample in range(SAMPLES):
            data, key = bytes([sample]), f"d/{'ab'[sample % 2]}/{sample:03d}.bin"
            writer = self.store.writer("b", key, size=1)
            await writer.write(data)
            etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            await writer.commit(Meta(etag))
            listing.append((key, etag, 1))
        fields = parse_fields({"image": {"ext": "bin"}, "label": {"class": "prefix"}})
        snapshot = build_from_objects(sorted(listing), source="s3://b/d/", fields=fields).snapshot
        await self.assembler.catalog.add_snapshot(snapshot)
        return snapshot

    async def plan(self, **spec: Any) -> str:
        snapshot = await self.fill()
        parsed = parse_spec({"seed": 3, "tail": "ragged", **spec})
        digest = plan_hash(snapshot.hash, parsed)
        outputs = {"image": FieldOutput("uint8", (4,))}
        await self.assembler.catalog.add_plan(Plan(digest, snapshot.hash, "b", SAMPLES, parsed, outputs))
        return digest

    async def get(self, address: Any) -> tuple[dict[str, Any], str]:
        frame = await self.assembler.get_frame(address)
        data = os.pread(frame.fd, frame.size, 0)
        frame.close()
        tensor_frame.verify_frame(data)
        return tensor_frame.tensor_views(data), frame.result


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.store.close()


def test_rows_are_where_the_order_puts_them(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        got, _ = await bench.get(FrameAddress(plan, 4, 0, batch=SAMPLES))
        assert sorted(got["image"][:, 0].tolist()) == list(range(SAMPLES))
        assert got["image"][:, 1].tolist() == got["__pos"].tolist() == list(range(SAMPLES))
        assert (got["image"][:, 2] == 4).all()
        names = sorted(range(SAMPLES), key=lambda sample: "ab"[sample % 2] + f"{sample:03d}")
        assert {names.index(int(row[0])) for row in got["image"]} == set(range(SAMPLES))
        assert (got["label"] == got["image"][:, 0] % 2).all()

    asyncio.run(run())


class HalfRead:
    """Instead of the scheduler: one window of all samples, which a disk brings one by one."""

    def __init__(self, store: MemoryStore, snapshot: Snapshot) -> None:
        keys = snapshot.objects.keys
        records = [store.get("b", keys[number]) for number in range(SAMPLES)]
        places = [store.locate(record)[0] for record in records if record is not None]
        paths = sorted({place.path for place in places})
        starts = sorted((paths.index(place.path), place.offset) for place in places)
        files, offsets = np.array(starts, np.int64).T
        reads = Reads(files, offsets, np.ones(SAMPLES, np.int64), SAMPLES)
        self.progress = Progress()
        self.window = Window(0, SAMPLES, SAMPLES, self.progress)
        self.work = DiskWork(1, paths, reads, self.window.finish)
        self.window.works.append(self.work)

    def frame_requested(self, _: object) -> None: ...

    async def arrivals(self, _: FrameAddress) -> Arrivals:
        found = Arrivals([self.window], ManualClock())
        await found.until_begun()
        return found

    def read(self, finished: int) -> None:
        self.work.finished = finished
        self.progress.tell()


def test_rows_are_built_while_the_disk_reads_the_others(bench: Bench) -> None:
    async def run() -> None:
        digest = await bench.plan()
        address = FrameAddress(digest, 0, 0, batch=SAMPLES)
        plain, _ = await bench.get(address)
        snapshot = await bench.assembler.catalog.snapshot(
            (await bench.assembler.catalog.plan(digest)).snapshot
        )
        reading = HalfRead(bench.store, snapshot)
        bench.assembler = Assembler(
            bench.store,
            bench.renderer,
            TransformSettings(1, 1 << 20),
            ArchiveService(LocalArchives(bench.store, list[str]().append), single_node_objects(bench.store)),
            read_ahead=reading,  # type: ignore[arg-type]
        )
        renderer = bench.renderer
        renderer.rows = renderer.calls = 0
        getting = asyncio.create_task(bench.get(address))
        # A group is an eighth of the batch, and 8 rows, at least: what is left at the end comes in any case.
        for finished, rows in ((0, 0), (5, 0), (12, 12), (19, 12), (21, 21), (29, 29)):
            renderer.called.clear()
            reading.read(finished)
            if rows > renderer.rows:
                await asyncio.wait_for(renderer.called.wait(), 30)
            await asyncio.sleep(0.01)
            assert renderer.rows == rows
            assert not getting.done()
        reading.window.finish()
        views, _ = await getting
        assert (renderer.rows, renderer.calls) == (SAMPLES, 4)
        assert np.array_equal(views["image"], plain["image"])

    asyncio.run(run())


def test_one_flight_an_address_and_a_cache_behind_it(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        address = FrameAddress(plan, 0, 0, batch=10)
        results = await asyncio.gather(*(bench.get(address) for _ in range(5)))
        assert sorted(result for _, result in results) == ["joined"] * 4 + ["miss"]
        assert bench.renderer.rows == 10
        assert (await bench.get(address))[1] == "hit"
        await bench.get(RowsAddress(plan, 0, (1, 2)))
        assert (await bench.get(RowsAddress(plan, 0, (1, 2))))[1] == "miss"  # random access is not kept
        assert bench.renderer.rows == 14

    asyncio.run(run())


def test_the_cache_is_bounded() -> None:
    memory = MemoryAccount()
    cache: FrameCache[int] = FrameCache(100)
    for number in range(5):
        cache.put(number, MemoryFrame(40, memory))
    assert (len(cache), cache.bytes, memory.bytes) == (2, 80, 80)
    assert cache.get(2) is None
    assert cache.get(3) is not None
    cache.put(9, MemoryFrame(40, memory))
    assert cache.get(4) is None  # 3 was used after it
    cache.put(10, MemoryFrame(101, memory))
    assert cache.get(10) is None
    held = MemoryFrame(7, memory).hand_out("miss")
    cache.clear()
    assert (cache.bytes, memory.bytes) == (0, 7)
    held.close()
    assert memory.bytes == 0


def test_frames_in_one_block_of_memory_leave_the_cache_together() -> None:
    memory, size = MemoryAccount(), mmap.PAGESIZE
    cache: FrameCache[int] = FrameCache(4 * size)
    for first in (0, 2, 4):
        for number, frame in enumerate(make_block([size, size], memory), first):
            cache.put(number, frame)
        del frame
        assert cache.get(0) is not None or first == 4  # used again, while its neighbour is not
    assert memory.bytes == cache.bytes <= 4 * size
    assert [cache.get(number) is not None for number in range(6)] == [False] * 2 + [True] * 4
    cache.put(6, make_block([size] * 5, memory)[0])
    assert cache.get(6) is None, "its block alone exceeds the limit"
    cache.clear()
    assert (len(cache), cache.bytes, memory.bytes) == (0, 0, 0)


def test_frames_nobody_takes_hold_others_back(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        bench.assembler._bytes_room.limit = 10_000  # as if memory were scarce
        slow = [await bench.assembler.get_frame(RowsAddress(plan, 0, (number,))) for number in range(3)]
        with pytest.raises(BatchError, match="slow clients") as caught:
            await bench.get(RowsAddress(plan, 0, (9,)))
        assert caught.value.code == "Busy"
        for frame in slow:
            frame.close()
        await bench.get(RowsAddress(plan, 0, (9,)))

    asyncio.run(run())


def test_slow_clients_of_one_key_do_not_keep_another_out(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        bench.assembler._bytes_room.limit = 10_000
        with tenant_scope("ann"):
            slow = [await bench.assembler.get_frame(RowsAddress(plan, 0, (number,))) for number in range(3)]
            with pytest.raises(BatchError, match="slow clients"):
                await bench.get(RowsAddress(plan, 0, (9,)))
        with tenant_scope("ben"):
            await bench.get(RowsAddress(plan, 0, (9,)))
        for frame in slow:
            frame.close()

    asyncio.run(run())


def test_objects_of_views_count_as_many_rows(bench: Bench) -> None:
    async def run() -> None:
        await bench.fill()
        bench.assembler._rows_room.limit = 2 * DERIVED_ROWS
        bench.renderer.gate = asyncio.Event()
        key = "d/a/000.bin"
        record = bench.store.get("b", key)
        assert record is not None
        addresses = [DerivedAddress("0" * 64, "{}", "b", key, record.etag, number) for number in range(3)]
        asked = [asyncio.create_task(bench.assembler.get_frame(address)) for address in addresses]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        error = refused.exception()
        assert isinstance(error, BatchError)
        assert (error.code, error.retry_after, len(waiting)) == ("Busy", 1, 2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert "<Assembler 0 rows" in repr(bench.assembler)

    asyncio.run(run())


def test_a_key_that_fills_the_node_does_not_keep_another_out(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        bench.assembler._rows_room.limit = 8
        bench.renderer.gate = asyncio.Event()

        async def ask(name: str, sample: int) -> Any:
            with tenant_scope(name):
                return await bench.get(RowsAddress(plan, 0, (sample, sample)))

        asked = [asyncio.create_task(ask("ann", sample)) for sample in range(8)]
        asked.append(asyncio.create_task(ask("ben", 20)))
        await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        assert not asked[8].done()
        bench.renderer.gate.set()
        got = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, BatchError) for answer in got] == [False] * 4 + [True] * 4 + [False]
        assert {(answer.code, answer.retry_after) for answer in got if isinstance(answer, BatchError)} == {
            ("Busy", 1)
        }

    asyncio.run(run())


def test_nobody_waits_nothing_is_built(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        bench.renderer.gate = asyncio.Event()
        address = FrameAddress(plan, 0, 0, batch=10)
        asking = [asyncio.ensure_future(bench.get(address)) for _ in range(2)]
        await bench.renderer.called.wait()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.sleep(0)
        assert bench.renderer.rows == 0
        bench.renderer.gate.set()
        assert (await bench.get(address))[1] == "miss"
        assert "0 rows being built" in repr(bench.assembler)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first_rows", "bytes_room", "bound"), [(20_000, 1 << 20, "20000 rows"), (2_000, 50_000, r"\d+ bytes")]
)
def test_beyond_its_room_the_assembler_says_come_back(
    bench: Bench, first_rows: int, bytes_room: int, bound: str
) -> None:
    async def run() -> None:
        plan = await bench.plan(tail="pad")
        bench.renderer.gate = asyncio.Event()
        bench.assembler._bytes_room.limit = bytes_room
        first = asyncio.ensure_future(bench.get(FrameAddress(plan, 0, 0, batch=first_rows)))
        await bench.renderer.called.wait()
        with pytest.raises(BatchError, match=f"^{bound} are already being built") as caught:
            await bench.get(FrameAddress(plan, 1, 0, batch=20_000))
        assert (caught.value.code, caught.value.retry_after) == ("Busy", 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(run())


def test_stand_ins_are_keyed_not_lucky(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan(max_bad=1.0)
        bench.renderer.bad = dict.fromkeys(range(20), "bad")
        whole, _ = await bench.get(FrameAddress(plan, 0, 0, batch=SAMPLES))
        assert (whole["image"][:, 0] >= 20).all()
        assert whole["__status"].sum() == 20
        assert (whole["label"] == whole["image"][:, 0] % 2).all()
        for world in (2, 7):
            parts = [
                (await bench.get(FrameAddress(plan, 0, 0, rank, world, SAMPLES)))[0] for rank in range(world)
            ]
            np.testing.assert_array_equal(np.concatenate([part["image"] for part in parts]), whole["image"])
        ledger = read_ledger(bench.assembler.catalog, plan)
        assert len(ledger) == 20
        assert max(entry["times"] for entry in ledger) > 1

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_masked_and_dropped(bench: Bench, policy: str) -> None:
    async def run() -> None:
        plan = await bench.plan(max_bad=1.0, on_bad=policy)
        bench.renderer.bad = {3: "bad", 4: "bad"}
        got, _ = await bench.get(FrameAddress(plan, 0, 0, batch=SAMPLES))
        if policy == "drop":
            assert sorted(got["image"][:, 0].tolist()) == [s for s in range(SAMPLES) if s not in (3, 4)]
            assert got["__pos"].size == SAMPLES - 2
        else:
            rows = np.flatnonzero(got["__status"] == 2)
            assert rows.size == 2
            assert not got["image"][rows].any()

    asyncio.run(run())


def test_all_rows_bad_and_dropped_is_an_empty_batch(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan(max_bad=1.0, on_bad="drop")
        bench.renderer.bad = dict.fromkeys(range(SAMPLES), "bad")
        got, _ = await bench.get(FrameAddress(plan, 0, 0, batch=SAMPLES))
        assert got["image"].shape == (0, 4)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "spec", "code"),
    [
        ("bad", {"on_bad": "raise"}, "BadSample"),
        ("bad", {"max_bad": 0.01}, "BadSample"),
        ("op", {"on_bad": "mask", "max_bad": 1.0}, "OpFailed"),
        ("read", {"on_bad": "mask", "max_bad": 1.0}, "Busy"),
    ],
)
def test_what_is_raised(bench: Bench, kind: FailureKind, spec: dict[str, Any], code: str) -> None:
    async def run() -> None:
        plan = await bench.plan(**spec)
        bench.renderer.bad = {3: kind, 4: kind}
        address = FrameAddress(plan, 0, 0, batch=SAMPLES)
        with pytest.raises(BatchError) as caught:
            await bench.get(address)
        assert caught.value.code == code
        assert caught.value.help
        assert BatchError.from_document(caught.value.to_document()).message == caught.value.message
        if code != "Busy":
            assert caught.value.detail["node"] == "n1"
        bench.renderer.bad = {}  # an error is not kept: the address works once its cause is gone
        assert (await bench.get(address))[1] == "miss"

    asyncio.run(run())


def test_bytes_that_moved_are_found_again(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan(on_bad="raise")
        render = bench.renderer.render

        async def once(*args: Any, **options: Any) -> Any:
            bench.renderer.bad = {5: "read"} if not bench.renderer.calls else {}
            return await render(*args, **options)

        bench.renderer.render = once  # type: ignore[method-assign]
        got, _ = await bench.get(FrameAddress(plan, 0, 0, batch=SAMPLES))
        assert sorted(got["image"][:, 0].tolist()) == list(range(SAMPLES))
        assert bench.renderer.rows == SAMPLES + 1

    asyncio.run(run())


def test_addresses_outside_the_epoch(bench: Bench) -> None:
    async def run() -> None:
        plan = await bench.plan()
        for wrong in (
            FrameAddress(plan, 0, 3, batch=10),
            FrameAddress(plan, 0, 0, 5, 5, 10),
            FrameAddress(plan, 0, 0, batch=10, origin=31),
            RowsAddress(plan, 0, (SAMPLES,)),
        ):
            with pytest.raises(BatchError) as caught:
                await bench.get(wrong)
            assert caught.value.code == "InvalidPlan"
        with pytest.raises(BatchError, match="no plan"):
            await bench.get(FrameAddress("0" * 64, 0, 0))

    asyncio.run(run())


def test_pieces_of_split_extents() -> None:
    places = [Location("/a", 100, 10, 1), Location("/b", 0, 5, 2), Location("/c", 7, 20, 3)]
    assert slice_locations(places, 0, 35) == (("/a", 100, 10, 1), ("/b", 0, 5, 2), ("/c", 7, 20, 3))
    assert slice_locations(places, 8, 4) == (("/a", 108, 2), ("/b", 0, 2))
    assert slice_locations(places, 10, 5) == (("/b", 0, 5, 2),)
    assert slice_locations(places, 14, 3) == (("/b", 4, 1), ("/c", 7, 2))
    assert slice_locations(places, 35, 0) == ()


def test_the_ledger_is_bounded_and_survives(bench: Bench) -> None:
    async def run() -> None:
        catalog = bench.assembler.catalog
        ledger = BadSampleLedger(catalog)
        many = [BadSample(f"k{number}", "decode", "x" * 1000, 0, 0) for number in range(LIMIT + 5)]
        await asyncio.gather(*(ledger.record_bad_samples("p", many[start::3]) for start in range(3)))
        await BadSampleLedger(catalog).record_bad_samples("p", many[:1])
        entries = read_ledger(catalog, "p")
        assert len(entries) == LIMIT
        assert entries[0]["times"] == 2
        assert len(entries[0]["error"]) <= 1000
        assert read_ledger(catalog, "other") == []

    asyncio.run(run())


def test_ledgers_of_many_plans_are_not_all_in_memory(bench: Bench) -> None:
    async def run() -> None:
        ledger = BadSampleLedger(bench.assembler.catalog)
        for number in range(100):
            await ledger.record_bad_samples(f"p{number}", [BadSample("k", "decode", "x", 0, 0)])
        assert repr(ledger) == "<BadSampleLedger of 64 plans>"
        await ledger.record_bad_samples("p0", [BadSample("k", "decode", "x", 0, 0)])
        assert read_ledger(bench.assembler.catalog, "p0")[0]["times"] == 2

    asyncio.run(run())


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 0), (1, 1), (7, 3), (100, 1000), (3, 100_000)])
def test_checksums_of_rows_fold_into_the_tensors(rows: int, width: int) -> None:
    data = np.random.default_rng(rows).integers(0, 256, (rows, width), dtype=np.uint8)
    assert combine_row_crcs([crc32c(row.tobytes()) for row in data], width) == crc32c(data.tobytes())
