"""Extents: which bytes of which files a window of samples needs, and the few large reads that fetch them.

Law: pure. Reads are in order of (file, offset), do not overlap, and cover every extent. A gap between two
extents is read with them if reading it takes less time than a short seek.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

GAP_BYTES: Final = 768 << 10
"""At 200 MB/s these pass under the head in 4 ms, the time of a short seek and half a turn."""
READ_BYTES: Final = 1 << 20
"""The size of one read: 5 ms of media time, which bounds what another reader of the disk waits for."""
_PAGE: Final = 4096
_SPAN: Final = 44  # bits of an offset within a file: 16 TiB; above them is the number of the file


class Reads(msgspec.Struct, frozen=True, eq=False):
    """Reads in the order in which to issue them: `files`, `offsets`, `lengths` int64[n], in bytes. `seeks`:
    how many of them do not continue the one before."""

    files: Integers
    offsets: Integers
    lengths: Integers
    seeks: int

    def __len__(self) -> int:
        return int(self.files.size)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


def merge_ranges(
    objects: Any, offsets: Any, lengths: Any, *, gap: int = GAP_BYTES
) -> list[tuple[int, int, int]]:
    """Return ranges (object, offset, length) that cover these (three sequences of n integers), in order, and
    do not overlap; those at most `gap` bytes apart are one. Empty ones are left out."""
    objects, starts = np.asarray(objects, np.int64), np.asarray(offsets, np.int64)
    ends = starts + np.asarray(lengths, np.int64)
    order = np.lexsort((starts, objects))
    order = order[ends[order] > starts[order]]
    if not order.size:
        return []
    objects, starts, ends = objects[order], starts[order], ends[order]
    base = objects * (1 << _SPAN)  # greater for a later object, so that a maximum does not cross objects
    reached = np.maximum.accumulate(base + ends) - base
    new = np.append(True, (objects[1:] != objects[:-1]) | (starts[1:] > reached[:-1] + gap))
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], order.size) - 1
    sizes = reached[lasts] - starts[firsts]
    return list(zip(objects[firsts].tolist(), starts[firsts].tolist(), sizes.tolist(), strict=True))


def plan_reads(
    files: Any, offsets: Any, lengths: Any, *, gap: int = GAP_BYTES, read: int = READ_BYTES
) -> Reads:
    """Return the reads that fetch these extents (three sequences of n integers; files are small numbers).

    Extents at most `gap` bytes apart become one run; runs are cut into reads of at most `read` bytes.
    Offsets and ends are rounded to pages.
    """
    starts = (np.asarray(files, np.int64) << _SPAN) + np.asarray(offsets, np.int64) // _PAGE * _PAGE
    ends = (np.asarray(files, np.int64) << _SPAN) + np.asarray(offsets, np.int64)
    ends += np.asarray(lengths, np.int64)
    ends = -(-ends // _PAGE) * _PAGE
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if order.size else ends
    firsts = np.flatnonzero(np.append(True, starts[1:] > ends[:-1] + gap)) if order.size else order
    lasts = np.append(firsts[1:], order.size)[: firsts.size] - 1
    begin, size = starts[firsts], ends[lasts] - starts[firsts]
    pieces = -(-size // read)
    run = np.repeat(np.arange(firsts.size), pieces)
    nth = np.arange(run.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    places = begin[run] + nth * read
    parts = np.minimum(read, size[run] - nth * read)
    return Reads(places >> _SPAN, places & ((1 << _SPAN) - 1), parts, int(firsts.size))
