"""Rows copied as arrays have the bytes of rows rendered one by one, or are left to be."""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from awscrt.checksums import crc32c

from meshd.batches.assembly.column_copies import ColumnCopies, RowPlaces, block_fields
from meshd.core.plan_record import FieldOutput
from meshd.store.records import Location
from meshd.transform.compiler import load_program
from meshd.transform.messages import RenderRequest, Row, unpack_integers
from meshd.transform.render_queue import RenderCall, RenderSpec, RowSlice
from meshd.transform.source_files import SourceFiles
from meshd.transform.worker import SliceRenderer
from meshwire.dataset.build_snapshot import BytesColumn, ObjectTable, Snapshot
from meshwire.dataset.fields import parse_fields
from meshwire.frame.columns import StringColumn
from meshwire.plan.plan_spec import parse_spec

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.core.sample_locations import PinnedObjects
    from meshd.transform.renderer import RowWork

ROWS = 300
FIELDS: dict[str, tuple[str, tuple[int | None, ...]]] = {
    "a": ("float64", ()),
    "b": ("int16", (3,)),
    "c": ("uint8", ()),
    "d": ("bool", ()),
    "e": ("int16", (None,)),
    "f": ("", (None,)),
}
OPS: list[dict[str, Any]] = [
    {"op": "frombuffer", "field": name, "version": "1", "args": {"dtype": dtype, "shape": list(shape)}}
    for name, (dtype, shape) in FIELDS.items()
    if dtype
]
MORE: list[dict[str, Any]] = [
    {"op": "cast", "field": "b", "version": "1", "args": {"dtype": "float32"}},
    {"op": "gather_columns", "field": "b", "version": "1", "args": {"columns": [2, 0]}},
    {"op": "one_hot", "field": "c", "version": "1", "args": {"classes": 256}},
]
LESS = [*MORE[:2], {"op": "one_hot", "field": "c", "version": "1", "args": {"classes": 200}}]


