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

from meshd.store.errors import CorruptExtentError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshd.store.api import Buffer
    from meshd.store.records import Extent, Span
    from meshd.util.clock import Clock


MAX_REPORTS: Final = 10_000
_reports: Final[dict[Extent, None]] = {}


def report_damage(extent: Extent) -> None:
    """Its bytes could not be had as they were written (any thread)."""
    if len(_reports) < MAX_REPORTS:
        _reports[extent] = None


def report_unsent_spans(spans: Sequence[Span], sent: int) -> None:
    """The bytes behind the first `sent` of these could not be had."""
    for span in spans:
        if sent < span.length:
            if span.extent is not None:
                report_damage(span.extent)
            return
        sent -= span.length


def drain_damage_reports(wanted: Callable[[Extent], bool]) -> list[Extent]:
    """Those of a store, no longer remembered."""
    found = [extent for extent in list(_reports) if wanted(extent)]
    for extent in found:
        _reports.pop(extent, None)
    return found


_PIECE: Final = 1 << 20
_KNOWN: Final = 100_000


def covers_whole_extent(span: Span) -> bool:
    """Whether nothing is left to prove once the span has passed: it is all of its extent, or of none."""
    return span.extent is None or span.length == span.extent.length


def damage_error(extent: Extent) -> CorruptExtentError:
    """Counted and noticed, and without a name: see `naming`."""
    metrics.store_corrupt_reads.inc()
    report_damage(extent)
    return CorruptExtentError(
        f"{extent.length} bytes at {extent.offset} of data file {extent.file:x} are damaged; "
        "run meshd fsck and restore the object"
    )


@contextmanager
def damage_context(name: str) -> Iterator[None]:
    """Within it, damage that has no name yet is of the object called `name`."""
    try:
        yield
    except CorruptExtentError as error:
        error.name = error.name or name
        raise


class StreamVerifier:
    """One stream: every extent that passes from its first byte to its last is compared at its end."""

    def __init__(self) -> None:
        self._extent: Extent | None = None
        self._next = self._crc = 0

    def __repr__(self) -> str:
        return f"<Passing at {self._next} of {self._extent}>"

    def verify_chunk(self, span: Span, data: Buffer) -> int:
        """`data` are the span's bytes (blocking); their crc32c, so that nobody need work it out again. Raises
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


class VerifiedExtents:
    """The extents that one copy or job has found sound."""

    def __init__(self) -> None:
        self._known: set[Extent] = set()
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Proofs of {len(self._known)} extents>"

    async def require_verified(self, spans: Iterable[Span]) -> None:
        """Read the extents that these open spans are parts of. Raises CorruptExtentError."""
        for span in spans:
            if span.extent is not None and not covers_whole_extent(span) and span.extent not in self._known:
                async with self._turn:
                    await self._prove(span, span.extent)

    async def _prove(self, span: Span, extent: Extent) -> None:
        if extent in self._known:
            return
        # A descriptor of the thread's own: a caller that is cancelled closes the span's.
        await asyncio.shield(asyncio.to_thread(_compare, os.dup(span.fd), extent, span.name))
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known.add(extent)


class ExpiringVerifiedExtents:
    """Those of a process that proves for others, job after job: made anew every `seconds`, for what was sound
    then may have rotted."""

    def __init__(self, clock: Clock, seconds: float = 600.0) -> None:
        self._clock, self._seconds = clock, seconds
        self._proofs, self._since = VerifiedExtents(), clock.monotonic()

    def __repr__(self) -> str:
        return f"<LateProofs {self._proofs!r}>"

    def current(self) -> VerifiedExtents:
        """Good for one use."""
        if self._clock.monotonic() - self._since > self._seconds:
            self._proofs, self._since = VerifiedExtents(), self._clock.monotonic()
        return self._proofs


async def verify_extents(spans: Iterable[Span], name: str) -> None:
    """Read all extents that these open spans lie in. Raises CorruptExtentError."""
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
    except OSError:  # what the device cannot read is damage like any other
        pass
    finally:
        os.close(fd)
    if at < end or crc != extent.crc32c:
        with damage_context(name):
            raise damage_error(extent)
