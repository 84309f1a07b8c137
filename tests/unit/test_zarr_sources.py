"""Metadata and shard indexes of foreign arrays: places of rows, or a refusal; never anything else."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from meshwire.documents import PlanError
from meshwire.zarrsources import boundaries, parse_array


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
    offsets, lengths = array.places(24, b"")
    assert (offsets.tolist(), lengths.tolist()) == ([0, 6, 12, 18], [6] * 4)
    assert array.key(2) == "c/2/0"
    assert boundaries([array]) == [0, 4, 8, 10]
    assert parsed(chunk_key_encoding={"name": "v2"}).key(2) == "2.0"
    with pytest.raises(ValueError, match="a chunk of 23 bytes"):
        array.places(23, b"")


def test_rows_of_shards_lie_where_their_index_says() -> None:
    array = parsed(codecs=sharded([2, 3]))
    pairs = struct.pack("<4Q", 100, 12, (1 << 64) - 1, (1 << 64) - 1)
    index = pairs + struct.pack("<I", crc32c(pairs))
    assert array.index_bytes == len(index)
    offsets, lengths = array.places(150, index)
    assert offsets.tolist() == [100, 106, -1, -1]
    assert lengths.tolist() == [6, 6, 0, 0]
    for size, wrong in [(150, index[:-1]), (150, index[:-1] + b"x"), (111, index)]:
        with pytest.raises(ValueError, match="index"):
            array.places(size, wrong)


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
        ({"codecs": [{"name": "bytes"}, {"name": "blosc"}]}, "codec 'blosc' is not known"),
        ({"codecs": [{"name": "transpose"}, {"name": "bytes"}]}, "codec 'transpose' is not known"),
        ({"codecs": [{"name": "bytes"}, {"name": "gzip"}]}, "4 rows are encoded together"),
        ({"codecs": sharded([3, 3])}, "several chunks"),
        ({"codecs": [*sharded([2, 3]), {"name": "gzip"}]}, "as a whole"),
        ({"codecs": []}, "not the metadata"),
        ({"shape": [1 << 47, 3]}, "too many"),
        (
            {"shape": [10, 0], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 0]}}},
            "nothing",
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
