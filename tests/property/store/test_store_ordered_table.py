"""Keys of any length in LMDB behave like a sorted dictionary."""

from __future__ import annotations

import tempfile
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.store.index import ordered_table
from meshd.store.index.ordered_table import OrderedTable

_HEADS = [b"", b"b\0", b"b\0" + b"x" * 437, b"b\0" + b"x" * 438, b"b\0" + b"x" * 439, b"b\0" + b"x" * 900]
KEYS = st.builds(
    lambda head, tail: head + tail or b"k",
    st.sampled_from(_HEADS),
    st.text("ax\x7f", max_size=4).map(str.encode),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "delete"]), KEYS, st.binary(max_size=8)), max_size=60
)


def _same(table: OrderedTable, txn: Any, expected: dict[bytes, bytes], probes: list[bytes]) -> None:
    assert [(key, bytes(value)) for key, value in table.items(txn)] == sorted(expected.items())
    assert table.count(txn) == len(expected)
    for probe in probes:
        found = table.get(txn, probe)
        assert (None if found is None else bytes(found)) == expected.get(probe)
        later = [(key, bytes(value)) for key, value in table.items(txn, start=probe)]
        assert later == sorted((key, value) for key, value in expected.items() if key >= probe)


def _play(steps: list[tuple[str, bytes, bytes]], probes: int | None = None) -> None:
    expected: dict[bytes, bytes] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        lmdb.open(place, max_dbs=1, map_size=1 << 24, sync=False) as env,
    ):
        table = OrderedTable(env.open_db(b"t"))
        with env.begin(write=True) as txn:
            for step, key, value in steps:
                if step == "put":
                    table.put(txn, key, value)
                    expected[key] = value
                else:
                    assert table.delete(txn, key) == (expected.pop(key, None) is not None)
        for buffers in (False, True):
            with env.begin(buffers=buffers) as txn:
                _same(table, txn, expected, [key for _, key, _ in steps[:probes]])


@given(STEPS)
@settings(max_examples=30, deadline=None)
def test_it_is_a_sorted_dictionary(steps: list[tuple[str, bytes, bytes]]) -> None:
    _play(steps)


def test_full_gaps_are_relabelled() -> None:
    """Keys that always fall between the last two use up a gap in 32 halvings."""
    head = b"k" * ordered_table.LONG
    inward = [head + bytes((1,) * n + (0,)) for n in range(1, 90)]
    outward = [head + b"\xf0" + bytes((255 - n,)) for n in range(90)]
    _play([("put", key, b"v") for key in [head + b"\xff", *inward, *outward]])


@pytest.mark.parametrize("way", ["up", "down", "inward"])
def test_a_key_costs_the_moves_of_few_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and wherever among them it falls: the index's writers wait meanwhile."""
    moved, relabel = [0], OrderedTable._relabel

    def counted(table: OrderedTable, *where: Any) -> int:
        moved[0] += (found := relabel(table, *where))
        return found

    monkeypatch.setattr(OrderedTable, "_relabel", counted)
    head, count = b"k" * ordered_table.LONG, 2_000
    ways = {"up": range(count), "down": range(count, 0, -1)}
    numbers = ways.get(way) or [each for n in range(count // 2) for each in (n, count - n)]
    ends = [("put", head + b"a", b""), ("put", head + b"z", b"")]
    _play([*ends, *(("put", head + b"k%08d" % number, b"v") for number in numbers)], probes=50)
    assert 0 < moved[0] < 12 * count
