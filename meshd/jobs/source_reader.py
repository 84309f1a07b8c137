"""Source reader: reads the files of a job's plan in groups of about a megabyte, locally or from peers.

Law: a source is read only while it matches the version pinned in the plan, and adjacent ranges are read
together. Invariant: memory is bounded by one group, independent of file and source sizes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import ObjectRange, ReadFailure
from meshd.jobs.scratch import scratch_prefix, unpacked_name
from meshd.peer_reads.replica_selection import missing_part_error
from meshd.store.disks.page_loader import places_by_disk
from meshd.store.errors import CorruptExtentError, ExtentGoneError, StoreError
from meshd.store.integrity.verification import StreamVerifier, damage_context, report_damage
from meshd.store.records import Span
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.peer_reads.peer_fetcher import FetchedParts
    from meshd.store.integrity.verification import VerifiedExtents
    from meshd.store.records import Location, Record
    from meshwire.jobs.job_plan import JobPlan

GROUP_BYTES: Final = 1 << 20
"""A group is read, hashed and written while it is in the processor's cache."""
_HELD: Final = 64
"""Sources that stay open between groups."""
_GAP: Final = 8 << 10
"""Bytes between two files of one object that are read and dropped rather than skipped."""
_IOV: Final = 900


class SourceRange(NamedTuple):
    """`length` bytes at `offset` of source number `source`, to be placed at `at` in the group's buffer."""

    at: int
    source: int
    offset: int
    length: int


class LocalSource:
    """The bytes of an object in open files. If read in order, they are verified per extent."""

    __slots__ = ("passing", "spans", "starts")

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = list(accumulate((span.length for span in spans), initial=0))
        self.passing = StreamVerifier()

    def span_at(self, offset: int) -> int:
        """Return the number of the span with the byte at `offset`."""
        return bisect_right(self.starts, offset) - 1

    def verify_in_order(self, offset: int, data: memoryview) -> None:
        """Verify bytes from `offset` on, for objects that are read in order (blocking).

        Raises CorruptExtentError.
        """
        while len(data):
            number = self.span_at(offset)
            span, inside = self.spans[number], offset - self.starts[number]
            part = span.sub_span(inside, min(len(data), span.length - inside))
            self.passing.verify_chunk(part, data[: part.length])
            data, offset = data[part.length :], offset + part.length

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, one after the other, from `offset` on (blocking). Raises CorruptExtentError."""
        length = sum(map(len, buffers))
        number = self.span_at(offset)
        if length and offset + length <= self.starts[min(number + 1, len(self.spans))]:
            span = self.spans[number]
            _fill(span.sub_span(offset - self.starts[number], length), buffers, length)
            return
        for buffer in buffers:
            offset = self._read_across(offset, buffer)

    def _read_across(self, offset: int, buffer: memoryview) -> int:
        """Fill one buffer from several extents; returns the offset where it ends."""
        while len(buffer):
            number = self.span_at(offset)
            if number >= len(self.spans):
                raise _unread(self.spans[-1], "the stored object is shorter than its record")
            span, inside = self.spans[number], offset - self.starts[number]
            taken = min(len(buffer), span.length - inside)
            _fill(span.sub_span(inside, taken), [buffer[:taken]], taken)
            buffer, offset = buffer[taken:], offset + taken
        return offset


class ReadableSource(Protocol):
    """A source's bytes; valid for the ranges it was opened for."""

    @property
    def spans(self) -> Sequence[Span]: ...

    def read_into(self, offset: int, buffers: list[memoryview]) -> None: ...

    def verify_in_order(self, offset: int, data: memoryview) -> None: ...


