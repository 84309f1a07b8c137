"""Disk order: in which order the items of a request are read; pure.

Law: a chunk is of one disk and in order of (file, offset). The chunks of a disk follow each other in that
order, with those of other disks in between, so that all disks work.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final

from meshd.store.disks.page_loader import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.store.records import Extent

CHUNK_ITEMS: Final = 256
_NOWHERE: Final = -1


def chunks_in_disk_order(places: Sequence[Extent | None]) -> list[list[int]]:
    """Return the numbers of all items, whose first bytes are at `places` (None: they have none), in chunks of
    up to CHUNK_ITEMS and about CHUNK_BYTES."""
    disks: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        disks[_NOWHERE if place is None else place.disk].append(number)
    for numbers in disks.values():
        numbers.sort(key=lambda number: _place(places[number]))
    queues = [_cut(disks.pop(_NOWHERE, []), places), *(_cut(numbers, places) for numbers in disks.values())]
    return [chunk for chunk in chain.from_iterable(zip_longest(*queues)) if chunk]


def _place(extent: Extent | None) -> tuple[int, int]:
    return (0, 0) if extent is None else (extent.file, extent.offset)


def _cut(numbers: list[int], places: Sequence[Extent | None]) -> Iterator[list[int]]:
    chunk: list[int] = []
    size = 0
    for number in numbers:
        chunk.append(number)
        place = places[number]
        size += 0 if place is None else place.length
        if size >= CHUNK_BYTES or len(chunk) == CHUNK_ITEMS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
