"""Pages of snapshots are opened before the batches that need them, and never on the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from meshd.batches.assembly.assembler import Assembler
from meshd.batches.read_ahead import page_prefetcher
from meshd.config import StoreSettings, TransformSettings
from meshd.core.api_errors import BatchError
from meshd.core.document_store import DocumentStore
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshd.datasets import snapshot_pages
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.datasets.service import DatasetService
from meshd.datasets.snapshot_pages import SnapshotPages
from meshd.store.records import Meta
from meshd.store.store import Store
from meshwire.dataset import paged_columns
from meshwire.dataset.fields import Source, parse_fields
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.frame import tensor_frame
from meshwire.plan.epoch_order import snapshot_order
from meshwire.plan.plan_spec import parse_spec, plan_hash
from tests.support.inline_renderer import InlineRenderer
from tests.support.manual_clock import ManualClock
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES, ROWS, BATCH = 90, 8, 16
FIELDS = parse_fields({"text": {"ext": ["txt"]}})
PATIENCE = 60.0


class Node:
    """A store with files of lines, and an assembler that has opened none of their pages."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(
            StoreSettings.at(folder / "store", durability="relaxed"), writer="w0", clock=ManualClock()
        )
        self.renderer, self.opened = InlineRenderer(), list[tuple[int, bool]]()
        self.start()

    def start(self) -> None:
        """Begin with nothing in memory."""
        objects = single_node_objects(self.store)
        archives = ArchiveService(LocalArchives(self.store, list[str]().append), objects)
        self.catalog, nobody = DocumentStore(self.store), cast("Any", None)
        self.datasets = DatasetService(self.store, self.catalog, nobody, archives, objects, nobody)
        self.assembler = Assembler(
            self.store, self.renderer, TransformSettings(1, 0), archives, catalog=self.catalog
        )

    def close(self) -> None:
        self.renderer.close()
        self.store.close()

    async def plan(self, shuffle: dict[str, Any]) -> Plan:
        for number in range(FILES):
            lines = [f"{number * ROWS + row:0{4 + number}}" for row in range(ROWS)]
            data = "\n".join(lines).encode()  # of another length in each file: no two pages are equal
            writer = self.store.writer("b", f"d/{number:03}.txt", size=len(data))
            await writer.write(data)
            await writer.commit(Meta(hashlib.md5(data, usedforsecurity=False).hexdigest()))
        snapshot = (await self.datasets.scan_source(Source("b", "d/"), "lines", FIELDS))[0].snapshot
        await self.catalog.add_snapshot(snapshot)
        spec = parse_spec({"seed": 3, "tail": "ragged", "shuffle": shuffle})
        outputs = {"text": FieldOutput("uint8", None)}
        plan = Plan(plan_hash(snapshot.hash, spec), snapshot.hash, "b", snapshot.samples, spec, outputs)
        await self.catalog.add_plan(plan)
        self.start()
        self.opened.clear()
        return plan

    async def lines(self, plan: Plan, step: int, epoch: int = 0) -> list[int]:
        frame = await self.assembler.get_frame(FrameAddress(plan.hash, epoch, step, batch=BATCH))
        data = os.pread(frame.fd, frame.size, 0)
        frame.close()
        tensor_frame.verify_frame(data)
        header = tensor_frame.parse_frame_header(data)
        views = tensor_frame.tensor_views(data, header)
        values, offsets = (views[name] for name in ("text.data", "text.offsets"))
        return [int(values[at:end].tobytes()) for at, end in itertools.pairwise(offsets.tolist())]

    def opened_again(self) -> set[int]:
        """The pages that were opened more than once: those of the first batch may be, which needs them at
        once and does not wait for what opens them ahead of the next batches."""
        numbers = [number for number, _ in self.opened]
        return {number for number in numbers if numbers.count(number) > 1}

    async def wait(self) -> None:
        """Wait until nothing is opened any more."""
        deadline = time.monotonic() + PATIENCE
        while self.assembler._prefetcher._running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(snapshot_pages, "_CHECKED", 0)
    monkeypatch.setattr(paged_columns, "_JOINED_SAMPLES", 0)  # as if it were large
    monkeypatch.setattr(page_prefetcher, "AHEAD_STEPS", 4)
    made, open_it = Node(tmp_path), SnapshotPages._open_stored_page

    def opening(pages: SnapshotPages, snapshot: PagedSnapshot, number: int) -> Any:
        made.opened.append((number, threading.current_thread() is threading.main_thread()))
        return open_it(pages, snapshot, number)

    monkeypatch.setattr(SnapshotPages, "_open_stored_page", opening)
    yield made
    made.close()


