"""Rows in files: runs that follow each other are read at once, and all others as they are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshd.batches.assembly.ragged_rows import RaggedRows
from meshd.transform.messages import pack_integers, unpack_integers

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = np.array([3, 0, 5, 1, 0, 7, 2, 4], np.int64)


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("rows")
    os.write(made, bytes(range(64)))
    yield made
    os.close(made)


def in_runs(fd: int, *cuts: int, gap: int = 0) -> RaggedRows:
    """The rows in runs, each of which begins `gap` bytes after the last one."""
    rows, at = RaggedRows(LENGTHS.size), 2
    for first, end in zip((0, *cuts), (*cuts, LENGTHS.size), strict=True):
        rows.set_run(first, fd, at, LENGTHS[first:end])
        at += int(LENGTHS[first:end].sum()) + gap
    return rows


def text(rows: RaggedRows) -> bytes:
    return b"".join(rows.chunks())


def counted(rows: RaggedRows, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, int]:
    """The bytes, and how many reads they took."""
    reads = list[int]()
    pread = os.pread

    def count(fd: int, size: int, at: int) -> bytes:
        reads.append(size)
        return pread(fd, size, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", count)
        return text(rows), len(reads)


def test_rows_that_follow_each_other_are_read_at_once(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bytes(range(2, 24))
    for cuts in ((), (3,), (1, 5)):
        assert counted(in_runs(file, *cuts), monkeypatch) == (whole, 1)


def test_runs_apart_and_single_rows_are_read_as_they_are(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = in_runs(file, 3, gap=1)
    assert counted(apart, monkeypatch) == (bytes([*range(2, 10), *range(11, 25)]), 2)
    rows = in_runs(file)
    rows.set_row(2, file, 40, 2, (2,))
    assert text(rows) == bytes([2, 3, 4, 40, 41, *range(10, 24)])
    rows = in_runs(file)
    rows.clear_row(2)
    assert text(rows) == bytes([2, 3, 4, *range(10, 24)])
    assert text(in_runs(file).take(np.array([0, 3, 7]))) == bytes([2, 3, 4, 10, 20, 21, 22, 23])
    later = RaggedRows(LENGTHS.size)
    later.set_run(3, file, 0, LENGTHS[3:])  # the rows before it have no bytes
    assert text(later) == bytes(range(14))


@pytest.mark.parametrize("most", [0, 1, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1])
def test_integers_take_the_bytes_that_the_largest_one_needs(most: int) -> None:
    values = np.array([0, most, most // 2], np.int64)
    data = pack_integers(values)
    width = next(each for each in (1, 2, 4, 8) if most < 1 << 8 * each)
    assert len(data) == 3 * width
    assert unpack_integers(data, 3).tolist() == values.tolist()
    assert unpack_integers(pack_integers(values[:0]), 0).tolist() == []
