"""Checksum verification of extents in transit, and reports of the damage that readers find.

Law: an extent that is copied whole is verified while it streams (`StreamVerifier`); an extent of which
only a part is needed is read whole beforehand, once per copy or job (`VerifiedExtents`). Memory is
bounded by one chunk. A reader that meets damaged bytes calls `report_damage` and fails; it does not
wait for the quarantine. The list of reports is bounded; the scrub finds the rest.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from awscrt.checksums import combine_crc32c, crc32c

from meshd.store.errors import CorruptExtentError, DiskFailedError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from meshd.store.records import Extent, Record, Span
    from meshd.store.writer_api import Buffer
    from meshd.util.clock import Clock


MAX_REPORTS: Final = 10_000
_reports: Final[dict[Extent, None]] = {}


def report_damage(extent: Extent) -> None:
    """Reports an extent whose bytes could not be read as they were written. Thread-safe."""
    if len(_reports) < MAX_REPORTS:
        _reports[extent] = None


def report_damaged_object(record: Record | None) -> None:
    """Reports all extents of an object, so that they are verified: some of its bytes could not be read."""
    for extent in () if record is None else record.extents:
        report_damage(extent)


def report_unsent_spans(spans: Sequence[Span], sent: int) -> None:
    """Reports the first extent whose bytes were not sent, given that `sent` bytes were."""
    for span in spans:
        if sent < span.length:
            if span.extent is not None:
                report_damage(span.extent)
            return
        sent -= span.length


def drain_damage_reports(wanted: Callable[[Extent], bool]) -> list[Extent]:
    """Removes and returns the reports that `wanted` accepts."""
    found = [extent for extent in list(_reports) if wanted(extent)]
    for extent in found:
        _reports.pop(extent, None)
    return found


_PIECE: Final = 1 << 20
_KNOWN: Final = 100_000
_REMEMBERED_SECONDS: Final = 600.0


def covers_whole_extent(span: Span) -> bool:
    """Returns True if the span needs no separate verification: it is a whole extent, or no extent is
    known."""
    return span.extent is None or span.length == span.extent.length


def damage_error(extent: Extent) -> CorruptExtentError:
    """Counts and reports the damage; returns an error without the object's name, which `damage_context`
    adds."""
    metrics.store_corrupt_reads.inc()
    report_damage(extent)
    return CorruptExtentError(
        f"{extent.length} bytes at {extent.offset} of data file {extent.file:x} are damaged; "
        "run meshd fsck and restore the object"
    )


@contextmanager
def damage_context(name: str) -> Iterator[None]:
    """Adds the object's name to damage errors raised inside the block."""
    try:
        yield
    except CorruptExtentError as error:
        error.name = error.name or name
        raise


class StreamVerifier:
    """Verifies one stream: every extent that passes completely is compared with its checksum."""

    def __init__(self) -> None:
        self._extent: Extent | None = None
        self._next = self._crc = 0

    def __repr__(self) -> str:
        return f"<StreamVerifier at {self._next} of {self._extent}>"

    def verify_chunk(self, span: Span, data: Buffer) -> int:
        """Verifies a chunk, the bytes of `span` (blocking), and returns its crc32c for reuse. Raises
        CorruptExtentError."""
        extent, crc = span.extent, int(crc32c(data))
        if extent is None:
            return crc
        if span.offset == extent.offset:
            self._extent, self._crc = extent, crc
        elif self._extent == extent and span.offset == self._next:
            self._crc = combine_crc32c(self._crc, crc, len(data))
        else:
            self._extent = None
            return crc
        self._next = span.offset + len(data)
        if self._next == extent.offset + extent.length:
            self._extent = None
            if self._crc != extent.crc32c:
                with damage_context(span.name):
                    raise damage_error(extent)
        return crc


def read_spans(spans: Sequence[Span], verifier: StreamVerifier, crc: int = 0) -> tuple[bytes, int]:
    """Returns the bytes of open spans, joined and verified, and `crc` continued over them (blocking). Raises
    CorruptExtentError, DiskFailedError."""
    read = []
    for span in spans:
        data = _read_span(span)
        crc = combine_crc32c(crc, verifier.verify_chunk(span, data), len(data))
        read.append(data)
    return read[0] if len(read) == 1 else b"".join(read), crc


async def read_chunks(spans: Iterable[Span], most: int = _PIECE) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of open spans, at most `most` at a time, read in a thread and verified: what they are
    for is in order only if this ends. Raises CorruptExtentError, DiskFailedError."""
    verifier = StreamVerifier()
    for span in spans:
        for at in range(0, span.length, most):
            part = span.sub_span(at, min(most, span.length - at))
            data, _ = await asyncio.shield(asyncio.to_thread(read_spans, (part,), verifier))
            yield data


def _read_span(span: Span) -> bytes:
    try:
        data = os.pread(span.fd, span.length, span.offset)
    except OSError as error:
        if span.extent is not None:
            report_damage(span.extent)
        raise DiskFailedError(f"the disk failed: {error.strerror}") from error
    if len(data) != span.length:
        with damage_context(span.name):
            if span.extent is not None:
                raise damage_error(span.extent)
            metrics.store_corrupt_reads.inc()
            raise CorruptExtentError("bytes of a member are missing; run meshd fsck")
    return data


class VerifiedExtents:
    """The extents that one copy or job has verified."""

    def __init__(self) -> None:
        self._known: set[Extent] = set()
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<VerifiedExtents {len(self._known)}>"

    async def require_verified(self, spans: Iterable[Span]) -> None:
        """Reads and verifies the extents of these open spans, unless they are whole extents. Raises
        CorruptExtentError."""
        for span in spans:
            if span.extent is not None and not covers_whole_extent(span) and span.extent not in self._known:
                async with self._lock:
                    await self._verify(span, span.extent)

    async def _verify(self, span: Span, extent: Extent) -> None:
        if extent in self._known:
            return
        # The thread gets its own descriptor: a cancelled caller closes the span's.
        await asyncio.shield(asyncio.to_thread(_compare, os.dup(span.fd), extent, span.name))
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known.add(extent)


class ExpiringVerifiedExtents:
    """Verified extents of a process that runs job after job, forgotten every ten minutes: verified data may
    rot later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._verified, self._since = VerifiedExtents(), clock.monotonic()

    def __repr__(self) -> str:
        return f"<ExpiringVerifiedExtents {self._verified!r}>"

    def current(self) -> VerifiedExtents:
        """Returns the set to use for one job."""
        if self._clock.monotonic() - self._since > _REMEMBERED_SECONDS:
            self._verified, self._since = VerifiedExtents(), self._clock.monotonic()
        return self._verified


async def verify_extents(spans: Iterable[Span], name: str) -> None:
    """Reads and verifies all extents of these open spans. Raises CorruptExtentError."""
    with damage_context(name):
        await VerifiedExtents().require_verified([span.sub_span(0, 0) for span in spans])


def _compare(fd: int, extent: Extent, name: str) -> None:
    try:
        crc, at, end = 0, extent.offset, extent.offset + extent.length
        buffer = bytearray(min(_PIECE, extent.length))
        while at < end:
            view = memoryview(buffer)[: end - at]
            got = os.preadv(fd, [view], at)
            if got == 0:
                break
            crc, at = crc32c(view[:got], crc), at + got
    except OSError:  # a read error counts as damage
        pass
    finally:
        os.close(fd)
    if at < end or crc != extent.crc32c:
        with damage_context(name):
            raise damage_error(extent)
