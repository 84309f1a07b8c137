"""MDS of others: the columns that lie there, or a refusal; never a wrong place."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.formats.mds import MdsError, index_samples, parse_mds, sample_bounds
from meshwire.formats.record_index import RecordIndex
from meshwire.strict_json import PlanError
from tests.support.mds_writer import mds_files

COLUMNS = {"image": "jpeg", "label": "int", "text": "str"}


def indexed(files: dict[str, bytes], wanted: list[str]) -> tuple[bytes, RecordIndex]:
    """Of the first shard."""
    shard = parse_mds(files["index.json"])[0]
    data = files[shard.basename]
    bounds = sample_bounds(shard, data[: shard.head_bytes])
    heads = np.zeros((shard.samples, shard.width), np.uint8)
    for row, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if end - begin >= shard.width:
            heads[row] = np.frombuffer(data[begin : begin + shard.width], np.uint8)
    return data, RecordIndex.from_bytes(index_samples(shard, bounds, heads, wanted).to_bytes())


def rows_of(values: list[tuple[bytes, int, bytes]]) -> list[dict[str, bytes]]:
    return [{"image": a, "label": struct.pack("<q", b), "text": c} for a, b, c in values]


@given(
    st.lists(
        st.tuples(st.binary(max_size=50), st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=9)),
        min_size=1,
        max_size=9,
    )
)
def test_columns_lie_where_the_index_says(values: list[tuple[bytes, int, bytes]]) -> None:
    rows = rows_of(values)
    data, index = indexed(mds_files(COLUMNS, rows), ["image", "label", "text"])
    assert index.numbers.tolist() == list(range(len(rows)))
    for name in COLUMNS:
        offsets, lengths = index.places[name]
        found = [data[at : at + size] for at, size in zip(offsets.tolist(), lengths.tolist(), strict=True)]
        assert found == [row[name] for row in rows]
    assert index.kinds == COLUMNS


def test_many_samples_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([(b"x" * number, number, b"") for number in range(9)])
    files = mds_files(COLUMNS, rows)
    _, whole = indexed(files, ["image", "label"])
    monkeypatch.setattr("meshwire.formats.mds._BLOCK_CELLS", 2 * len(COLUMNS))
    _, blocks = indexed(files, ["image", "label"])
    assert blocks.to_bytes() == whole.to_bytes()
    shard = bytearray(files["shard.00000.mds"])
    places = struct.unpack_from("<10I", shard, 4)
    for at in places[2:-1]:
        shard[at] ^= 1  # the length of its image
    _, damaged = indexed(files | {"shard.00000.mds": bytes(shard)}, ["image"])
    assert (damaged.numbers.tolist(), damaged.skipped, len(damaged.examples)) == ([0, 1], 7, 5)


@given(st.data())
def test_any_damage_is_a_refusal_a_sample_left_out_or_other_bytes_of_it(data: st.DataObject) -> None:
    files = mds_files(COLUMNS, rows_of([(b"one", 1, b"a"), (b"", 2, b""), (b"three", 3, b"ccc")]))
    shard = bytearray(files["shard.00000.mds"])
    shard[data.draw(st.integers(0, len(shard) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MdsError):
        _, index = indexed(files | {"shard.00000.mds": bytes(shard)}, ["image", "label"])
        assert index.skipped + index.numbers.size == 3
        for offsets, lengths in index.places.values():
            assert (offsets + lengths <= len(shard)).all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 1}, "version 2"),
        ({"shards": [{"format": "jsonl"}]}, "the format 'jsonl'; only mds"),
        ({"shards": [7]}, "the format 7"),
        ({"shards": "x"}, "not an index"),
    ],
)
def test_other_indexes_are_refused(change: dict[str, Any], complaint: str) -> None:
    document = json.loads(mds_files(COLUMNS, rows_of([(b"x", 1, b"")]))["index.json"])
    with pytest.raises(PlanError, match=complaint):
        parse_mds(json.dumps(document | change).encode())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"column_names": ["a"]}, "numbers of column names"),
        ({"column_names": ["a", "a", "b"]}, "two columns have the same name"),
        ({"column_sizes": [None, -1, None]}, "column_sizes"),
        ({"samples": 1.5}, "samples"),
        ({"samples": 1 << 26}, "samples"),
        ({"raw_data": {"basename": "x", "bytes": "many"}}, "raw_data.bytes"),
    ],
)
def test_other_shards_are_refused(change: dict[str, Any], complaint: str) -> None:
    document = json.loads(mds_files(COLUMNS, rows_of([(b"x", 1, b"")]))["index.json"])
    document["shards"][0] |= change
    with pytest.raises(PlanError, match=complaint):
        parse_mds(json.dumps(document).encode())


@given(st.binary(max_size=300))
def test_any_bytes_are_an_index_or_an_error(data: bytes) -> None:
    with contextlib.suppress(PlanError):
        parse_mds(data)
    shard = parse_mds(mds_files(COLUMNS, rows_of([(b"x", 1, b"")]))["index.json"])[0]
    with contextlib.suppress(MdsError):
        bounds = sample_bounds(shard, data)
        assert 0 <= int(bounds[0]) <= int(bounds[-1]) <= shard.bytes


def test_a_head_that_says_otherwise() -> None:
    files = mds_files(COLUMNS, rows_of([(b"x", 1, b""), (b"y", 2, b"")]))
    shard = parse_mds(files["index.json"])[0]
    head = files[shard.basename][: shard.head_bytes]
    for wrong, complaint in [
        (head[:-1], "ends before the offsets"),
        (struct.pack("<I", 3) + head[4:], "header states 3 samples, but its index 2"),
        (head[:4] + head[8:12] + head[4:8] + head[12:], "out of order or extend beyond"),
        (head[:4] + struct.pack("<I", 2) + head[8:], "out of order or extend beyond"),
        (head[:-4] + struct.pack("<I", shard.bytes + 1), "out of order or extend beyond"),
    ]:
        with pytest.raises(MdsError, match=complaint):
            sample_bounds(shard, wrong)