class FetchedSource:
    """Bytes of a source that came from another node, which verified them."""

    spans: Sequence[Span] = ()

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._places: dict[int, Location] = {}

    def __repr__(self) -> str:
        return f"<FetchedSource {len(self._places)} runs>"

    def add_run(self, offset: int, place: Location) -> None:
        """Add the fetched bytes at an offset of the source."""
        self._places[offset] = place

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers (blocking): see `LocalSource.read_into`."""
        length = sum(map(len, buffers))
        if length:
            _fill(Span(self._fd, self._places[offset].offset, length), buffers, length)

    def verify_in_order(self, offset: int, data: memoryview) -> None:
        """Do nothing: the bytes were verified where they are stored, and on arrival."""


class SourceReader:
    """Reads the sources of one plan and keeps some of them open. One per concurrent writer; close it.

    `proofs`: those of the job.
    """

    def __init__(self, tools: JobServices, running: JobRun, plan: JobPlan, proofs: VerifiedExtents) -> None:
        self._proofs, self._tools = proofs, tools
        self._store, self._bucket, self._plan = tools.store, running.spec.source.bucket, plan
        self._scratch = scratch_prefix(running)
        self._held: OrderedDict[int, tuple[AbstractContextManager[object], LocalSource]] = OrderedDict()
        self._memory = MemoryAccount()
        self._gathered: FetchedParts | None = None
        self._inflated: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<SourceReader of {self._plan!r}, {len(self._held)} open>"

    async def open_sources(self, pieces: Sequence[SourceRange]) -> dict[int, ReadableSource]:
        """Open the sources of these pieces, until the next call. Raises BatchError SnapshotChanged, Busy."""
        self._forget()
        found: dict[int, ReadableSource] = {}
        far: set[int] = set()
        for number in dict.fromkeys(piece.source for piece in pieces):
            here = self._open(number)
            if here is None:
                here = await self._open_inflated(number)
            if here is None:
                far.add(number)
            else:
                found[number] = here
        if far:
            found |= await self._fetch([run for run in _runs(pieces) if run[0].source in far])
        while len(self._held) > max(_HELD, len(found)):
            _, (context, _) = self._held.popitem(last=False)
            context.__exit__(None, None, None)
        return found

    async def verify_extents(self, pieces: Sequence[SourceRange], opened: dict[int, ReadableSource]) -> None:
        """Verify the extents that hold files in archives, because those are parts of extents, in any order.

        Raises CorruptExtentError.
        """
        wanted = {
            (piece.source, number) for piece in pieces for number in _numbers(opened[piece.source], piece)
        }
        await self._proofs.require_verified(
            [opened[source].spans[number].sub_span(0, 0) for source, number in wanted]
        )

    def places(self, source: int, offset: int, length: int) -> Mapping[int, list[Location]]:
        """Return where bytes of a source are on this node, by disk; nothing if they are elsewhere, or
        cannot be read (blocking)."""
        try:
            record = self._record(source)
            if record is None:
                return {}
            return places_by_disk(record, self._store.locate(record), offset, length)
        except (BatchError, StoreError):
            return {}

    def far_part(self, source: int, offset: int, length: int) -> ObjectRange:
        """Return the name of bytes of a source for other nodes."""
        return self._part([SourceRange(0, source, offset, length)])

    def close(self) -> None:
        self._forget()
        while self._held:
            _, (context, _) = self._held.popitem()
            context.__exit__(None, None, None)

    def _forget(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered.close()

    # --- local sources ----------------------------------------------------------------------------------

    def _open(self, number: int, record: Record | None = None) -> LocalSource | None:
        """Return an open source, None if only other nodes have it."""
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number][1]
        try:
            found = self._spans(number, record)
        except ExtentGoneError:  # moved by compaction
            found = self._spans(number, record)
        if found is None:
            return None
        self._held[number] = found[0], LocalSource(found[1])
        return self._held[number][1]

    def _spans(
        self, number: int, record: Record | None
    ) -> tuple[AbstractContextManager[object], Sequence[Span]] | None:
        record = record or self._record(number)
        if record is None:
            return None
        context = self._store.open_spans(record, 0, record.size)
        name = f"s3://{self._bucket}/{self._plan.sources.keys[number]}"
        with damage_context(name):
            return context, [span.with_name(name) for span in context.__enter__()]

    def _record(self, number: int) -> Record | None:
        sources, objects = self._plan.sources, self._tools.objects
        bucket, key, etag = self._bucket, sources.keys[number], sources.etags[number]
        if sources.unpacked[number]:
            name = self._scratch + unpacked_name(etag, int(sources.sizes[number]))
            record = self._store.get(RESERVED_BUCKET, name)
            # With its list, it was unpacked on this node; else a node with the archive decompresses it.
            if record is None and self._store.get(RESERVED_BUCKET, f"{name}.files") is not None:
                raise _changed_error(RESERVED_BUCKET, name, gone=True)
            return record
        record = objects.local_record(bucket, key, etag)
        if record is None and objects.is_local(bucket, key):
            present = self._store.get(bucket, key)
            if present is None or present.etag != etag:  # else damaged on this node: read from another owner
                raise _changed_error(bucket, key, gone=present is None)
        return record

    # --- sources on other nodes -------------------------------------------------------------------------

    async def _open_inflated(self, number: int) -> LocalSource | None:
        """Open the decompressed copy of an archive that this node has only received since the listing."""
        sources = self._plan.sources
        if not sources.unpacked[number]:
            return None
        bucket, key, etag = self._bucket, sources.keys[number], sources.etags[number]
        here = self._tools.objects.local_record(bucket, key, etag)
        if here is not None:
            return self._open(number, await self._tools.archives.decompressed(bucket, key, here))
        if number not in self._inflated:
            record = await self._tools.objects.find(bucket, key)
            if record is None or record.etag != etag:
                raise _changed_error(bucket, key, gone=record is None)
            self._inflated[number] = (await self._tools.archives.get_index(bucket, key, record)).size
        return None

    async def _fetch(self, runs: Sequence[Sequence[SourceRange]]) -> dict[int, ReadableSource]:
        """Fetch the bytes of these runs, with one call per node."""
        parts = [self._part(run) for run in runs]
        self._gathered = gathered = await self._tools.objects.fetch_parts(parts, self._memory, proven=True)
        found = {run[0].source: FetchedSource(gathered.fd) for run in runs}
        for run, part, place in zip(runs, parts, gathered.places, strict=True):
            if isinstance(place, ReadFailure):
                if place.code in ("NoSuchKey", "SnapshotChanged"):
                    raise _changed_error(part.bucket, part.key, gone=place.code == "NoSuchKey")
                raise missing_part_error(f"s3://{part.bucket}/{part.key}", place)
            found[run[0].source].add_run(run[0].offset, place)
        return dict(found)

    def _part(self, run: Sequence[SourceRange]) -> ObjectRange:
        sources, number = self._plan.sources, run[0].source
        size = self._inflated.get(number, int(sources.sizes[number]))
        start, end = run[0].offset, run[-1].offset + run[-1].length
        return ObjectRange(
            self._bucket, sources.keys[number], sources.etags[number], size, start, end - start
        )


def _changed_error(bucket: str, key: str, *, gone: bool) -> BatchError:
    return BatchError(
        "SnapshotChanged",
        f"s3://{bucket}/{key} was {'removed' if gone else 'replaced'} while the job ran",
        help="start the job again: it keeps the outputs written so far and uses the present source",
    )


def _numbers(opened: ReadableSource, piece: SourceRange) -> range:
    """Return the numbers of the spans with a piece."""
    if not isinstance(opened, LocalSource) or len(opened.spans) <= 1 or not piece.length:
        return range(min(len(opened.spans), piece.length))
    return range(opened.span_at(piece.offset), opened.span_at(piece.offset + piece.length - 1) + 1)


def verify_ranges(
    buffer: memoryview, pieces: Sequence[SourceRange], opened: dict[int, ReadableSource]
) -> None:
    """Verify whole objects that were read in order (blocking). Raises CorruptExtentError."""
    for piece in pieces:
        opened[piece.source].verify_in_order(piece.offset, buffer[piece.at : piece.at + piece.length])


def read_ranges(buffer: memoryview, pieces: Sequence[SourceRange], opened: dict[int, ReadableSource]) -> None:
    """Fill a group's buffer (blocking). Raises CorruptExtentError if bytes are missing."""
    scratch = memoryview(bytearray(_GAP))
    for run in _runs(pieces):
        buffers: list[memoryview] = []
        end = run[0].offset
        for piece in run:
            if piece.offset > end:
                buffers.append(scratch[: piece.offset - end])
            buffers.append(buffer[piece.at : piece.at + piece.length])
            end = piece.offset + piece.length
        opened[run[0].source].read_into(run[0].offset, buffers)


