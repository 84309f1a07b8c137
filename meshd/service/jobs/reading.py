"""The bytes of a job's files, read a few megabytes at a time.

Law: a source is read only while it is what the plan pinned. What lies together is read together.
Invariant: memory is a group's bytes, however large files and sources are.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import BatchError
from meshd.service.jobs.plans import scratch
from meshd.service.jobs.unpacking import unpacked_name
from meshd.store.errors import CorruptExtentError, ExtentGoneError
from meshd.store.proving import Passing
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from meshd.service.jobs.kinds import Running
    from meshd.store.interface import ObjectStore
    from meshd.store.proving import Proofs
    from meshd.store.records import Record, Span
    from meshwire.jobplans import JobPlan

GROUP: Final = 1 << 20
"""Read, hashed and written while it is in the processor's cache."""
_HELD: Final = 64
"""Sources that stay open between groups."""
_GAP: Final = 8 << 10
"""Bytes between two files of one object that are read and dropped rather than read around."""
_IOV: Final = 900


class Piece(NamedTuple):
    """`length` bytes at `offset` of source number `source` are to be put at `at` of the group's buffer."""

    at: int
    source: int
    offset: int
    length: int


class Opened:
    """An object's bytes in open files. Read in order, they are compared with the checksums of its extents."""

    __slots__ = ("passing", "spans", "starts")

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = list(accumulate((span.length for span in spans), initial=0))
        self.passing = Passing()

    def span_at(self, offset: int) -> int:
        """The number of the span that byte lies in."""
        return bisect_right(self.starts, offset) - 1

    def compare(self, offset: int, data: memoryview) -> None:
        """What was read from `offset` on, where objects are read in order (blocking). Raises
        CorruptExtentError."""
        while len(data):
            number = self.span_at(offset)
            span, inside = self.spans[number], offset - self.starts[number]
            part = span.part(inside, min(len(data), span.length - inside))
            self.passing.take(part, data[: part.length])
            data, offset = data[part.length :], offset + part.length

    def read(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers from `offset` on, one after the other (blocking). Raises CorruptExtentError."""
        length = sum(map(len, buffers))
        number = self.span_at(offset)
        if length and offset + length <= self.starts[min(number + 1, len(self.spans))]:
            span = self.spans[number]
            _fill(span.fd, span.offset + offset - self.starts[number], buffers, length)
            return
        for buffer in buffers:
            offset = self._read_across(offset, buffer)

    def _read_across(self, offset: int, buffer: memoryview) -> int:
        """One buffer, from several extents; where it ends."""
        while len(buffer):
            number = self.span_at(offset)
            if number >= len(self.spans):
                raise _short()
            span, inside = self.spans[number], offset - self.starts[number]
            taken = min(len(buffer), span.length - inside)
            _fill(span.fd, span.offset + inside, [buffer[:taken]], taken)
            buffer, offset = buffer[taken:], offset + taken
        return offset


class SourceReader:
    """Reads one plan's sources, and keeps some of them open. One a lane; close it. `proofs`: the job's."""

    def __init__(self, store: ObjectStore, running: Running, plan: JobPlan, proofs: Proofs) -> None:
        self._proofs = proofs
        self._store, self._bucket, self._plan = store, running.spec.source.bucket, plan
        self._scratch = scratch(running)
        self._held: OrderedDict[int, tuple[AbstractContextManager[object], Opened]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SourceReader of {self._plan!r}, {len(self._held)} open>"

    def opened(self, numbers: Collection[int]) -> dict[int, Opened]:
        """These sources; good until the next call. Raises BatchError SnapshotChanged."""
        found = {number: self._open(number) for number in numbers}
        while len(self._held) > max(_HELD, len(numbers)):
            _, (context, _) = self._held.popitem(last=False)
            context.__exit__(None, None, None)
        return found

    async def prove(self, pieces: Sequence[Piece], opened: dict[int, Opened]) -> None:
        """Files in archives are parts of extents, read in any order: what they lie in is read before. Raises
        CorruptExtentError."""
        wanted = {
            (piece.source, number) for piece in pieces for number in _numbers(opened[piece.source], piece)
        }
        await self._proofs.require([opened[source].spans[number].part(0, 0) for source, number in wanted])

    def close(self) -> None:
        while self._held:
            _, (context, _) = self._held.popitem()
            context.__exit__(None, None, None)

    def _open(self, number: int) -> Opened:
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number][1]
        try:
            context, spans = self._spans(number)
        except ExtentGoneError:  # moved by compaction
            context, spans = self._spans(number)
        self._held[number] = context, Opened(spans)
        return self._held[number][1]

    def _spans(self, number: int) -> tuple[AbstractContextManager[object], Sequence[Span]]:
        record = self._record(number)
        context = self._store.reading(record, 0, record.size)
        name = f"s3://{self._bucket}/{self._plan.sources.keys[number]}"
        return context, [span.named(name) for span in context.__enter__()]

    def _record(self, number: int) -> Record:
        sources = self._plan.sources
        bucket, key, etag = self._bucket, sources.keys[number], sources.etags[number]
        unpacked = bool(sources.unpacked[number])
        if unpacked:
            bucket, key = RESERVED_BUCKET, self._scratch + unpacked_name(etag, int(sources.sizes[number]))
        record = self._store.get(bucket, key)
        if record is None or (record.etag != etag and not unpacked):
            raise BatchError(
                "SnapshotChanged",
                f"s3://{bucket}/{key} was {'removed' if record is None else 'replaced'} while the job ran",
                help="start the job again: it keeps what is written and takes the source as it is now",
            )
        return record


def _numbers(opened: Opened, piece: Piece) -> range:
    """The spans a piece lies in."""
    if len(opened.spans) <= 1 or not piece.length:
        return range(min(len(opened.spans), piece.length))
    return range(opened.span_at(piece.offset), opened.span_at(piece.offset + piece.length - 1) + 1)


def compare_pieces(buffer: memoryview, pieces: Sequence[Piece], opened: dict[int, Opened]) -> None:
    """Whole objects that were read one after the other (blocking). Raises CorruptExtentError."""
    for piece in pieces:
        opened[piece.source].compare(piece.offset, buffer[piece.at : piece.at + piece.length])


def read_pieces(buffer: memoryview, pieces: Sequence[Piece], opened: dict[int, Opened]) -> None:
    """Fill a group's buffer (blocking). Raises CorruptExtentError when bytes are missing."""
    scratch = memoryview(bytearray(_GAP))
    run: list[memoryview] = []
    source = start = end = -1
    for piece in pieces:
        gap = piece.offset - end
        if piece.source != source or not 0 <= gap <= _GAP or len(run) >= _IOV:
            if run:
                opened[source].read(start, run)
            run, source, start = [], piece.source, piece.offset
        elif gap:
            run.append(scratch[:gap])
        run.append(buffer[piece.at : piece.at + piece.length])
        end = piece.offset + piece.length
    if run:
        opened[source].read(start, run)


def _fill(fd: int, offset: int, buffers: list[memoryview], length: int) -> None:
    got = os.preadv(fd, buffers, offset)
    while got < length:
        rest = _after(buffers, got)
        more = os.preadv(fd, rest, offset + got)
        if more == 0:
            raise _short()
        got += more


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def _short() -> CorruptExtentError:
    metrics.store_corrupt_reads.inc()
    return CorruptExtentError("a source is shorter than its record; run meshd fsck and restore the object")
