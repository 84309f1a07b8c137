"""Columns of strings, whichever way their bytes are held: they equal lists of the same strings."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.frame.columns import ColumnReader, ColumnWriter, StoredStrings, StringColumn

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.frame.columns import Integers

    Held = Callable[[list[str]], StringColumn]

texts = st.sampled_from(["", "a", "bc", "é", "日本", "𝄞x", "long " * 60]) | st.text(max_size=4)


@st.composite
def columns(draw: st.DrawFn, most: int = 700) -> list[str]:
    """Some strings again and again: enough of them for many runs whose places are found by one sum."""
    some, count = draw(st.lists(texts, max_size=9)), draw(st.integers(0, most))
    return (some * (count // len(some) + 1))[:count] if some else []


class Edits(NamedTuple):
    old: list[str]
    firsts: list[int]
    ends: list[int]
    new: list[list[str]]

    @property
    def edited(self) -> list[str]:
        found, at = list[str](), 0
        for first, end, more in zip(self.firsts, self.ends, self.new, strict=True):
            found += [*self.old[at:first], *more]
            at = end
        return found + self.old[at:]

    def of(self, old: StringColumn, new: StringColumn) -> StringColumn:
        return old.replace_runs(int64(self.firsts), int64(self.ends), int64(map(len, self.new)), new)


@st.composite
def edits(draw: st.DrawFn) -> Edits:
    old = draw(columns())
    places = sorted(draw(st.lists(st.integers(0, len(old)), max_size=40)))
    firsts, ends = places[: len(places) // 2 * 2 : 2], places[1::2]
    return Edits(old, firsts, ends, [draw(columns(3)) for _ in firsts])


def int64(values: Any) -> Integers:
    return np.array(list(values), np.int64)


def stored(strings: list[str]) -> StringColumn:
    """As a document holds them, in memory of which nothing may be written."""
    writer = ColumnWriter("test", 1, {})
    writer.add_strings("names", StringColumn.from_strings(strings))
    column = ColumnReader(writer.to_bytes(), "test", 1).view_strings("names")
    assert isinstance(column, StoredStrings)
    return column


def spliced(strings: list[str]) -> StringColumn:
    """Joined of a column's halves, in place of one string between them."""
    half = len(strings) // 2
    old = stored([*strings[:half], "in between", *strings[half + 1 :]])
    new = StringColumn.from_strings(strings[half : half + 1])
    return old.replace_runs(int64([half]), int64([half + 1]), int64([len(new)]), new)


held = pytest.mark.parametrize("make", [StringColumn.from_strings, stored, spliced])
held_too = pytest.mark.parametrize("make_new", [StringColumn.from_strings, stored, spliced])


def check_same(column: StringColumn, strings: list[str]) -> None:
    """All that can be read of a column; what may depend on what was read before comes first."""
    plain = StringColumn.from_strings(strings)
    encoded = [text.encode() for text in strings]
    writers = [ColumnWriter("test", 1, {}) for _ in range(2)]
    for writer, each in zip(writers, (column, plain), strict=True):
        writer.add_strings("names", each)
    assert writers[0].to_bytes() == writers[1].to_bytes(), "equal columns have equal bytes"
    assert b"".join(piece.tobytes() for piece in column.octet_pieces) == b"".join(encoded)
    assert column.sizes.tolist() == column.lengths.tolist() == list(map(len, encoded))
    assert len(column) == len(strings)
    assert list(column) == strings
    assert [column[number] for number in range(-len(strings), len(strings))] == strings * 2
    assert column.blob == column.octets.tobytes() == b"".join(encoded)
    assert column == plain
    assert plain == column


@held
@given(strings=columns(200))
def test_a_column_equals_the_list_of_its_strings(make: Held, strings: list[str]) -> None:
    check_same(make(strings), strings)


@held
@held_too
@given(edit=edits())
def test_runs_are_replaced_as_in_a_list(make: Held, make_new: Held, edit: Edits) -> None:
    old, new = make(edit.old), make_new([text for each in edit.new for text in each])
    check_same(edit.of(old, new), edit.edited)
    check_same(new, [text for each in edit.new for text in each])
    assert list(old) == edit.old, "neither column has changed"


@held
@given(strings=columns(), data=st.data())
def test_strings_begin_where_those_before_them_end(
    make: Held, strings: list[str], data: st.DataObject
) -> None:
    column, bounds = make(strings), [0]
    for text in strings:
        bounds.append(bounds[-1] + len(text.encode()))
    few = data.draw(st.lists(st.integers(0, len(strings)), max_size=max(1, len(strings) // 64)))
    for indices in (few, list(range(len(bounds)))):
        assert column.offsets(int64(indices)).tolist() == [bounds[index] for index in indices]
    taken = [index for index in few if index < len(strings)]
    assert column.take_rows(int64(taken)) == [strings[index] for index in taken]


@given(first=edits(), second=st.data())
def test_what_was_replaced_can_be_replaced_again(first: Edits, second: st.DataObject) -> None:
    column = first.of(stored(first.old), stored([text for each in first.new for text in each]))
    length = len(first.edited)
    places = sorted(second.draw(st.lists(st.integers(0, length), max_size=8)))
    pairs = [pair for pair in pairwise(places)][::2]
    new = [second.draw(columns(3)) for _ in pairs]
    again = Edits(first.edited, [pair[0] for pair in pairs], [pair[1] for pair in pairs], new)
    flat = [text for each in new for text in each]
    check_same(again.of(column, StringColumn.from_strings(flat)), again.edited)
