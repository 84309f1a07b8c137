"""Page loader: reads a chunk of a disk into the page cache in the disk's own order, before it is copied.

Law: a disk has one arm. Work that reads many small objects, or several large ones at a time, has them loaded
here first: sorted, merged, and one chunk of a disk at a time, so that it costs a seek for each chunk and not
for each object. At most two reads are outstanding at a disk, so requests of clients do not queue behind a
chunk. Bytes that are cached are not read again; a failed read is left to the reader of the bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.disks.disk_type import advice_limit
from meshd.util.page_cache import is_cached, open_for_reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from meshd.store.records import Location, Record

CHUNK_BYTES: Final = 8 << 20
"""Bytes that are read between two seeks: 40 ms of media time for a seek of 12 ms."""
READ_BYTES: Final = 1 << 20
_GAP: Final = 128 << 10
"""Bytes that are read through: the headers between objects, or one small object that is not wanted."""


class PageLoader:
    """Loads chunks, one at a time for each disk. One for all work of a process that is to share disks.
    `is_rotational` tells which devices (`st_dev`) to load from; what is elsewhere is left to its reader."""

    def __init__(self, is_rotational: Callable[[int], bool] = lambda device: True) -> None:
        self._is_rotational = is_rotational
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __repr__(self) -> str:
        return f"<PageLoader of {len(self._turns)} disks>"

    async def load(self, disk: int, places: Sequence[Location]) -> None:
        """Reads these places of a disk, given in any order, once earlier chunks of the disk are read."""
        async with self._turns[disk]:
            await asyncio.shield(asyncio.to_thread(load_pages, places, self._is_rotational))

    async def load_window(self, disks: Mapping[int, Sequence[Location]]) -> None:
        """Reads a window of any size, given by disk: all disks at the same time, each chunk by chunk."""
        async with asyncio.TaskGroup() as group:
            for disk, places in disks.items():
                group.create_task(self._load_chunks(disk, places))

    async def _load_chunks(self, disk: int, places: Sequence[Location]) -> None:
        chunk: list[Location] = []
        size = 0
        for place in await asyncio.to_thread(sorted, places, key=disk_place):
            chunk.append(place)
            size += place.length
            if size >= CHUNK_BYTES:
                await self.load(disk, chunk)
                chunk, size = [], 0
        if chunk:
            await self.load(disk, chunk)


def disk_place(place: Location) -> tuple[str, int]:
    """Returns the sort key of a place on its disk: the number of its file, which is in its name, and its
    offset."""
    return place.path.rpartition("/")[2], place.offset


def load_pages(places: Iterable[Location], is_rotational: Callable[[int], bool]) -> None:
    """Reads these places into the page cache, in order of file and offset (blocking)."""
    buffer = memoryview(bytearray(READ_BYTES))
    for path, there in groupby(sorted(places, key=disk_place), key=lambda place: place.path):
        fd = open_for_reading(path)
        if fd < 0:
            continue
        try:
            if not is_rotational(os.fstat(fd).st_dev):
                continue
            missing = [read for read in merged_reads(there) if not is_cached(fd, *read)]
            advice = _advice_bytes(os.fstat(fd).st_dev)
            for number, (offset, length) in enumerate(missing):
                if not number:
                    _advise(fd, offset, length, advice)
                if number + 1 < len(missing):  # the disk always has the next one
                    _advise(fd, *missing[number + 1], advice)
                with suppress(OSError):
                    os.preadv(fd, [buffer[:length]], offset)
        finally:
            os.close(fd)


def merged_reads(places: Iterable[Location]) -> Iterator[tuple[int, int]]:
    """Yields offset and length of the reads, of READ_BYTES at most, that cover places of one file, which are
    in order."""
    start = end = -1
    for place in places:
        if end < 0 or place.offset > end + _GAP:
            if end > start:
                yield from _cut(start, end)
            start, end = place.offset, place.offset
        end = max(end, place.offset + place.length)
    if end > start:
        yield from _cut(start, end)


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, end, READ_BYTES):
        yield offset, min(READ_BYTES, end - offset)


def _advise(fd: int, offset: int, length: int, piece: int) -> None:
    with suppress(OSError):
        for place in range(offset, offset + length, piece):
            os.posix_fadvise(fd, place, min(piece, offset + length - place), os.POSIX_FADV_WILLNEED)


@lru_cache(maxsize=256)
def _advice_bytes(device: int) -> int:
    return advice_limit(device)


def places_by_disk(
    record: Record, located: Iterable[Location], start: int, length: int
) -> dict[int, list[Location]]:
    """Returns where `length` bytes from `start` of an object are, by disk. `located`: where its extents that
    have bytes are."""
    found: dict[int, list[Location]] = defaultdict(list)
    at, end = 0, start + length
    for extent, place in zip((each for each in record.extents if each.length), located, strict=True):
        first, last = max(start, at), min(end, at + place.length)
        if first < last:
            part = msgspec.structs.replace(place, offset=place.offset + first - at, length=last - first)
            found[extent.disk].append(part)
        at += place.length
    return found
