"""Packed rows read straight from their files: the bytes of rows built piece by piece, with few calls."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.batches.assembly import packed_frame_builder
from meshd.batches.assembly.direct_rows import NotDirectError, direct_dtypes, direct_lengths
from meshd.batches.pack_plans import inner_spec
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress
from meshd.core.plan_record import FieldOutput, Plan
from meshwire.frame import tensor_frame
from meshwire.plan.plan_spec import parse_spec, plan_hash
from meshwire.plan.sequence_packing import pack_rows
from tests.component.batches.test_raw_rows import FILES, ROWS, Node
from tests.support.call_counts import Calls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTH, BATCH = 64, 48
PACKS: list[dict[str, Any]] = [
    {"value": 7},
    {"positions": "sample", "long": "split"},
    {"segments": False},
    {"positions": "none", "value": 7},
    {"positions": "none", "segments": False},
]
MOST_CALLS = 2200
"""Calls of Python and C functions for a batch of 48 rows, of some 230 pieces."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


async def packed(node: Node, kind: str, dtype: str = "uint8", **pack: Any) -> str:
    """Register a packed plan over lines or members whose bytes are the elements."""
    snapshot = await node._snapshot(kind)
    await node.assembler.catalog.add_snapshot(snapshot)
    op = {"op": "frombuffer", "version": "1", "field": "text", "args": {"dtype": dtype, "shape": [None]}}
    packing = {"fields": ["text"], "length": LENGTH, **pack}
    spec = parse_spec({"seed": 3, "tail": "pad", "ops": [op], "pack": packing})
    assert spec.pack is not None
    inner = inner_spec(spec)
    within = Plan(
        plan_hash(snapshot.hash, inner),
        snapshot.hash,
        "b",
        snapshot.samples,
        inner,
        {"text": FieldOutput(dtype, None)},
    )
    dtypes = direct_dtypes(within, spec.pack.fields)
    assert dtypes is not None
    lengths = direct_lengths(snapshot, spec.pack.fields, dtypes)
    table = pack_rows(np.maximum(lengths, 0), snapshot.shard_starts, spec.pack)
    outputs = {"text": FieldOutput(dtype, (LENGTH,))}
    outputs |= {name: FieldOutput("int32", (LENGTH,)) for name in spec.pack.numbers}
    digest = plan_hash(snapshot.hash, spec)
    plan = replace(
        within, hash=digest, samples=table.rows, spec=spec, outputs=dict(sorted(outputs.items())),
        within=within.hash,
    )  # fmt: skip
    await node.assembler.catalog.add_plan(within)
    await node.assembler.catalog.add_plan(plan)
    await node.assembler.catalog.put_shared(f"packs/{digest}", table.to_bytes())
    return digest


async def frame(node: Node, plan: str, epoch: int, step: int, rows: int = BATCH) -> bytes:
    made = await node.assembler.get_frame(FrameAddress(plan, epoch, step, batch=rows))
    data = os.pread(made.fd, made.size, 0)
    made.close()
    tensor_frame.verify_frame(data)
    return data


def refuse(*arguments: Any) -> None:
    raise NotDirectError


@pytest.mark.parametrize("kind", ["lines", "tar", "objects"])
@pytest.mark.parametrize("pack", PACKS)
def test_rows_are_those_built_piece_by_piece(
    tmp_path: Path, kind: str, pack: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(folder: Path) -> list[bytes]:
        node = Node(folder)
        try:
            plan = await packed(node, kind, **pack)
            steps = -(-(await node.assembler.catalog.plan(plan)).samples // BATCH)
            return [await frame(node, plan, 1, step) for step in range(steps)]  # with padding at the end
        finally:
            node.close()

    direct = asyncio.run(run(tmp_path / "direct"))
    assert len(direct) > 3
    monkeypatch.setattr(packed_frame_builder, "DirectRows", refuse)
    assert asyncio.run(run(tmp_path / "apart")) == direct


def test_bytes_that_are_not_cached_are_read_in_a_thread(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    read, waited = os.preadv, list[str]()

    def uncached(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError
        waited.append(threading.current_thread().name)
        return read(fd, buffers, offset, flags)

    async def run() -> None:
        plan = await packed(node, "lines")
        found = await frame(node, plan, 1, 0)
        node.assembler._cache.clear()
        monkeypatch.setattr(os, "preadv", uncached)
        assert await frame(node, plan, 1, 0) == found

    asyncio.run(run())
    assert waited
    assert threading.main_thread().name not in waited


def test_a_batch_takes_few_calls(node: Node) -> None:
    async def run() -> int:
        plan = await packed(node, "lines")
        await frame(node, plan, 0, 0)
        calls = Calls()
        with calls:
            await frame(node, plan, 0, 1)
        return calls.count

    calls = asyncio.run(run())
    assert 100 < calls < MOST_CALLS, calls


def test_an_object_that_was_deleted_is_named(node: Node) -> None:
    async def run() -> None:
        plan = await packed(node, "lines")
        await frame(node, plan, 0, 0)
        for file in range(FILES):
            await node.store.delete("b", f"d/{file}.txt")
        with pytest.raises(BatchError) as caught:
            await frame(node, plan, 0, 1)
        assert caught.value.code == "SnapshotChanged"

    assert ROWS > BATCH
    asyncio.run(run())
