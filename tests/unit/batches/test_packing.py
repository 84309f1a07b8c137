"""Packing: every element once, rows never too long, the same for the same lengths, and well filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.frame.columns import ColumnError
from meshwire.plan.plan_spec import canonical_spec, parse_spec, spec_document
from meshwire.plan.sequence_packing import RUN, Pack, PackTable, pack_document, pack_rows, parse_pack
from meshwire.strict_json import PlanError


def table_of(lengths: list[int], shards: list[int], pack: Pack) -> PackTable:
    made = pack_rows(np.array(lengths, np.int64), np.array(shards, np.int64), pack)
    again = PackTable.from_bytes(made.to_bytes())
    assert made.to_bytes() == again.to_bytes()
    return again


@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 20),
    st.sampled_from(["split", "truncate"]),
    st.data(),
)
def test_every_element_is_in_one_row(lengths: list[int], length: int, long: Any, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(lengths)), max_size=4)) | {0, len(lengths)})
    table = table_of(lengths, cuts, Pack(("t",), length, 0, long))
    seen: list[tuple[int, int]] = []
    for row in range(table.rows):
        pieces = list(table.pieces(row))
        assert pieces == sorted(pieces)
        assert 0 < sum(size for _, _, size in pieces) <= length
        seen += [(sample, at + i) for sample, at, size in pieces for i in range(size)]
        shards = {int(np.searchsorted(cuts, sample, side="right")) for sample, _, _ in pieces}
        assert len(shards) == 1
    kept = [min(size, length) if long == "truncate" else size for size in lengths]
    assert sorted(seen) == [(sample, i) for sample, size in enumerate(kept) for i in range(size)]
    assert int(table.shard_starts[-1]) == table.rows
    # Two rows that would fit into one are not left, within a shard.
    for first, end in zip(table.shard_starts[:-1].tolist(), table.shard_starts[1:].tolist(), strict=True):
        sums = sorted(sum(size for _, _, size in table.pieces(row)) for row in range(first, end))
        assert len(sums) < 2 or sums[0] + sums[1] > length


def test_rows_are_well_filled() -> None:
    rng = np.random.default_rng(7)
    lengths = np.minimum(rng.geometric(1 / 300, 20_000), 2048)
    table = table_of(lengths.tolist(), [0, 20_000], Pack(("t",), 2048))
    assert table.rows * 2048 / lengths.sum() < 1.005
    assert table.shard_starts.tolist() == [0, table.rows]
    firsts = [next(table.pieces(row))[0] for row in range(table.rows)]
    runs = [first // RUN for first in firsts]
    assert runs == sorted(runs)


def test_an_example_by_hand() -> None:
    table = table_of([3, 9, 2, 5, 0, 4], [0, 6], Pack(("t",), 8))
    rows = [list(table.pieces(row)) for row in range(table.rows)]
    assert rows == [[(0, 0, 3), (3, 0, 5)], [(1, 0, 8)], [(1, 8, 1), (2, 0, 2), (5, 0, 4)]]
    assert table.samples_of(np.array([2, 0])).tolist() == [0, 1, 2, 3, 5]


def test_the_specification_is_part_of_the_plan() -> None:
    spec = parse_spec({"pack": {"fields": ["b", "a"], "length": 8}})
    assert spec.pack == Pack(("a", "b"), 8)
    assert parse_spec(spec_document(spec)) == spec
    assert pack_document(parse_pack({"fields": "a", "length": 8, "long": "truncate", "value": 3})) == {
        "fields": ["a"],
        "length": 8,
        "value": 3,
        "long": "truncate",
    }
    counted = parse_pack({"fields": "a", "length": 8, "positions": "sample"})
    assert parse_pack(pack_document(counted)) == counted
    assert spec.pack.numbers == ("a.segments", "a.positions")
    assert b"positions" not in canonical_spec(spec)  # plans of earlier releases keep their hashes
    assert b"segments" not in canonical_spec(spec)
    choices: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"positions": "none"}, ("a.segments",)),
        ({"segments": False}, ("a.positions",)),
        ({"positions": "none", "segments": False}, ()),
    ]
    for document, numbers in choices:
        bare = parse_spec({"pack": {"fields": ["b", "a"], "length": 8, **document}})
        assert bare.pack is not None
        assert bare.pack.numbers == numbers
        assert parse_spec(spec_document(bare)) == bare
        assert canonical_spec(bare) != canonical_spec(spec)
    assert b"pack" not in canonical_spec(parse_spec({}))
    assert b"pack" not in canonical_spec(parse_spec({"pack": None}))


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"fields": ["a"]}, "pack.length"),
        ({"length": 8}, "pack.fields"),
        ({"fields": [], "length": 8}, "pack.fields"),
        ({"fields": ["a", "a"], "length": 8}, "pack.fields"),
        ({"fields": ["a"], "length": 0}, "pack.length"),
        ({"fields": ["a"], "length": 8, "long": "drop"}, "pack.long"),
        ({"fields": ["a"], "length": 8, "value": 0.5}, "pack.value"),
        ({"fields": ["a"], "length": 8, "positions": "row"}, "pack.positions"),
        ({"fields": ["a"], "length": 8, "segments": 0}, "pack.segments"),
        ({"fields": ["a"], "length": 8, "more": 1}, "pack.more"),
        ([], "pack"),
    ],
)
def test_what_is_wrong_is_named(document: Any, path: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_spec({"pack": document})
    assert caught.value.path == path


def test_a_table_that_lies_is_refused() -> None:
    document = table_of([3, 9, 2], [0, 3], Pack(("t",), 8)).to_bytes()
    for wrong in (
        b"",
        document[:-1],
        document + b"x",
        document.replace(b"shardmesh.pack", b"shardmesh.pick"),
    ):
        with pytest.raises(ColumnError):
            PackTable.from_bytes(wrong)
