"""Segments of the decoded cache: the files, their bytes, and who appends to them.

Law: a segment has one table and one writer. What counts is the bytes of its entries and of those that its
writer was asked to append. A dropped segment is truncated before it is unlinked, so that its bytes are free
although processes still have it open; their reads then fail, which is a miss. So do reads of an entry whose
space was given back: it becomes zeros.
"""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.transform.decoded_cache.tables import Segment
from meshd.util.disk_space import free_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from meshd.transform.decoded_cache.tables import Table

MIN_SEGMENT_BYTES: Final = 1 << 20
MAX_SEGMENT_BYTES: Final = 256 << 20
_SEGMENTS: Final = 64
"""Segments that a full cache has, at least."""
BLOCK: Final = 4096
"""Space is given back in whole blocks."""
Spans = dict["Path", list[tuple[int, int]]]
"""By file: the (offset, length) of parts of it."""


def remove_file(path: Path) -> None:
    """Free a segment's bytes and remove it (blocking)."""
    with suppress(OSError):
        os.truncate(path, 0)
        path.unlink()


def free_spans(spans: Mapping[Path, Iterable[tuple[int, int]]]) -> None:
    """Give the disk space of parts of segments back, where the file system can (blocking)."""
    for path, places in spans.items():
        with suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for place in places:
                    free_space(fd, *place)
            finally:
                os.close(fd)


class SegmentStore:
    """The segments of all tables in `directory`, which belongs to this node's cache alone.

    `limit`: bytes that all segments may take; `remove`: removes a file; `free`: gives back parts of files.
    """

    def __init__(
        self,
        directory: Path,
        limit: int,
        remove: Callable[[Path], None] = remove_file,
        free: Callable[[Spans], None] = free_spans,
    ) -> None:
        self._directory, self._remove, self._free = directory, remove, free
        self.limit = limit
        self.segment_bytes = max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, limit // _SEGMENTS))
        self._open: dict[tuple[object, int], Segment] = {}
        self._numbers = itertools.count()
        self.bytes = 0
        """Bytes of all segments, used and promised."""
        self.used = 0
        """Bytes of their entries."""

    def __repr__(self) -> str:
        return f"<SegmentStore {self.bytes} of {self.limit} bytes>"

    def clear(self) -> None:
        """Remove what an earlier process left and create the directory. Raises OSError."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True, mode=0o700, exist_ok=True)

    def open_segment(self, writer: object, table: Table) -> Segment | None:
        """Return the segment of a table that `writer` appends to, if it has one that is not full."""
        found = self._open.get((writer, table.number))
        if found is not None and found.is_full:
            self.seal(found)
            return None
        return found

    def create(self, writer: object, table: Table, capacity: int) -> Segment:
        """Begin a segment. Raises OSError."""
        number = next(self._numbers)
        path = self._directory / f"{number:08x}.seg"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        made = Segment(number, path, table, capacity, owner=writer)
        self._open[writer, table.number] = table.segments[number] = made
        return made

    def promise(self, segment: Segment, size: int) -> None:
        """Note that the writer is asked to append entries of `size` bytes."""
        segment.promised += size
        self._count(segment, size)

    def grow(self, segment: Segment, end: int) -> None:
        """Count the bytes of a segment, whose entries reach to `end`."""
        grown = max(0, end - segment.end)
        segment.end += grown
        self.used += grown
        self._count(segment, grown)

    def end_promise(self, segment: Segment, size: int) -> None:
        """Note that entries of `size` bytes will not be appended any more, or have been."""
        ended = min(size, segment.promised)
        segment.promised -= ended
        self._count(segment, -ended)
        if segment.owner is None and not segment.size:
            self.drop(segment)

    def _count(self, segment: Segment, size: int) -> None:
        if segment.number in segment.table.segments:
            segment.table.bytes += size
            self.bytes += size

    def give_back(self, table: Table, samples: Iterable[int], wanted: int) -> int:
        """Forget entries of these samples, and give back their space, until `wanted` bytes are free; return
        how many are. Entries that fill no block stay: they would give back nothing.
        """
        spans, given = Spans(), 0
        for sample in samples:
            found = table.find(sample)
            if found is None:
                continue
            segment, offset, length = found
            first, end = -(-offset // BLOCK) * BLOCK, (offset + length) // BLOCK * BLOCK
            if end <= first:
                continue
            table.forget(sample)
            spans.setdefault(segment.path, []).append((first, end - first))
            segment.freed += end - first
            self.used -= end - first
            self._count(segment, first - end)
            given += end - first
            if not segment.entries and not segment.promised and segment.owner is None:
                self.drop(segment)
            if given >= wanted:
                break
        if spans:
            self._free(spans)
        return given

    def seal(self, segment: Segment) -> None:
        """End appending to a segment, except for what was promised."""
        if segment.owner is None:
            return
        del self._open[segment.owner, segment.table.number]
        segment.owner = None
        if not segment.size:
            self.drop(segment)

    def seal_all(self, writer: object) -> None:
        """End the segments of a process that died."""
        for owner, number in [key for key in self._open if key[0] is writer]:
            self.seal(self._open[owner, number])

    def drop(self, segment: Segment) -> int:
        """Remove a segment with its entries. Returns its bytes."""
        if segment.number not in segment.table.segments:
            return 0
        if segment.owner is not None:
            del self._open[segment.owner, segment.table.number]
            segment.owner = None
        self._count(segment, -segment.size)
        segment.table.forget_segment(segment)
        self.used -= segment.used
        self._remove(segment.path)
        return segment.size
