"""Windows of Zarr arrays equal the slices of the whole array, for any chunks; damage is a bad sample."""

from __future__ import annotations

import io
import json
import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.builtin.zarr_windows import ZarrWindow
from meshd.transform.errors import BadSampleError
from meshsdk.arrays.open_zarr import field_places, window_grid
from meshsdk.arrays.stored_chunks import ChunkTable, chunk_grid
from meshsdk.errors import ConfigurationError
from meshwire.formats.zarr_metadata import parse_variable
from meshwire.formats.zarr_window_layout import parse_window_layout
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshwire.formats.zarr_metadata import ZarrVariable

NO_DRAWS = KeyedRandom(0, 0, 0)
CODECS: list[dict[str, Any]] = [
    {"id": "zlib", "level": 1},
    {"id": "gzip", "level": 1},
    {"id": "zstd", "level": 1},
    {"id": "bz2", "level": 1},
    {"id": "lzma"},
    {"id": "lz4"},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2},
    {"id": "shuffle", "elementsize": 4},
    {"id": "delta", "dtype": "<i4"},
    {"id": "crc32"},
    {"id": "adler32"},
    {"id": "fletcher32"},
]


def variable(extents: tuple[int, ...], parts: tuple[int, ...], codecs: Any = (), **more: Any) -> ZarrVariable:
    document = {
        "zarr_format": 2,
        "shape": extents,
        "chunks": parts,
        "dtype": "<i4",
        "order": "C",
        "filters": list(codecs),
        "compressor": None,
        "fill_value": -7,
    }
    return parse_variable(json.dumps(document | more), None, "x")


def stored(found: ZarrVariable, data: Any, missing: set[int]) -> tuple[ChunkTable, bytes]:
    """The chunks of an array in one object, one after the other; the last ones padded, as Zarr does."""
    table, body = ChunkTable.empty(chunk_grid(found)), bytearray()
    for number, place in enumerate(product(*map(range, chunk_grid(found)))):
        part = data[
            tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, found.chunk, strict=True))
        ]
        whole = np.zeros(found.chunk, found.dtype)
        whole[tuple(map(slice, part.shape))] = part
        encoded: Any = np.ascontiguousarray(whole.transpose(found.axes))
        for codec in found.codecs:
            encoded = numcodecs.get_codec(dict(codec)).encode(encoded)
        blob = np.asarray(encoded).tobytes() if not isinstance(encoded, bytes) else encoded
        if number not in missing:
            table.objects[number], table.offsets[number], table.lengths[number] = 1, len(body), len(blob)
            body += blob
    return table, bytes(body)


def windows(
    found: ZarrVariable, data: Any, missing: set[int], window: Any, stride: Any
) -> list[tuple[Any, Any]]:
    """(what the op makes, the start) of every window."""
    table, body = stored(found, data, missing)
    grid, headers = window_grid({"x": found}, window, stride, {}), io.BytesIO()
    places = field_places("x", "x", found, table, grid, headers, decode=False)
    objects = headers.getvalue(), body
    layout = parse_window_layout(json.loads(json.dumps(places.layout.document())), "layout")
    assert layout == places.layout
    op = ZarrWindow(layout)
    made = []
    for sample in range(grid.samples):
        parts = []
        for column in places.columns.values():
            at, size = int(column.offset[sample]), int(column.length[sample])
            parts.append(objects[int(column.object[sample])][at : at + size])
        start = {dim: int(starts[sample]) for dim, starts in grid.starts.items()}
        made.append((op.apply(b"".join(parts), NO_DRAWS), start))
    return made


