"""The bytes of an object as a file that is read by offset (blocking: use it in a thread).

Law: `Ahead` is for headers, which lie close together; `pieces` for running through.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from meshd.service.archives.inflating import PIECE
from meshd.store.errors import DiskFailedError
from meshd.store.proving import Passing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.store.records import Span

_AHEAD: Final = 64 << 10


def read_spans(spans: Sequence[Span], offset: int, length: int) -> bytes:
    """At most `length` bytes, fewer only at the end. Raises DiskFailedError."""
    parts = []
    for span in spans:
        if length <= 0:
            break
        if offset >= span.length:
            offset -= span.length
            continue
        data = _pread(span.fd, min(length, span.length - offset), span.offset + offset)
        parts.append(data)
        length -= len(data)
        offset = 0
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _pread(fd: int, length: int, offset: int) -> bytes:
    try:
        data = os.pread(fd, length, offset)
    except OSError as error:
        raise DiskFailedError(f"a data file cannot be read: {error.strerror}") from error
    if len(data) != length:
        raise DiskFailedError("a data file ends before its extent does")
    return data


def pieces(spans: Sequence[Span], offset: int, length: int) -> Iterator[bytes]:
    """These bytes, at most 1 MiB at a time, extents that are among them compared. Raises DiskFailedError,
    CorruptExtentError."""
    passing = Passing()
    for span in spans:
        first, last = min(offset, span.length), min(offset + length, span.length)
        for at in range(first, last, PIECE):
            part = span.part(at, min(PIECE, last - at))
            data = _pread(part.fd, part.length, part.offset)
            passing.take(part, data)
            yield data
        offset, length = offset - first, length - (last - first)


class Ahead:
    """Reads by offset, and ahead: the headers of small members share a read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._start, self._data = 0, b""

    def __repr__(self) -> str:
        return f"<Ahead at {self._start}>"

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = read_spans(self._spans, offset, max(length, _AHEAD))
            self._start, begin = offset, 0
        return self._data[begin : begin + length]


class Forward:
    """Reads by offset, forwards only, what comes as a stream; what is passed over is gone."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)
        self._data, self._start = b"", 0  # the piece at hand, and where it begins

    def __repr__(self) -> str:
        return f"<Forward at {self._start}>"

    @property
    def seen(self) -> int:
        """Bytes of the stream that were met."""
        return self._start + len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end of the stream."""
        parts: list[bytes] = []
        while length > 0 and self._reach(offset):
            part = self._data[offset - self._start :][:length]
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drain(self) -> None:
        """Go to the end, where the checksum of the whole stands."""
        while self._reach(self.seen):
            pass

    def _reach(self, offset: int) -> bool:
        """Whether the stream goes as far as `offset`; the piece that holds it is then at hand."""
        if offset < self._start:
            raise ValueError("a stream is read forwards only")
        while offset >= self.seen:
            piece = next(self._stream, None)
            if piece is None:
                return False
            self._start, self._data = self.seen, piece
        return True