class Files:
    """Objects in files, each object in one or two extents; rows of fields, with text between two of them."""

    def __init__(self, folder: Path, seed: int, *, text: bool, spread: int) -> None:
        draw = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.extents: list[list[Location]] = []
        places: dict[str, list[tuple[int, int, int]]] = {name: [] for name in FIELDS}
        for number in range(3):
            data = bytearray()
            for row in range(ROWS):
                for name, (dtype, shape) in FIELDS.items():
                    item, (count, *_) = np.dtype(dtype or "u1").itemsize, (*shape, 1)
                    width = item * (draw.randrange(spread) if count is None else count)
                    short = name == "a" and row == 17 and number == 1
                    places[name].append((number, len(data), width - short))
                    data += numbers.bytes(width)
                    if name == "b" and text:
                        data += b"x" * draw.randrange(5)
            cut = draw.choice([len(data), len(data) // 2 + 3])
            self.extents.append(
                [self._extent(folder, draw, bytes(part)) for part in (data[:cut], data[cut:]) if part]
            )
        columns = {
            name: BytesColumn(
                np.array([place[0] for place in found], np.int32),
                np.array([place[1] for place in found], np.int64),
                np.array([place[2] for place in found], np.int64),
            )
            for name, found in places.items()
        }
        names = StringColumn.from_strings(["x", "y", "z"])
        table = ObjectTable("b", names, names, np.array([1 << 40] * 3, np.int64))
        specs = parse_fields({name: {"column": name} for name in FIELDS})
        self.snapshot = Snapshot(
            "s3://b/", "parquet", table, 3 * ROWS, np.array([0, 3 * ROWS]), columns, specs, None, "0" * 64
        )

    def _extent(self, folder: Path, draw: random.Random, data: bytes) -> Location:
        before = draw.randrange(50)
        path = folder / f"{len(list(folder.iterdir()))}.tar"
        path.write_bytes(bytes(before) + data)
        return Location(str(path), before, len(data), crc32c(data))

    def is_remote(self, number: int) -> bool:
        return number == 2

    def locations(self, number: int) -> list[Location]:
        return self.extents[number]

    def row(self, sample: int, names: list[str]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        fields = []
        for name in names:
            column = cast("BytesColumn", self.snapshot.fields[name])
            at, left, pieces = int(column.offset[sample]), int(column.length[sample]), []
            for extent in self.extents[int(column.object[sample])]:
                if left and at < extent.length:
                    taken = min(left, extent.length - at)
                    pieces.append((self.paths.index(extent.path), extent.offset + at, taken))
                    at, left = 0, left - taken
                else:
                    at -= extent.length if left else 0
            fields.append(tuple(pieces))
        return tuple(fields)

    @property
    def paths(self) -> list[str]:
        return [extent.path for extents in self.extents for extent in extents]


def rendered(request: RenderRequest, text: str, size: int) -> tuple[bytes, set[int], list[list[bytes]]]:
    """Return the frame, the rows of the request that did not fail, and the values of each ragged field."""
    fd = os.memfd_create("frame")
    try:
        os.ftruncate(fd, size)
        renderer = SliceRenderer(SourceFiles(), load_program(text), request, fd, lambda: 0.0)
        reply, scratch = renderer.render(lambda _: None, lambda: False)
        assert scratch is not None
        with open(scratch, "rb") as file:
            ragged = [
                [
                    file.read(length)
                    for length in (unpack_integers(column.run, column.count).tolist() or column.lengths)
                ]
                for column in reply.ragged
            ]
        return os.pread(fd, size, 0), set(reply.rendered), ragged
    finally:
        os.close(fd)


async def block_request(
    work: list[RowWork], text: str, targets: tuple[tuple[int, int] | None, ...]
) -> RenderRequest:
    fd = os.memfd_create("none")
    spec = RenderSpec(0.0, "", "job", text, "program", 1, 0, targets)
    request = RowSlice(RenderCall(spec, fd, len(work)), work).to_request(1, with_text=True)
    os.close(fd)
    return request


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("ops", [OPS, [*OPS, *MORE], [*OPS, *LESS]])
def test_block_is_rows(tmp_path: Path, text: bool, ops: list[dict[str, Any]]) -> None:
    files = Files(tmp_path, 7 + text, text=text, spread=60 if text else 6)
    spec = parse_spec({"ops": ops})
    program = json.dumps({"spec": {"ops": ops}, "fields": sorted(FIELDS)})
    types = load_program(program).outputs
    outputs = {name: FieldOutput(found.dtype, found.fixed) for name, found in types.items()}
    stored = block_fields(spec, outputs, mixed=False)
    assert stored == ((8, 8), (6, 2), (1, 1), (1, 1), (0, 2), (0, 1))

    samples = np.random.default_rng(3).integers(0, 3 * ROWS, 500)
    samples[5] = ROWS + 17  # a value of the wrong length
    sizes = [500 * found.row_bytes for found in types.values() if found.row_bytes]
    targets = (*((int(at), 500) for at in np.cumsum([0, *sizes[:-1]])), None, None)
    pinned = cast("PinnedObjects", files)
    copies = ColumnCopies(RowPlaces(files.snapshot, stored), pinned, samples, samples)
    rest = copies.rest
    assert {row for row in range(500) if samples[row] >= 2 * ROWS or samples[row] == ROWS + 17} <= set(rest)
    assert len(rest) < 250

    request = asyncio.run(block_request(copies.work, program, targets))
    frame, done, values = rendered(request, program, sum(sizes))
    one_by_one = tuple(
        Row(row, row, files.row(int(samples[row]), list(FIELDS))) for row in range(500) if row not in rest
    )
    oracle, good, expected_values = rendered(
        RenderRequest(1, "", "", 1, 0, targets, tuple(files.paths), one_by_one), program, sum(sizes)
    )
    if ops[-1] is not LESS[-1]:
        assert done == {0}
        assert len(good) == len(one_by_one)
        kept = sorted(good)
        assert [[run[row] for row in kept] for run in values] == expected_values
        for at, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
            copied, expected = (
                np.frombuffer(data[at : at + size], np.uint8).reshape(500, -1) for data in (frame, oracle)
            )
            assert np.array_equal(copied[kept], expected[kept])
    else:  # some rows have a class above 199: the block leaves all of them to be found
        assert not done
        assert 0 < len(good) < len(one_by_one)
        assert not any(frame)


@pytest.mark.parametrize("names", [["f"], ["e", "f"]])
@pytest.mark.parametrize("spread", [6, 60])
def test_block_of_ragged_fields(tmp_path: Path, names: list[str], spread: int) -> None:
    files = Files(tmp_path, 9, text=False, spread=spread)
    snapshot = replace(files.snapshot, fields={name: files.snapshot.fields[name] for name in names})
    ops = [op for op in OPS if op["field"] in names]
    program = json.dumps({"spec": {"ops": ops}, "fields": names})
    outputs = {name: FieldOutput(FIELDS[name][0] or "uint8", None, ndim=1) for name in names}
    stored = block_fields(parse_spec({"ops": ops}), outputs, mixed=False)
    assert stored == tuple((0, np.dtype(FIELDS[name][0] or "u1").itemsize) for name in names)

    samples = np.random.default_rng(4).permutation(3 * ROWS)[:500]
    targets = (None,) * len(names)
    pinned = cast("PinnedObjects", files)
    copies = ColumnCopies(RowPlaces(snapshot, stored), pinned, samples, samples)
    rest = copies.rest
    assert {row for row in range(500) if samples[row] >= 2 * ROWS} <= set(rest)
    assert len(rest) < 250
    request = asyncio.run(block_request(copies.work, program, targets))
    assert len(request.rows) == 1
    _, done, values = rendered(request, program, 1)
    kept = [row for row in range(500) if row not in rest]
    one_by_one = tuple(Row(row, row, files.row(int(samples[row]), names)) for row in kept)
    alone = RenderRequest(1, "", "", 1, 0, targets, tuple(files.paths), one_by_one)
    _, good, expected = rendered(alone, program, 1)
    assert done == {0}
    assert good == set(kept)
    assert [[run[row] for row in kept] for run in values] == expected


def test_other_programs_are_rows() -> None:
    outputs = {"a": FieldOutput("float64", ()), "b": FieldOutput("int16", (3,))}
    ops = OPS[:2]
    assert block_fields(parse_spec({"ops": ops}), outputs, mixed=False) == ((8, 8), (6, 2))
    assert block_fields(parse_spec({"ops": ops}), outputs, mixed=True) is None
    assert block_fields(parse_spec({"ops": ops[:1]}), outputs, mixed=False) is None
    normalized = [*ops, {"op": "normalize", "field": "b", "version": "1", "args": {"mean": [0], "std": [1]}}]
    assert block_fields(parse_spec({"ops": normalized}), outputs, mixed=False) is None
    spec = parse_spec({"ops": ops})
    newer = replace(spec, ops=(replace(spec.ops[0], version="2"), spec.ops[1]))
    assert block_fields(newer, outputs, mixed=False) is None
