"""Metadata and shard indexes of foreign arrays: places of rows, or a refusal; never anything else."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from meshwire.formats.zarr_source import parse_array, shard_starts
from meshwire.strict_json import PlanError


def grid(*chunk: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [10, 3],
        "data_type": "int16",
        "chunk_grid": grid(4, 3),
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    return base | changes


def parsed(**changes: Any) -> Any:
    return parse_array(json.dumps(document(**changes)).encode(), "fields.x")


def sharded(inner: list[int], **settings: Any) -> list[Any]:
    configuration = {
        "chunk_shape": inner,
        "codecs": [{"name": "bytes"}],
        "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        **settings,
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def test_plain_rows_lie_one_after_the_other() -> None:
    array = parsed()
    assert (array.rows, array.row, array.row_bytes, array.objects) == (10, (3,), 6, 3)
    rows, offsets, lengths = array.locate_rows(1, 24, b"")
    assert (rows.tolist(), offsets.tolist(), lengths.tolist()) == ([4, 5, 6, 7], [0, 6, 12, 18], [6] * 4)
    assert array.locate_rows(2, 24, b"").rows.tolist() == [8, 9]
    assert array.object_key(2) == "c/2/0"
    assert shard_starts([array], np.arange(10)).tolist() == [0, 4, 8, 10]
    assert shard_starts([array], np.array([1, 9])).tolist() == [0, 1, 2]
    assert parsed(chunk_key_encoding={"name": "v2"}).object_key(2) == "2.0"
    with pytest.raises(ValueError, match="a chunk has 23 bytes"):
        array.locate_rows(0, 23, b"")


def test_rows_of_shards_lie_where_their_index_says() -> None:
    array = parsed(codecs=sharded([2, 3]))
    pairs = struct.pack("<4Q", 100, 12, (1 << 64) - 1, (1 << 64) - 1)
    index = pairs + struct.pack("<I", crc32c(pairs))
    assert array.index_bytes == len(index)
    rows, offsets, lengths = array.locate_rows(1, 150, index)
    assert rows.tolist() == [4, 5]
    assert offsets.tolist() == [100, 106]
    assert lengths.tolist() == [6, 6]
    for size, wrong in [(150, index[:-1]), (150, index[:-1] + b"x"), (111, index)]:
        with pytest.raises(ValueError, match="index"):
            array.locate_rows(1, size, wrong)
    pairs = struct.pack("<4Q", 0, 12, 0, 12)
    twice = pairs + struct.pack("<I", crc32c(pairs))
    with pytest.raises(ValueError, match="overlap"):
        array.locate_rows(0, 23, twice)
    assert array.locate_rows(0, 24 + len(twice), twice).rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("keys", ["default", "v2"])
def test_keys_are_those_of_the_objects_and_no_others(keys: str) -> None:
    array = parsed(shape=[25, 3], chunk_key_encoding={"name": keys})
    assert [array.object_number(array.object_key(number)) for number in range(7)] == list(range(7))
    for key in (
        array.object_key(7),
        array.object_key(0) + "0",
        array.object_key(0) + "/0",
        "",
        "c",
        "c/",
        "c/-1/0",
        "c/٣/0",
        "c/01/0",
    ):
        assert array.object_number(key) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"zarr_format": 2}, "Zarr v3"),
        ({"node_type": "group"}, "Zarr v3"),
        ({"data_type": "string"}, "no rows of numbers"),
        ({"shape": []}, "no rows of numbers"),
        ({"shape": [10, -3]}, "not the metadata"),
        ({"chunk_grid": {"name": "rectilinear"}}, "regular chunk grid"),
        ({"chunk_grid": grid(4, 2)}, "several chunks"),
        ({"chunk_grid": grid(0, 3)}, "no rows"),
        ({"codecs": [{"name": "bytes"}, {"name": "blosc"}]}, "codec 'blosc' is not supported"),
        ({"codecs": [{"name": "transpose"}, {"name": "bytes"}]}, "codec 'transpose' is not supported"),
        ({"codecs": [{"name": "bytes"}, {"name": "gzip"}]}, "4 rows are encoded together"),
        ({"codecs": sharded([3, 3])}, "several chunks"),
        ({"codecs": [*sharded([2, 3]), {"name": "gzip"}]}, "as a whole"),
        ({"codecs": []}, "not the metadata"),
        ({"codecs": [{"name": "bytes"}, *[{"name": "gzip"}] * 8]}, "9 codecs"),
        ({"shape": [10] * 33, "chunk_grid": grid(*[10] * 33)}, "at most 32 axes"),
        (
            {"shape": [1 << 22, 3], "chunk_grid": grid(1 << 22, 3), "codecs": sharded([1, 3])},
            "shards of 4194304",
        ),
        ({"shape": [1 << 47, 3]}, "too many"),
        (
            {"shape": [10, 0], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 0]}}},
            "are empty",
        ),
    ],
)
def test_what_has_no_rows_to_read_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint) as caught:
        parsed(**changes)
    assert caught.value.path == "fields.x"


_NAMES = st.sampled_from(["name", "configuration"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 60) | st.sampled_from(["bytes", "gzip", "default", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(document())), _JSON, max_size=3))
def test_any_metadata_is_an_array_or_a_refusal(changes: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        assert parsed(**changes).row_bytes > 0