def _runs(pieces: Sequence[SourceRange]) -> Iterator[list[SourceRange]]:
    """Yield pieces that are read in one call: of one source, in order, with small gaps."""
    run: list[SourceRange] = []
    source = end = -1
    entries = 0
    for piece in pieces:
        gap = piece.offset - end
        if piece.source != source or not 0 <= gap <= _GAP or entries >= _IOV:
            if run:
                yield run
            run, source, entries = [], piece.source, 0
        run.append(piece)
        entries += 1 + (gap > 0)
        end = piece.offset + piece.length
    if run:
        yield run


def _fill(span: Span, buffers: list[memoryview], length: int) -> None:
    """Read `length` bytes of a span. Raises CorruptExtentError if the device cannot read them."""
    got = 0
    try:
        while got < length:
            more = os.preadv(span.fd, _after(buffers, got) if got else buffers, span.offset + got)
            if more == 0:
                raise _unread(span, "its data file ends too early")
            got += more
    except OSError as error:
        raise _unread(span, f"the device cannot read it ({error.strerror})") from error


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def _unread(span: Span, why: str) -> CorruptExtentError:
    """Count and report a damaged span, so that it is verified and quarantined; return the error."""
    metrics.store_corrupt_reads.inc()
    if span.extent is not None:
        report_damage(span.extent)
    return CorruptExtentError(f"{span.name or 'a source'} is damaged: {why}", span.name)