def samples_of(plan: Plan, snapshot: Any, steps: range) -> list[list[int]]:
    """The samples of some batches, and so their lines."""
    order = snapshot_order(plan.spec, snapshot, 0)
    found = (np.arange(step * BATCH, min((step + 1) * BATCH, order.n), dtype=np.int64) for step in steps)
    return [order.samples_at(each).tolist() for each in found]


@pytest.mark.parametrize("shuffle", [{"kind": "global"}, {"kind": "blocks", "shards": 10}])
def test_pages_of_coming_batches_are_opened_in_threads(node: Node, shuffle: dict[str, Any]) -> None:
    async def run() -> None:
        plan = await node.plan(shuffle)
        snapshot = await node.catalog.snapshot(plan.snapshot)
        expected = samples_of(plan, snapshot, range(8))
        assert await node.lines(plan, 0) == expected[0]
        await node.wait()
        ahead = {sample // ROWS for batch in expected[:5] for sample in batch}
        assert {number for number, _ in node.opened} == ahead
        before = len(node.opened)
        node.assembler._prefetcher._queue.clear()
        assert await node.lines(plan, 1) == expected[1]
        await node.wait()
        now = {number for number, _ in node.opened[before:]}
        assert now == {sample // ROWS for sample in expected[5]} - ahead  # of one batch more
        for step in range(2, 8):
            assert await node.lines(plan, step) == expected[step]
            await node.wait()
        assert not any(main for _, main in node.opened)
        assert node.opened_again() <= {sample // ROWS for sample in expected[0]}
        await node.assembler.aclose()

    asyncio.run(run())


def test_all_pages_of_a_small_snapshot_are_opened_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_columns, "_JOINED_SAMPLES", 1 << 20)

    async def run() -> None:
        plan = await node.plan({"kind": "global"})
        first = await node.lines(plan, 0)
        await node.wait()
        assert sorted(set(node.opened)) == [(number, False) for number in range(FILES)]
        assert node.opened_again() <= {line // ROWS for line in first}
        opened = len(node.opened)
        for step in range(1, FILES * ROWS // BATCH):  # their columns are joined meanwhile
            await node.lines(plan, step)
        assert len(node.opened) == opened
        await node.assembler.aclose()

    asyncio.run(run())


def test_a_damaged_page_is_reported_by_the_batch_that_needs_it(node: Node) -> None:
    async def run() -> None:
        plan = await node.plan({"kind": "none"})
        snapshot = await node.catalog.snapshot(plan.snapshot)
        assert isinstance(snapshot, PagedSnapshot)
        await node.catalog.write_document(node.datasets.pages._page_name(snapshot, 4), b"damaged")
        assert await node.lines(plan, 0) == [*range(BATCH)]  # pages 0 and 1, and those up to 9 ahead
        await node.wait()
        assert (4, False) in node.opened
        for step in (1, 3):
            assert await node.lines(plan, step) == [*range(step * BATCH, (step + 1) * BATCH)]
        with suppress(BatchError):  # Busy, if nothing has read the snapshot again since
            await node.lines(plan, 2)
        assert await node.lines(plan, 2) == [*range(2 * BATCH, 3 * BATCH)]  # the page was made again
        await node.assembler.aclose()

    asyncio.run(run())
