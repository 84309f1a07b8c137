"""Batches of samples without ops: the bytes of rows rendered one by one, and a bounded number of operations.

The bounds count calls and messages, not seconds, so that a cost for each sample cannot come back unseen.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.batches.assembly import assembler, frame_builder, series_builder
from meshd.batches.assembly.assembler import Assembler
from meshd.batches.assembly.column_copies import BLOCK_ROWS
from meshd.batches.assembly.frame_buffer import metadata_of
from meshd.config import StoreSettings, TransformSettings
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress, common_block
from meshd.core.memory_frames import is_sealed
from meshd.core.plan_record import FieldOutput, Plan
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.integrity.verification import drain_damage_reports
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.transform.row_blocks import BlockCopier
from meshd.transform.source_files import SourceGoneError
from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.formats.mds import index_samples, parse_mds, sample_bounds
from meshwire.formats.tar import scan_tar
from meshwire.formats.tfrecord_index import index_records
from meshwire.frame import tensor_frame
from meshwire.plan.plan_spec import parse_spec, plan_hash
from tests.support.archive_files import tar_of
from tests.support.call_counts import Calls
from tests.support.inline_renderer import InlineRenderer
from tests.support.manual_clock import ManualClock
from tests.support.mds_writer import mds_files
from tests.support.paged_snapshots import MemoryPages
from tests.support.single_node_objects import single_node_objects
from tests.support.tf_example_writer import BytesList, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshd.core.frame_address import Frame
    from meshwire.dataset.build_snapshot import Snapshot

FILES, ROWS = 4, 600
WIDTH = 12
NUMBERS = [
    {"op": "frombuffer", "field": "text", "version": "1", "args": {"dtype": "uint8", "shape": [WIDTH]}},
    {"op": "cast", "field": "text", "version": "1", "args": {"dtype": "float32"}},
]
"""Ops that make rows of a fixed size of lines of WIDTH bytes."""
SMALL, STEPS = 256, 10
"""Rows of a batch that is requested with others, and batches of an epoch."""
SHARDS = ("lines", "tar", "tfrecord", "mds")
MOST_CALLS = 2300
"""Calls of Python and C functions for a batch of 1,024 rows, in the coordinator and a transform process."""
OBJECT_CALLS = 40
"""Such calls for a sample that is an object of its own: it is looked up, and its checksum compared."""


def shard_of(
    kind: str, number: int, rows: Sequence[bytes], *, labels: bool = False
) -> tuple[str, bytes, Any]:
    """Key, content and index of a shard with these samples; `labels`: a tar has them in two folders."""
    if kind == "lines":
        return f"d/{number}.txt", b"\n".join(rows), None
    if kind == "tfrecord":
        data = b"".join(record(example({"x": BytesList([row])})) for row in rows)
        return f"d/{number}.tfrecord", data, index_records([data], ["x"])
    if kind == "mds":
        files = mds_files({"x": "bytes"}, [{"x": row} for row in rows], shard=len(rows))
        [shard], data = parse_mds(files["index.json"]), files["shard.00000.mds"]
        bounds = sample_bounds(shard, data[: shard.head_bytes])
        places = bounds[:-1, None] + np.arange(shard.width)
        heads = np.frombuffer(data, np.uint8)[places]
        return f"d/{number}.mds", data, index_samples(shard, bounds, heads, ["x"])
    folders = ("a/", "b/") if labels else ("", "")
    data = tar_of({f"{folders[row % 2]}{row:06}.txt": text for row, text in enumerate(rows)})
    return f"d/{number}.tar", data, index_tar(scan_tar(lambda at, size: data[at : at + size], 0, len(data)))


def content_of(frame: Frame) -> bytes:
    return os.pread(frame.fd, frame.size, frame.offset)


class Node:
    """A store with files of samples, and an assembler over it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(
            StoreSettings.at(folder / "store", durability="relaxed"), writer="w0", clock=ManualClock()
        )
        self.renderer, self.pages = InlineRenderer(), MemoryPages()
        archives = ArchiveService(
            LocalArchives(self.store, list[str]().append), single_node_objects(self.store)
        )
        self.assembler = Assembler(self.store, self.renderer, TransformSettings(1, 0), archives)

    def close(self) -> None:
        self.renderer.close()
        self.store.close()

    async def plan(self, kind: str, *, fixed: bool = False, labels: bool = False) -> str:
        """`fixed`: lines of one length, read as numbers; `labels`: with the class of each."""
        snapshot = await self._snapshot(kind, fixed=fixed, labels=labels)
        await self.assembler.catalog.add_snapshot(snapshot)
        spec = parse_spec({"seed": 3, "tail": "ragged", **({"ops": NUMBERS} if fixed else {})})
        digest = plan_hash(snapshot.hash, spec)
        output = FieldOutput("float32", (WIDTH,)) if fixed else FieldOutput("uint8", None)
        plan = Plan(digest, snapshot.hash, "b", snapshot.samples, spec, {"text": output})
        await self.assembler.catalog.add_plan(plan)
        return digest

    async def _put(self, key: str, data: bytes) -> str:
        writer = self.store.writer("b", key, size=len(data))
        await writer.write(data)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        await writer.commit(Meta(etag))
        return etag

    async def _snapshot(self, kind: str, *, fixed: bool = False, labels: bool = False) -> Snapshot:
        classes: dict[str, Any] = {"kind": {"class": "prefix"}} if labels else {}
        source, fields = "s3://b/d/", parse_fields({"text": {"ext": ["txt"]}, **classes})
        if kind in ("tfrecord", "mds"):
            fields = parse_fields({"text": {"feature" if kind == "tfrecord" else "column": "x"}})
        found = list[Any]()
        for number in range(FILES):
            rows = [b"%d" % (number * ROWS + row) * (1 + row % 9) for row in range(ROWS)]
            rows = [row.zfill(WIDTH)[-WIDTH:] for row in rows] if fixed else rows
            if kind == "objects":
                for row, data in enumerate(rows):
                    key = f"d/{number}{row:06}.txt"
                    found.append((key, await self._put(key, data), len(data)))
                continue
            key, data, index = shard_of(kind, number, rows, labels=labels)
            etag = await self._put(key, data)
            found.append((key, etag, data) if kind == "lines" else (key, etag, len(data), index))
        if kind == "objects":
            return build_from_objects(found, source=source, fields=fields).snapshot
        if kind == "lines":
            return self.pages.build(found, source, fields).snapshot
        if kind == "tar":
            return self.pages.build_tars(found, source, fields).snapshot
        return self.pages.build_records(
            found, source, fields, "mds" if kind == "mds" else "tfrecord"
        ).snapshot

    async def batch(self, plan: str, step: int, rows: int = 1024) -> bytes:
        frame = await self.assembler.get_frame(FrameAddress(plan, 1, step, batch=rows))
        data = os.pread(frame.fd, frame.size, 0)
        frame.close()
        tensor_frame.verify_frame(data)
        return data

    async def series(self, plan: str, first: int, count: int) -> list[bytes]:
        """Consecutive batches, requested together."""
        frames = await self.assembler.get_frames(FrameAddress(plan, 1, first, batch=SMALL), count)
        found = []
        for frame in frames:
            found.append(content_of(frame))
            frame.close()
            tensor_frame.verify_frame(found[-1])
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [*SHARDS, "objects"])
def test_batches_are_those_of_rows_one_by_one(node: Node, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        plan = await node.plan(kind)
        copied = [await node.batch(plan, step) for step in range(3)]
        assert node.renderer.messages == node.renderer.rows == 3  # a block each
        monkeypatch.setattr(frame_builder, "FEWEST_ROWS", 1 << 30)
        assert [await node.batch(plan, step) for step in range(3)] == copied
        assert node.renderer.rows == 3 + FILES * ROWS

    asyncio.run(run())


def counted(node: Node, plan: str, rows: int) -> int:
    """Calls of Python and C functions for a batch of so many rows, after the first batch."""

    async def run() -> int:
        await node.batch(plan, 0)  # maps files, finds the places of all samples
        calls = Calls()
        with calls:
            await node.batch(plan, 1, rows)
        return calls.count

    return asyncio.run(run())


@pytest.mark.parametrize("kind", SHARDS)
def test_a_batch_takes_few_calls_whatever_its_rows(node: Node, kind: str) -> None:
    plan = asyncio.run(node.plan(kind))
    calls = [counted(node, plan, rows) for rows in (256, 1024)]
    assert 100 < calls[1] < MOST_CALLS, calls
    assert calls[1] - calls[0] < 100, calls  # 768 more rows


def test_objects_cost_their_look_up_and_no_rendering(node: Node) -> None:
    plan = asyncio.run(node.plan("objects"))
    few, many = (counted(node, plan, rows) for rows in (256, 1024))
    assert node.renderer.messages == node.renderer.rows == 4  # a block each
    assert many - few < 768 * OBJECT_CALLS, (few, many)


def test_an_object_that_is_damaged_is_found_by_its_checksum(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan("objects")
        await node.batch(plan, 0)
        found = node.store.get("b", f"d/0{0:06}.txt")
        assert found is not None
        [place] = node.store.locate(found)
        file = os.open(place.path, os.O_RDWR)
        os.pwrite(file, b"X", place.offset)
        os.close(file)

        async def epoch() -> None:
            for step in range(3):
                await node.batch(plan, step)

        with pytest.raises(BatchError, match=r"d/0000000\.txt is damaged on disk") as caught:
            await epoch()
        assert caught.value.code == "CorruptData"
        assert node.renderer.rows > 1024  # they were rendered one by one
        await node.store.quarantine.process_damage_reports()
        known = node.store.get("b", f"d/0{0:06}.txt")
        assert known is not None
        assert known.broken

    asyncio.run(run())


@pytest.mark.parametrize("kind", [*SHARDS, "objects"])
def test_batches_requested_together_are_those_requested_alone(node: Node, kind: str) -> None:
    async def run() -> None:
        plan = await node.plan(kind)
        alone = [await node.batch(plan, step, SMALL) for step in range(STEPS)]
        before = node.renderer.messages
        assert await node.series(plan, 0, STEPS) == alone
        assert node.renderer.messages - before == (STEPS if kind == "objects" else 1)
        assert await node.series(plan, STEPS - 3, 8) == alone[-3:]  # there are no more
        with pytest.raises(BatchError, match="step"):
            await node.series(plan, STEPS, 2)

    asyncio.run(run())


def test_fields_of_a_fixed_size_are_built_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        plan = await node.plan("lines", fixed=True)
        alone = [await node.batch(plan, step, SMALL) for step in range(STEPS)]
        before = node.renderer.messages
        assert await node.series(plan, 0, STEPS) == alone
        assert node.renderer.messages - before == 1
        node.assembler._cache.clear()
        monkeypatch.setattr(assembler, "MOST_BYTES", 8 * WIDTH * SMALL)
        assert await node.series(plan, 0, 4) == alone[:4]
        assert node.renderer.messages - before == 1 + 4  # too many bytes

    asyncio.run(run())


def test_batches_with_labels_are_built_together_in_one_block_of_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        plan = await node.plan("tar", labels=True)
        alone = [await node.batch(plan, step, SMALL) for step in range(STEPS)]
        kinds = [tensor_frame.tensor_views(each)["kind"] for each in alone]
        assert set(np.concatenate(kinds).tolist()) == {0, 1}
        for rows, blocks in ((BLOCK_ROWS, 1), (3 * SMALL, 4), (SMALL - 1, STEPS)):
            node.assembler._cache.clear()
            monkeypatch.setattr(series_builder, "BLOCK_ROWS", rows)
            before = node.renderer.rows
            frames = await node.assembler.get_frames(FrameAddress(plan, 1, 0, batch=SMALL), STEPS)
            assert node.renderer.rows - before == blocks
            block = common_block(frames)
            assert block is not None
            assert is_sealed(frames[0].fd, block.size)
            assert [content_of(each) for each in frames] == alone
            for frame in frames:
                frame.close()

    asyncio.run(run())


def test_batches_whose_headers_differ_in_length_are_built_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        plan = await node.plan("lines", fixed=True)
        alone = [await node.batch(plan, step, SMALL) for step in range(4)]
        node.assembler._cache.clear()
        monkeypatch.setattr(series_builder, "metadata_of", longer)
        before = node.renderer.rows
        assert await node.series(plan, 0, 4) == alone
        assert node.renderer.rows - before == 1 + 4  # the series, and each batch

    def longer(address: FrameAddress) -> dict[str, str]:
        return metadata_of(address) | ({"more": "x" * 5000} if address.step == 2 else {})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("counts", "firsts"),
    [
        ([4, 4, 4], [0, 2, 3]),
        ([6, 5, 5], [0, 1, 3]),
        ([11, 1, 12, 2], [0, 1, 2, 3, 4]),
        ([0, 0, 10, 0, 1], [0, 4, 5]),
    ],
)
def test_blocks_have_whole_frames(
    counts: list[int], firsts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_builder, "BLOCK_ROWS", 10)
    assert series_builder.frames_of_blocks(counts) == firsts


@pytest.mark.parametrize("kind", SHARDS)
def test_batches_requested_together_share_their_fixed_costs(node: Node, kind: str) -> None:
    async def run() -> tuple[int, int]:
        plan = await node.plan(kind)
        await node.series(plan, 0, 4)  # maps files, finds the places of all samples
        together, alone = Calls(), Calls()
        with together:
            await node.series(plan, 0, 8)
        with alone:
            for step in range(8):
                await node.batch(plan, step, SMALL)
        return together.count, alone.count

    together, alone = asyncio.run(run())
    assert 0 < together < alone / 2, (together, alone)


def test_two_jobs_that_request_the_same_series_share_it(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan("lines")
        first = FrameAddress(plan, 1, 0, batch=SMALL)
        both = await asyncio.gather(*(node.assembler.get_frames(first, 4) for _ in range(2)))
        assert node.renderer.messages == 1
        assert [{frame.result for frame in frames} for frames in both] == [{"miss"}, {"joined"}]
        for one, other in zip(*both, strict=True):
            assert content_of(one) == content_of(other)
            one.close()
            other.close()

    asyncio.run(run())


def test_series_that_overlap_build_each_frame_once(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan("lines")
        alone = [await node.batch(plan, step, SMALL) for step in range(6)]
        node.assembler._cache.clear()
        first, later, third = (FrameAddress(plan, 1, step, batch=SMALL) for step in (0, 2, 3))
        get = node.assembler.get_frames
        one, other, single = await asyncio.gather(
            get(first, 4), get(later, 4), node.assembler.get_frame(third)
        )
        assert {frame.result for frame in one} == {"miss"}
        assert [frame.result for frame in other] == ["joined", "joined", "miss", "miss"]
        assert single.result == "joined"
        found = [content_of(frame) for frame in (*one, *other, single)]
        assert found == [*alone[:4], *alone[2:], alone[3]]
        for frame in (*one, *other, single):
            frame.close()

    asyncio.run(run())


def test_a_series_that_is_left_leaves_nobody_without_frames(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan("lines")
        alone = [await node.batch(plan, step, SMALL) for step in range(6)]
        node.assembler._cache.clear()
        first, later = (FrameAddress(plan, 1, step, batch=SMALL) for step in (0, 2))
        left = asyncio.create_task(node.assembler.get_frames(first, 4))
        waiting = asyncio.create_task(node.assembler.get_frames(later, 4))
        for _ in range(3):
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        frames = await waiting
        assert [content_of(frame) for frame in frames] == alone[2:]
        for frame in frames:
            frame.close()
        assert not node.assembler._series._running

    asyncio.run(run())


def test_what_cannot_be_copied_together_is_rendered_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        plan = await node.plan("lines")
        alone = [await node.batch(plan, step, SMALL) for step in range(4)]
        before = node.renderer.rows
        monkeypatch.setattr(BlockCopier, "copy", broken)
        assert await node.series(plan, 0, 4) == alone
        assert node.renderer.rows - before == 1 + 4 + 4 * SMALL  # the series, each batch, and its rows

    def broken(*_: Any) -> Any:
        raise SourceGoneError("gone")

    asyncio.run(run())


def test_a_file_that_cannot_be_read_is_reported_as_damaged(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each later batch would fail alike, even where another node has the bytes."""
    monkeypatch.setattr(frame_builder, "FEWEST_ROWS", 1 << 30)  # rows are read, not mapped
    drain_damage_reports(lambda extent: True)

    async def run() -> None:
        plan = await node.plan("lines")
        found = node.store.get("b", "d/0.txt")
        assert found is not None
        [extent], [place] = found.extents, node.store.locate(found)
        os.truncate(place.path, place.offset + 1)
        with pytest.raises(BatchError, match="cannot be read now") as caught:
            await node.batch(plan, 0)
        assert caught.value.code == "Busy"
        assert extent in drain_damage_reports(lambda extent: True)

    asyncio.run(run())


def test_a_replaced_file_fails_batches_requested_together(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan("lines")
        await node._put("d/0.txt", b"other")
        with pytest.raises(BatchError, match=r"d/0\.txt was replaced") as caught:
            await node.series(plan, 0, 4)
        assert caught.value.code == "SnapshotChanged"

    asyncio.run(run())