@given(st.data())
def test_a_window_is_the_slice_of_the_array(draw: st.DataObject) -> None:
    axes = draw.draw(st.integers(1, 3))
    shape = tuple(draw.draw(st.lists(st.integers(1, 9), min_size=axes, max_size=axes)))
    chunk = tuple(draw.draw(st.integers(1, 9)) for _ in shape)
    window = {
        f"dim_{axis}": draw.draw(st.integers(1, shape[axis]))
        for axis in range(draw.draw(st.integers(1, axes)))
    }
    stride = {dim: draw.draw(st.integers(1, 5)) for dim in window}
    found = variable(shape, chunk, order=draw.draw(st.sampled_from("CF")))
    data = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    chunks = math.prod(chunk_grid(found))
    missing = draw.draw(st.sets(st.integers(0, chunks - 1), max_size=2))
    for place in missing:
        where = np.unravel_index(place, chunk_grid(found))
        at = tuple(slice(n * size, (n + 1) * size) for n, size in zip(where, chunk, strict=True))
        data[at] = found.fill
    made = windows(found, data, missing, window, stride)
    assert made
    for array, start in made:
        at = tuple(
            slice(
                start.get(f"dim_{axis}", 0), start.get(f"dim_{axis}", 0) + window.get(f"dim_{axis}", extent)
            )
            for axis, extent in enumerate(shape)
        )
        assert array.dtype == np.int32
        assert np.array_equal(array, data[at])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec['id']}-{codec.get('cname', '')}")
def test_codecs_decode_what_numcodecs_encoded_and_nothing_else(codec: dict[str, Any]) -> None:
    found = variable((10, 7), (4, 3), [codec])
    data = np.random.default_rng(1).integers(-1000, 1000, (10, 7), np.int32)
    for array, start in windows(found, data, set(), {"dim_0": 5}, {"dim_0": 2}):
        assert np.array_equal(array, data[start["dim_0"] : start["dim_0"] + 5])
    table, body = stored(found, data, set())
    layout = field_places(
        "x",
        "x",
        found,
        table,
        window_grid({"x": found}, {"dim_0": 4, "dim_1": 3}, {}, {}),
        io.BytesIO(),
        decode=False,
    ).layout
    good = body[: int(table.lengths[0])]
    for blob in (good[:-3], b"", b"\xff" * 47, b"\x02\x01\x21\x04" + b"\xff\xff\xff\x7f" * 4):
        value = np.array([0, 0, len(blob)], "<i8").tobytes() + blob
        with pytest.raises(BadSampleError):
            ZarrWindow(layout).apply(value, NO_DRAWS)


def test_what_numbers_stand_for() -> None:
    attributes = json.dumps(
        {"_ARRAY_DIMENSIONS": ["t"], "scale_factor": 0.5, "add_offset": 10, "missing_value": [-1]}
    )
    packed = parse_variable(
        json.dumps(
            {
                "zarr_format": 2,
                "shape": [4],
                "chunks": [3],
                "dtype": ">i2",
                "order": "C",
                "filters": None,
                "compressor": None,
                "fill_value": -9,
            }
        ),
        attributes,
        "x",
    )
    table, body = stored(packed, np.array([2, -1, -9, 4], ">i2"), {1})
    headers = io.BytesIO()
    places = field_places(
        "x", "x", packed, table, window_grid({"x": packed}, {"t": 4}, {}, {}), headers, decode=True
    )
    value = headers.getvalue() + body + bytes(places.layout.header_bytes)
    made = ZarrWindow(places.layout).apply(value, NO_DRAWS)
    assert made.dtype == np.float32
    assert np.array_equal(made, np.array([11, np.nan, np.nan, np.nan], np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "|O"}, "has no numbers"),
        ({"dtype": [["a", "<i4"]]}, "has no numbers"),
        ({"filters": [{"id": "pickle"}]}, "codec 'pickle' is not supported"),
        ({"shape": []}, "without axes"),
        ({"chunks": [0, 1]}, "empty"),
        ({"chunks": [1 << 20, 1 << 20]}, "1 GiB"),
        ({"fill_value": "many"}, "is not a number"),
        ({"zarr_format": 4}, "not the metadata|expected"),
    ],
)
def test_arrays_that_cannot_be_windowed_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        variable((4, 4), (2, 2), **change)


def test_windows_of_too_many_chunks_are_refused() -> None:
    found = variable((5000, 2), (1, 2))
    grid = window_grid({"x": found}, {"dim_0": 2000}, {}, {})
    with pytest.raises(ConfigurationError, match="2000 chunks"):
        field_places("x", "x", found, ChunkTable.empty((5000, 1)), grid, io.BytesIO(), decode=True)
