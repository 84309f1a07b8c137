"""Reads blobs into their positions in a stream, one group at a time.

Law: data in the page cache is read inline, other data in a thread. Adjacent small blobs of a file share
one system call; large whole objects are returned as file ranges. Invariant: whole small objects and
whole extents are compared with their stored checksums; a missing or damaged blob is zero-filled and
listed in `failed`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from awscrt.checksums import combine_crc32c, crc32c

from meshd.batches.remote_part_prefetcher import RemotePrefetcher
from meshd.core.peer_source import SINGLE_NODE
from meshd.store.integrity.verification import report_damaged_object
from meshd.store.records import Span
from meshd.telemetry import metrics, tracing
from meshd.util.page_cache import is_absent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from meshd.batches.remote_part_prefetcher import Piece
    from meshd.core.peer_source import ObjectRange, PeerSource
    from meshd.store.api import ObjectStore
    from meshd.store.records import Extent, Record

_log = logging.getLogger("meshd.batches")
_GROUP = 1 << 18  # bytes that are read per group; a buffer this large stays in the processor's cache
_DIRECT = 1 << 16  # objects of at least this many bytes are sent straight from their file
_DIRECT_GROUP = 8 << 20
_PAGE = 1 << 20  # bytes of a cold file that a thread reads in at a time; size of the file of zeros
_KEPT = 4  # idle buffers that a worker keeps
_GROUP_PARTS = 1000
_VECTORS = 1000  # buffers per preadv call; the kernel allows 1,024
_GAP = bytearray(4096)  # receives the bytes between neighbours, such as member headers; never used


class Blob(msgspec.Struct, frozen=True):
    """One item of a stream: `length` bytes at `offset` of an object, `data` itself, or a remote `part`.

    `error`: an error code; the blob is then empty.
    `status`: the status in the trailer if the bytes can be read.
    """

    name: str
    length: int
    record: Record | None = None
    offset: int = 0
    data: bytes = b""
    status: int = 0
    error: str = ""
    part: ObjectRange | None = None


class Group(msgspec.Struct):
    """The stream's bytes up to `end`: in `data`, or else in `spans`.

    Both are valid until the next group is requested. `sums`: the crc32c of each blob that ends here;
    `failed`: blobs whose bytes are zeros. The bytes between blobs are zero.
    """

    data: memoryview
    end: int
    spans: Sequence[Span] = ()
    sums: dict[int, int] = msgspec.field(default_factory=dict)
    failed: list[int] = msgspec.field(default_factory=list)


class _Buffers:
    """A pool of buffers: faulting in a new page costs more than filling an old one."""

    def __init__(self) -> None:
        self._idle: list[bytearray] = []

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[bytearray]:
        buffer = self._idle.pop() if self._idle else bytearray(2 * _GROUP)
        try:
            yield buffer
        finally:
            if len(self._idle) < _KEPT:
                self._idle.append(buffer)


_buffers = _Buffers()


class _Part(msgspec.Struct):
    """`length` bytes of blob `number` from `offset` on, placed at `place` in the group."""

    number: int
    offset: int
    length: int
    place: int


class _Run(msgspec.Struct):
    """Neighbouring ranges of a file: one call reads `length` bytes from `start` on into the `views`."""

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
        """Read the run. Returns whether all bytes were read."""
        try:
            return os.preadv(self.fd, self.views, self.start, flags) == self.length
        except OSError:
            return False


async def read_blobs(
    store: ObjectStore,
    blobs: Sequence[Blob],
    starts: Sequence[int],
    at: int,
    *,
    direct: bool = False,
    remote: PeerSource = SINGLE_NODE,
) -> AsyncIterator[Group]:
    """Yield the stream from `at` to the end of the last nonempty blob; blob i begins at `starts[i]`.

    With `direct`, groups of large objects are spans.
    """
    sums: dict[int, int] = {}  # of blobs that continue in the next group
    async with _buffers.borrowed() as buffer, RemotePrefetcher(remote, _remote_pieces(blobs)) as far:
        for parts, end in _cut(blobs, starts, at, direct=direct):
            if direct and _is_direct(blobs[parts[0].number]):
                with ExitStack() as files:
                    with tracing.stage("disk read"):
                        group = await _direct_group(store, blobs, parts, end, files)
                    yield group
                at = end
                continue
            with memoryview(buffer if end - at <= len(buffer) else bytearray(end - at)) as room:
                data = room[: end - at]
                group = Group(data, end)
                _clear_between(parts, data)
                with tracing.stage("disk read"):
                    lost = await _fill(store, blobs, parts, data, far)
                for part in parts:
                    _finish(blobs[part.number], part, group, sums, lost=part.number in lost)
                at = end
                yield group


def _remote_pieces(blobs: Sequence[Blob]) -> Iterator[Piece]:
    for number, blob in enumerate(blobs):
        part = blob.part
        if part is None:
            continue
        for offset in range(0, blob.length, _GROUP):
            length = min(_GROUP, blob.length - offset)
            yield (number, offset), part._replace(offset=part.offset + offset, length=length)


def _is_direct(blob: Blob) -> bool:
    record = blob.record
    if blob.length < _DIRECT or blob.offset or record is None or len(record.extents) != 1:
        return False
    return record.extents[0].length == blob.length


def _cut(
    blobs: Sequence[Blob], starts: Sequence[int], at: int, *, direct: bool
) -> Iterator[tuple[list[_Part], int]]:
    """Yield the parts of each group and the stream offset where it ends.

    A direct blob is one part, in a group of direct blobs only.
    """
    parts: list[_Part] = []
    end = at
    whole = False
    for number, blob in enumerate(blobs):
        length = blob.length
        if not length:
            continue
        is_direct = direct and length >= _DIRECT and _is_direct(blob)
        if parts and whole != is_direct:
            yield parts, end
            parts, at = [], end
        whole = is_direct
        room, most = (_DIRECT_GROUP, length) if whole else (_GROUP, _GROUP)
        offset, start = 0, starts[number]
        while offset < length:
            taken = length - offset
            if taken > most:
                taken = most
            place = start + offset
            parts.append(_Part(number, offset, taken, place - at))
            offset += taken
            end = place + taken
            if end - at >= room or len(parts) >= _GROUP_PARTS:
                yield parts, end
                parts, at = [], end
    if parts:
        yield parts, end


def _clear_between(parts: Sequence[_Part], data: memoryview) -> None:
    end = 0
    for part in parts:
        if part.place > end:
            data[end : part.place] = bytes(part.place - end)
        end = part.place + part.length


async def _direct_group(
    store: ObjectStore, blobs: Sequence[Blob], parts: Sequence[_Part], end: int, files: ExitStack
) -> Group:
    """Return whole objects as ranges of their files, read into memory, with their stored checksums."""
    wanted = [(record, 0, part.length) for part in parts if (record := blobs[part.number].record) is not None]
    found = files.enter_context(store.open_spans_many(wanted))
    lost = _unreadable_entries(found)
    cold = [place for place, spans in enumerate(found) if place not in lost and not _resident(spans or ())]
    if cold:
        lost |= await _fetch(found, cold)
    group = Group(memoryview(b""), end)
    spans: list[Span] = []
    at = 0
    for place, (part, own, (record, _, _)) in enumerate(zip(parts, found, wanted, strict=True)):
        if part.place != at:
            spans += _zeros(part.place - at)
        if own is None or place in lost:
            group.failed.append(part.number)
            spans += _zeros(part.length)
        else:
            group.sums[part.number] = record.extents[0].crc32c
            spans += own
        at = part.place + part.length
    group.spans = spans
    return group


def _unreadable_entries(found: Sequence[Sequence[Span] | None]) -> set[int]:
    """Return the places of entries that cannot be read or extend past the end of their file."""
    sizes: dict[int, int] = {}
    lost: set[int] = set()
    for place, spans in enumerate(found):
        for span in spans or ():
            size = sizes.get(span.fd)
            if size is None:
                size = sizes[span.fd] = os.fstat(span.fd).st_size
            if size < span.offset + span.length:
                _log.error("a data file ends before the end of an extent")
                lost.add(place)
    return lost


def _resident(spans: Sequence[Span]) -> bool:
    """Return whether the first and last byte of each range are in the page cache."""
    probe = (bytearray(1),)
    try:
        for span in spans:
            if is_absent(span.fd, span.offset):  # the kernel would begin to read one page, and the rest later
                return False
            os.preadv(span.fd, probe, span.offset, os.RWF_NOWAIT)
            os.preadv(span.fd, probe, span.offset + span.length - 1, os.RWF_NOWAIT)
    except OSError:  # not in memory, or the file system does not support RWF_NOWAIT
        return False
    return True


async def _fetch(found: Sequence[Sequence[Span] | None], cold: Sequence[int]) -> set[int]:
    """Read cold entries in with several threads; return the places of those that the disk cannot read."""
    fetched = [asyncio.to_thread(_read_in, found[place] or ()) for place in cold]
    outcomes = await asyncio.gather(*fetched, return_exceptions=True)
    lost: set[int] = set()
    for place, outcome in zip(cold, outcomes, strict=True):
        if isinstance(outcome, OSError):
            _log.error("an object cannot be read: %s", outcome)
            lost.add(place)
        elif isinstance(outcome, BaseException):
            raise outcome
    return lost


def _read_in(spans: Sequence[Span]) -> None:
    """Read ranges into the page cache (blocking). Raises OSError if the disk fails."""
    for span in spans:
        for offset in range(0, span.length, _PAGE):
            os.pread(span.fd, min(_PAGE, span.length - offset), span.offset + offset)


def _zeros(length: int) -> list[Span]:
    whole, rest = divmod(length, _PAGE)
    spans = [Span(_zero_file(), 0, _PAGE)] * whole
    return [*spans, Span(_zero_file(), 0, rest)] if rest else spans


@cache
def _zero_file() -> int:
    fd = os.memfd_create("zeros", os.MFD_CLOEXEC)
    os.truncate(fd, _PAGE)
    return fd


async def _fill(
    store: ObjectStore,
    blobs: Sequence[Blob],
    parts: Sequence[_Part],
    view: memoryview,
    far: RemotePrefetcher,
) -> set[int]:
    """Read the parts into `view` and return the numbers of blobs that could not be read."""
    lost: set[int] = set()
    stored: list[_Part] = []
    wanted: list[tuple[Record, int, int]] = []
    for part in parts:
        blob = blobs[part.number]
        if blob.part is not None:
            if not await far.fill_range(
                part.number, part.offset, view[part.place : part.place + part.length]
            ):
                lost.add(part.number)
        elif blob.record is None:
            view[part.place : part.place + part.length] = blob.data[part.offset :][: part.length]
        else:
            stored.append(part)
            wanted.append((blob.record, blob.offset + part.offset, part.length))
    with store.open_spans_many(wanted) as places:
        runs: list[_Run] = []
        for part, spans in zip(stored, places, strict=True):
            if spans is None or not _plan(spans, part, view, runs):
                lost.add(part.number)
        later = [run for run in runs if not run.read(os.RWF_NOWAIT)]
        if later:
            lost |= await asyncio.to_thread(_read_all, later)
        for run in runs:
            run.views.clear()
    return lost


def _plan(spans: Sequence[Span], part: _Part, view: memoryview, runs: list[_Run]) -> bool:
    """Add a part to the runs. Returns False if its object is shorter than when it was looked up."""
    place, end = part.place, part.place + part.length
    for span in spans:
        piece = view[place : place + span.length]
        place += span.length
        if runs and runs[-1].joins(span):
            runs[-1].add(span, piece, part)
        else:
            runs.append(_Run(span.fd, span.offset, span.length, [piece], [part]))
    return place == end


def _read_all(runs: Sequence[_Run]) -> set[int]:
    """Read runs and return the blobs that cannot be read (blocking).

    A run that fails is read part by part. What cannot be read is logged once, however many parts it has.
    """
    unread: list[_Run] = []
    lost = _read_parts(runs, unread)
    if unread:
        first = unread[0]
        more = f", and {len(unread) - 1} more ranges" if len(unread) > 1 else ""
        _log.error("a data file cannot be read: %d bytes at %d%s", first.length, first.start, more)
    return lost


def _read_parts(runs: Sequence[_Run], unread: list[_Run]) -> set[int]:
    lost: set[int] = set()
    for run in runs:
        if run.read():
            continue
        if len(run.parts) == 1:
            unread.append(run)
            lost.add(run.parts[0].number)
            continue
        at = run.start
        parts = iter(run.parts)
        for piece in run.views:
            own = isinstance(piece, memoryview) and piece.obj is not _GAP
            if own:
                part = next(parts)
                single = _Run(run.fd, at, len(piece), [piece], [part])
                lost |= _read_parts([single], unread)
            at += len(piece)
    return lost


def _finish(blob: Blob, part: _Part, group: Group, sums: dict[int, int], *, lost: bool) -> None:
    """Add a part to its blob's checksum; at the end of the blob, compare it with the stored checksum."""
    number, piece = part.number, group.data[part.place : part.place + part.length]
    if lost:
        piece[:] = bytes(part.length)
        group.failed.append(number)
        return
    total = crc32c(piece, sums.pop(number, 0) if part.offset else 0)
    if part.offset + part.length < blob.length:
        sums[number] = total
        return
    group.sums[number] = total
    if _is_damaged(blob, total):
        metrics.store_corrupt_reads.inc()
        report_damaged_object(blob.record)
        _log.error("the stored bytes of %s are damaged and are not served; run meshd fsck", blob.name)
        piece[:] = bytes(part.length)
        group.failed.append(number)


def _is_damaged(blob: Blob, total: int) -> bool:
    """Return whether a blob of whole extents differs from its stored checksums."""
    record = blob.record
    if record is None:
        return False
    expected = stored_crc32c(record.extents, blob.offset, blob.length)
    return expected is not None and total != expected


def stored_crc32c(extents: Sequence[Extent], offset: int, length: int) -> int | None:
    """Return the stored checksum of these bytes of an object; None if they are not whole extents."""
    at, total, begun = 0, 0, False
    for extent in extents:
        if at == offset:
            total, begun = extent.crc32c, True
        elif begun:
            total = combine_crc32c(total, extent.crc32c, extent.length)
        at += extent.length
        if at >= offset + length:
            return total if begun and at == offset + length else None
    return None
