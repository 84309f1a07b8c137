"""Reads blobs into the places they have in a stream, a group of about a megabyte at a time.

Law: what the page cache holds is read at once, anything else by a thread; blobs that lie side by side in a
file, in the order asked for, cost one system call together. Invariant: bytes of a whole extent are compared
with the checksum the store keeps; what is gone or damaged is zeros in a group, and named as failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from awscrt.checksums import crc32c

from meshd.store.errors import StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from meshd.service.blobs import Blob
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Span

_log = logging.getLogger(__name__)
_GROUP = 1 << 20  # bytes
_GROUP_PARTS = 1000
_VECTORS = 1000  # of one call; the kernel takes 1,024
_GAP = bytearray(4096)  # what lies between neighbours, as members' headers, is read into here and forgotten


@dataclass(slots=True)
class Group:
    """The stream's bytes up to `end`. `sums`: the crc32c of each blob that ends here; `failed`: blobs with
    zeros for bytes. What lies between blobs is zero."""

    data: bytearray
    end: int
    sums: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """`length` bytes of blob `number` from its `offset` on; they belong at `place` of the group."""

    number: int
    offset: int
    length: int
    place: int


@dataclass(slots=True)
class _Run:
    """Neighbours in a file: one call reads `length` bytes from `start` on into the `views`."""

    fd: int
    start: int
    length: int
    views: list[memoryview | bytearray]
    parts: list[_Part]

    def joins(self, span: Span) -> bool:
        gap = span.offset - self.start - self.length
        return span.fd == self.fd and 0 <= gap <= len(_GAP) and len(self.views) < _VECTORS

    def add(self, span: Span, view: memoryview, part: _Part) -> None:
        if gap := span.offset - self.start - self.length:
            self.views.append(memoryview(_GAP)[:gap])
        self.views.append(view)
        self.parts.append(part)
        self.length = span.offset + span.length - self.start

    def read(self, flags: int = 0) -> bool:
        """Whether all bytes came."""
        try:
            return os.preadv(self.fd, self.views, self.start, flags) == self.length
        except OSError:
            return False


async def read_blobs(
    store: ObjectStore, blobs: Sequence[Blob], starts: Sequence[int], at: int
) -> AsyncIterator[Group]:
    """The stream from `at` to the end of the last blob that has bytes; blob i begins at `starts[i]`."""
    sums: dict[int, int] = {}  # of blobs that go on in the next group
    for parts, end in _cut(blobs, starts, at):
        group = Group(bytearray(end - at), end)
        lost = await _fill(store, blobs, parts, group.data)
        for part in parts:
            _finish(blobs[part.number], part, group, sums, lost=part.number in lost)
        at = end
        yield group


def _cut(blobs: Sequence[Blob], starts: Sequence[int], at: int) -> Iterator[tuple[list[_Part], int]]:
    """The parts of each group, and where in the stream it ends."""
    parts: list[_Part] = []
    end = at
    for number, blob in enumerate(blobs):
        offset, length = 0, blob.length
        while offset < length:
            taken = min(_GROUP, length - offset)
            place = starts[number] + offset
            parts.append(_Part(number, offset, taken, place - at))
            offset += taken
            end = place + taken
            if end - at >= _GROUP or len(parts) >= _GROUP_PARTS:
                yield parts, end
                parts, at = [], end
    if parts:
        yield parts, end


async def _fill(
    store: ObjectStore, blobs: Sequence[Blob], parts: Sequence[_Part], data: bytearray
) -> set[int]:
    """Reads the parts into `data`; gives the numbers of blobs that could not be read."""
    lost: set[int] = set()
    with ExitStack() as files, memoryview(data) as view:
        runs: list[_Run] = []
        for part in parts:
            blob = blobs[part.number]
            if blob.record is None:
                view[part.place : part.place + part.length] = blob.data[part.offset :][: part.length]
            elif not _plan(store, blob, part, files, view, runs):
                lost.add(part.number)
        later = [run for run in runs if not run.read(os.RWF_NOWAIT)]
        if later:
            lost |= await asyncio.to_thread(_read_all, later)
        for run in runs:
            run.views.clear()
    return lost


def _plan(
    store: ObjectStore, blob: Blob, part: _Part, files: ExitStack, view: memoryview, runs: list[_Run]
) -> bool:
    """Adds what a part needs to the runs; False when its object is gone."""
    assert blob.record is not None
    try:
        spans = files.enter_context(store.reading(blob.record, blob.offset + part.offset, part.length))
    except (StoreError, OSError):
        _log.warning("an object went away while it was being sent", exc_info=True)
        return False
    if sum(span.length for span in spans) != part.length:
        return False
    place = part.place
    for span in spans:
        piece = view[place : place + span.length]
        if runs and runs[-1].joins(span):
            runs[-1].add(span, piece, part)
        else:
            runs.append(_Run(span.fd, span.offset, span.length, [piece], [part]))
        place += span.length
    return True


def _read_all(runs: Sequence[_Run]) -> set[int]:
    """In a thread: the blobs that cannot be read. A run that fails is read part by part."""
    lost: set[int] = set()
    for run in runs:
        if run.read():
            continue
        if len(run.parts) == 1:
            _log.error("a data file cannot be read: %d bytes at %d", run.length, run.start)
            lost.add(run.parts[0].number)
            continue
        at = run.start
        parts = iter(run.parts)
        for piece in run.views:
            own = isinstance(piece, memoryview) and piece.obj is not _GAP
            if own:
                part = next(parts)
                single = _Run(run.fd, at, len(piece), [piece], [part])
                lost |= _read_all([single])
            at += len(piece)
    return lost


def _finish(blob: Blob, part: _Part, group: Group, sums: dict[int, int], *, lost: bool) -> None:
    """The checksum of a part; at the blob's end the verdict on all of it."""
    number = part.number
    with memoryview(group.data)[part.place : part.place + part.length] as piece:
        if lost:
            piece[:] = bytes(part.length)
            group.failed.append(number)
            return
        total = crc32c(piece, sums.pop(number, 0))
        if part.offset + part.length < blob.length:
            sums[number] = total
            return
        group.sums[number] = total
        if _damaged(blob, total):
            metrics.store_corrupt_reads.inc()
            _log.error("the stored bytes of %s are damaged and are not served; run meshd fsck", blob.name)
            piece[:] = bytes(part.length)
            group.failed.append(number)


def _damaged(blob: Blob, total: int) -> bool:
    """Whether a whole extent's bytes differ from what was stored."""
    record = blob.record
    if record is None or len(record.extents) != 1:
        return False
    extent = record.extents[0]
    return blob.offset == 0 and blob.length == extent.length and total != extent.crc32c
