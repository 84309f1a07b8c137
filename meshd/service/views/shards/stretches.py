"""Stretches of a shard: bytes made here, and ranges of open files; put together they are what is sent.

Law: what is made, and small members, lie in shared memory, so that they are sent like a file's; large ones
lie where they are. Small members' checksums are compared on the way; the sum of a record is put together of
the extents' sums where those are known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from awscrt.checksums import combine_crc32c, crc32c

from meshd.store.errors import CorruptExtentError
from meshd.store.proving import Passing
from meshd.store.records import Span
from meshd.telemetry import metrics
from meshwire.tfrecords import masked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.records import Extent

_COPIED: Final = 64 << 10
"""Members up to here are copied beside their headers: one send for many instead of two for each."""
_READ: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes made here, ranges of open files (`extents`: what they are, where it is all of an object), or the
    bytes from `skip` of the masked sum of others."""

    spans: Sequence[Span] = ()
    length: int = 0
    data: bytes = b""
    extents: Sequence[Extent] = ()
    summed: Sequence[Stretch] = ()
    skip: int = 0

    @property
    def lies(self) -> bool:
        """Whether it is sent from where it lies."""
        return self.length > _COPIED and bool(self.spans)

    def read(self) -> bytes:
        """All of it (blocking). Raises CorruptExtentError."""
        if self.data:
            return self.data
        if self.summed:
            return masked(self._sum())[self.skip : self.skip + self.length]
        read, passing = [os.pread(span.fd, span.length, span.offset) for span in self.spans], Passing()
        for span, data in zip(self.spans, read, strict=True):
            if len(data) != span.length:
                raise _damaged(span)
            passing.take(span, data)
        return read[0] if len(read) == 1 else b"".join(read)

    def _sum(self) -> int:
        whole = 0
        for part in self.summed:
            whole = combine_crc32c(whole, part.crc(), part.length)
        return whole

    def crc(self) -> int:
        """CRC-32C (blocking where it is not known)."""
        whole = 0
        if self.extents:
            for extent in self.extents:
                whole = combine_crc32c(whole, extent.crc32c, extent.length)
            return whole
        if self.data:
            return int(crc32c(self.data))
        for span in self.spans:
            at, end = span.offset, span.offset + span.length
            while at < end:
                data = os.pread(span.fd, min(_READ, end - at), at)
                if not data:
                    raise _damaged(span)
                whole, at = crc32c(data, whole), at + len(data)
        return whole


def _damaged(span: Span) -> CorruptExtentError:
    metrics.store_corrupt_reads.inc()
    return CorruptExtentError("bytes of a member are missing; run meshd fsck", span.name)


class Scratch:
    """Bytes made here, in shared memory, so that they are sent like a file's; neighbours become one span."""

    def __init__(self) -> None:
        self._fd, self._size = -1, 0

    def __enter__(self) -> Scratch:
        self._fd = os.memfd_create("mesh-shard", os.MFD_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def assemble(self, parts: Sequence[Stretch]) -> Sequence[Span]:
        """The parts in order, small ones copied together (blocking)."""
        spans: list[Span] = []
        held: list[bytes] = []
        for part in parts:
            if part.lies:
                self._flush(spans, held)
                spans += part.spans
            else:
                held.append(part.read())
        self._flush(spans, held)
        return spans

    def _flush(self, spans: list[Span], held: list[bytes]) -> None:
        data = b"".join(held)
        held.clear()
        if data:
            os.pwrite(self._fd, data, self._size)
            spans.append(Span(self._fd, self._size, len(data)))
            self._size += len(data)
