"""Batches of samples without ops: the bytes of rows rendered one by one, and a bounded number of operations.

The bounds count calls and messages, not seconds, so that a cost for each sample cannot come back unseen.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from meshd.batches.assembly import frame_builder
from meshd.batches.assembly.assembler import Assembler
from meshd.config import StoreSettings, TransformSettings
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.transform.compiler import load_program
from meshd.transform.messages import RenderReply, RenderRequest
from meshd.transform.pool import SLICE_ROWS
from meshd.transform.render_calls import (
    RaggedPart,
    RenderCall,
    RenderResult,
    RenderSpec,
    RowChecksums,
    RowSlice,
    program_digest,
)
from meshd.transform.row_blocks import BlockCopier
from meshd.transform.source_files import SourceFiles
from meshd.transform.worker import SliceRenderer
from meshd.util.clock import ManualClock
from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.fields import parse_fields
from meshwire.formats.tar import scan_tar
from meshwire.frame import tensor_frame
from meshwire.plan.plan_spec import parse_spec, plan_hash
from tests.support.archive_files import tar_of
from tests.support.call_counts import Calls
from tests.support.paged_snapshots import MemoryPages
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshd.transform.decoded_cache.slice_order import SampleSet
    from meshd.transform.render_calls import RowWork
    from meshwire.dataset.build_snapshot import Snapshot

FILES, ROWS = 4, 600
MOST_CALLS = 2300
"""Calls of Python and C functions for a batch of 1,024 rows, in the coordinator and a transform process."""


class InlineRenderer:
    """Renders as transform processes do, in this process: each slice is a message and its answer."""

    def __init__(self) -> None:
        self.messages = self.rows = 0
        self._files, self._copier = SourceFiles(), BlockCopier()
        self._load = lru_cache(load_program)

    def close(self) -> None:
        self._files.close()
        self._copier.close()

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
        account: str = "",
        samples: SampleSet | None = None,
    ) -> RenderResult:
        spec = RenderSpec(
            0.0, "", job, program_text, program_digest(program_text), epoch, frame_bytes, tuple(targets)
        )
        call, program, result = (
            RenderCall(spec, frame_fd, len(rows)),
            load_program(program_text),
            RenderResult(),
        )
        slices = [
            RowSlice(call, rows[start : start + SLICE_ROWS]) for start in range(0, len(rows), SLICE_ROWS)
        ]
        for item in slices:
            self.messages += 1
            sent = item.to_request(self.messages, with_text=True)
            request = msgspec.json.decode(msgspec.json.encode(sent), type=RenderRequest)
            self.rows += len(request.rows)
            renderer = SliceRenderer(
                self._files, program, request, frame_fd, lambda: 0.0, copier=self._copier
            )
            made, scratch = renderer.render(lambda row: None, lambda: False)
            reply = msgspec.json.decode(msgspec.json.encode(made), type=RenderReply)
            result.failures += reply.failures
            if scratch is not None:
                result.parts.append(RaggedPart(reply.rendered, reply.ragged, scratch))
            result.checksums.append(RowChecksums(reply.rendered, reply.sums))
            call.release_slice()
        return result


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

    async def plan(self, kind: str) -> str:
        snapshot = await self._snapshot(kind)
        await self.assembler.catalog.add_snapshot(snapshot)
        spec = parse_spec({"seed": 3, "tail": "ragged"})
        digest = plan_hash(snapshot.hash, spec)
        plan = Plan(digest, snapshot.hash, "b", snapshot.samples, spec, {"text": FieldOutput("uint8", None)})
        await self.assembler.catalog.add_plan(plan)
        return digest

    async def _snapshot(self, kind: str) -> Snapshot:
        fields, found = parse_fields({"text": {"ext": ["txt"]}}), list[Any]()
        for number in range(FILES):
            rows = [b"%d" % (number * ROWS + row) * (1 + row % 9) for row in range(ROWS)]
            if kind == "lines":
                key, data = f"d/{number}.txt", b"\n".join(rows)
                index: Any = None
            else:
                key = f"d/{number}.tar"
                data = tar_of({f"{row:06}.txt": text for row, text in enumerate(rows)})
                index = index_tar(scan_tar(lambda at, size, data=data: data[at : at + size], 0, len(data)))  # type: ignore[misc]
            writer = self.store.writer("b", key, size=len(data))
            await writer.write(data)
            etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            await writer.commit(Meta(etag))
            found.append((key, etag, data) if kind == "lines" else (key, etag, len(data), index))
        if kind == "lines":
            return self.pages.build(found, "s3://b/d/", fields).snapshot
        return self.pages.build_tars(found, "s3://b/d/", fields).snapshot

    async def batch(self, plan: str, step: int, rows: int = 1024) -> bytes:
        frame = await self.assembler.get_frame(FrameAddress(plan, 1, step, batch=rows))
        data = os.pread(frame.fd, frame.size, 0)
        frame.close()
        tensor_frame.verify_frame(data)
        return data


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["lines", "tar"])
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


@pytest.mark.parametrize("kind", ["lines", "tar"])
def test_a_batch_takes_few_calls_whatever_its_rows(node: Node, kind: str) -> None:
    plan = asyncio.run(node.plan(kind))
    calls = [counted(node, plan, rows) for rows in (256, 1024)]
    assert 100 < calls[1] < MOST_CALLS, calls
    assert calls[1] - calls[0] < 100, calls  # 768 more rows
