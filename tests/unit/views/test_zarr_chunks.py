"""Chunks as samples: every whole chunk once, at its place in the grid, however shards are laid out."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.builtin.array_ops import Window
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshwire.dataset.fields import fields_document, parse_fields
from meshwire.formats.zarr_source import parse_chunked
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError
from tests.unit.datasets.test_zarr_sources import document, grid, sharded


def chunked(**changes: Any) -> Any:
    return parse_chunked(json.dumps(document(**changes)).encode(), "fields.x")


extent = st.integers(1, 7)


@given(st.lists(st.tuples(extent, st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
def test_every_whole_chunk_is_numbered_once(axes: list[tuple[int, int, int]]) -> None:
    shape = [size for size, _, _ in axes]
    inner = [chunk for _, chunk, _ in axes]
    shard = [chunk * many for _, chunk, many in axes]
    whole = [size // chunk for size, chunk in zip(shape, inner, strict=True)]
    if not np.prod(whole):
        with pytest.raises(PlanError, match="no whole chunk"):
            chunked(shape=shape, chunk_grid=grid(*shard), codecs=sharded(inner))
        return
    empty = {"codecs": [{"name": "bytes"}, {"name": "gzip"}], "index_codecs": [{"name": "bytes"}]}
    array = chunked(shape=shape, chunk_grid=grid(*shard), codecs=sharded(inner, **empty))
    assert array.rows == np.prod(whole)
    pairs = struct.pack("<2Q", 0, 0) * array.chunk  # all are there
    found = [array.locate_rows(number, 0, pairs).rows for number in range(array.objects)]
    assert sorted(number for numbers in found for number in numbers.tolist()) == list(range(array.rows))
    # The first chunk of each object has the object's own place in the grid.
    for number, numbers in enumerate(found):
        assert array.object_number(array.object_key(number)) == number
        place = [int(part) for part in array.object_key(number).removeprefix("c/").split("/")]
        corner = [at * size // chunk for at, size, chunk in zip(place, shard, inner, strict=True)]
        if all(at < many for at, many in zip(corner, whole, strict=True)):
            assert numbers[0] == np.ravel_multi_index(corner, whole)


def test_places_are_those_of_chunks_or_a_refusal() -> None:
    plain = chunked(shape=[4, 6], chunk_grid=grid(2, 3))
    assert [plain.object_key(number) for number in range(plain.objects)] == [
        "c/0/0",
        "c/0/1",
        "c/1/0",
        "c/1/1",
    ]
    assert [column.tolist() for column in plain.locate_rows(3, 12, b"")] == [[3], [0], [12]]
    keys = ("c/2/0", "c/0/2", "c/0", "c/0/0/0", "0/0", "c/0/x")
    assert [plain.object_number(key) for key in keys] == [None] * len(keys)
    with pytest.raises(ValueError, match="a chunk has 11 bytes instead of 12"):
        plain.locate_rows(0, 11, b"")
    inner = chunked(
        shape=[4, 6], chunk_grid=grid(4, 6), codecs=sharded([2, 3], index_codecs=[{"name": "bytes"}])
    )
    pairs = struct.pack("<8Q", 0, 12, (1 << 64) - 1, (1 << 64) - 1, 12, 12, 24, 12)
    rows, offsets, lengths = inner.locate_rows(0, 100, pairs)
    assert rows.tolist() == [0, 2, 3]
    assert offsets.tolist() == [0, 12, 24]
    assert lengths.tolist() == [12, 12, 12]
    with pytest.raises(ValueError, match="beyond its end"):
        inner.locate_rows(0, 30, pairs)


def test_what_is_no_chunked_array() -> None:
    assert chunked(shape=[5, 5], chunk_grid=grid(2, 2)).left_out == 5
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shape": [10, 3], "chunk_grid": grid(4, 4)}, "no whole chunk"),
        ({"chunk_grid": grid(4, 3), "codecs": sharded([3, 3])}, "whole number of chunks"),
        ({"chunk_grid": grid(4, 0)}, "the chunks are empty"),
        ({"shape": [1 << 40, 1 << 40], "chunk_grid": grid(1, 1)}, "too many"),
    ]
    for changes, complaint in wrong:
        with pytest.raises(PlanError, match=complaint):
            chunked(**changes)


def test_fields_of_rows_keep_their_document() -> None:
    rows, chunks = {"x": {"array": "a"}}, {"x": {"array": "a", "chunks": True}}
    assert fields_document(parse_fields(rows)) == rows
    assert fields_document(parse_fields(chunks)) == chunks
    with pytest.raises(PlanError, match="chunks"):
        parse_fields({"x": {"array": "a", "chunks": 1}})
    for alone in ({"chunks": True}, {"as": "ids"}, {"chunks": True, "as": "ids"}):
        with pytest.raises(PlanError, match="give one of"):
            parse_fields({"x": alone})


@given(
    st.integers(0, 1000), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3)
)
def test_windows_lie_in_the_array(position: int, axes: list[tuple[int, int]]) -> None:
    wanted = tuple(size or None for size, _ in axes)
    shape = tuple(size + more for size, more in axes)
    array = np.arange(np.prod(shape)).reshape(shape)
    for at in ("random", "center", "first"):
        op = Window(wanted, at)
        assert op.infer(FieldType("array", "int64", shape)).shape == tuple(size for size, _ in axes)
        found = op.apply(array, KeyedRandom(1, 0, position))
        starts = np.unravel_index(int(found.flat[0]), shape)
        cut = tuple(slice(first, first + size) for first, (size, _) in zip(starts, axes, strict=True))
        assert np.array_equal(found, array[cut])
    assert (
        len({int(Window((1,), "random").apply(np.arange(9), KeyedRandom(1, 0, p))[0]) for p in range(99)})
        == 9
    )


def test_windows_that_do_not_fit() -> None:
    op = Window((4, None), "first")
    with pytest.raises(ValueError, match="axis 0 has 3, less than"):
        op.infer(FieldType("array", "int64", (3, 2)))
    with pytest.raises(ValueError, match="needs an array of 2 axes"):
        op.infer(FieldType("array", "int64", (3,)))
    with pytest.raises(BadSampleError, match="axis 0 has 3, less than"):
        op.apply(np.zeros((3, 2)), KeyedRandom(0, 0, 0))
