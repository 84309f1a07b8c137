"""ReadSource: every way to an object's bytes, and the one failover between them.

Law: a reader gets exactly the bytes of its range, each once and in order, or an error. If a source cannot
give a byte, the next source continues with that byte. A source serves only the content it was made for: the
same version or the same ETag. Bytes that were sent are never sent again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn, Protocol

from meshd.errors import MeshdError
from meshd.store.errors import CorruptExtentError, DiskFailedError, ExtentGoneError
from meshd.store.integrity.verification import report_unsent_spans
from meshd.store.records import Span
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record

_log = logging.getLogger("meshd.disks")
_PIECE: Final = 1 << 20


class ReadLostError(MeshdError):
    """No source has the next byte of a read. If bytes were sent already, the connection must be cut."""


class ReadSource(Protocol):
    """One way to the bytes of one object: a disk of this node, a cache, another node, an origin, a view.

    Implementations derive from this class and override what differs.
    """

    label: ClassVar[str] = "whole"
    """The `result` of `meshd_reads_continued_total` if this source finishes a read that another began."""
    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of `open_range` after which the next source may be tried. Every other error ends the read."""

    def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        """Yields the bytes from `offset` as ranges of open files, a group at a time; each group is valid
        until the next is requested. May end before `length` bytes: this source has no more of them."""
        ...

    def mark_failed(self, offset: int) -> None:
        """Called when the byte at `offset` could not be read from this source."""
        return

    def close(self) -> None:
        """Called once, when the read ends."""
        return


class FailoverRead:
    """One read of `length` bytes from `offset`, over `sources` in order of preference.

    A source that fails is followed by the next one. A source that ends early, after it gave some bytes, is
    followed by the first one: the next bytes may be in a better place again. `name`: the object, for the
    log; a read with a name is counted and logged if it had to continue. `resumed`: an earlier source failed,
    and its bytes were sent; every error is then a ReadLostError.
    """

    def __init__(
        self,
        sources: Sequence[ReadSource],
        offset: int,
        length: int,
        name: str = "",
        *,
        resumed: bool = False,
    ) -> None:
        self._sources, self._at, self._end = sources, offset, offset + length
        self._name, self._resumed = name, resumed
        self._continued = resumed
        self._sent: int | None = None

    def __repr__(self) -> str:
        return f"<FailoverRead of {self._name!r}, {self._end - self._at} bytes left>"

    def record_truncation(self, sent: int) -> None:
        """Records that only the first `sent` bytes of the last group could be read. Must be called before the
        next group is requested, which then begins with the missing byte."""
        self._sent = sent

    async def groups(self) -> AsyncGenerator[Sequence[Span], None]:
        """Yields the bytes as ranges of open files; each group is valid until the next is requested. Raises
        ReadLostError, the last error of a source if all fail, and any other error of a source."""
        began, number, used = self._at, 0, self._sources[0] if self._sources else None
        lost: Exception = ReadLostError("no other source has it")
        try:
            while self._at < self._end and number < len(self._sources):
                source, start = self._sources[number], self._at
                try:
                    async with aclosing(source.open_range(self._at, self._end - self._at)) as groups:
                        async for spans in groups:
                            yield spans
                            self._advance(spans)
                except Exception as error:
                    if not isinstance(error, (_TruncatedError, *source.failures)):
                        self._raise(error)
                    self._continued = self._continued or not isinstance(error, ExtentGoneError)
                    source.mark_failed(self._at)
                    lost, number = error, number + 1
                else:
                    if number or self._resumed:
                        used = source
                    number = 0 if self._at > start else number + 1
            if self._at < self._end:
                self._raise(lost)
        finally:
            for source in self._sources:
                source.close()
            if self._continued and self._name:
                self._count(began, used if self._at == self._end else None, lost)

    def _raise(self, error: Exception) -> NoReturn:
        if self._resumed or isinstance(error, ReadLostError):
            raise ReadLostError(f"{self._name or 'an object'} from byte {self._at} on: {error}") from error
        raise error

    def _advance(self, spans: Sequence[Span]) -> None:
        """Counts a group that was sent. Raises _TruncatedError."""
        sent, self._sent = self._sent, None
        if sent is None:
            self._at += sum(span.length for span in spans)
            return
        report_unsent_spans(spans, sent)
        self._at += sent
        raise _TruncatedError("it cannot be read to its end")

    def _count(self, began: int, used: ReadSource | None, lost: Exception) -> None:
        metrics.reads_continued.labels("cut" if used is None else used.label).inc()
        extra = {"object": self._name, "from_byte": began}
        if used is None:
            _log.warning("a response was cut off", extra={**extra, "why": str(lost)})
        else:
            _log.warning("a response continued from another source", extra={**extra, "source": repr(used)})

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yields the bytes, read in a thread, at most 1 MiB at a time. Raises the same errors as `groups`."""
        async with aclosing(self.groups()) as groups:
            async for spans in groups:
                sent = 0
                for few in split_spans(spans, _PIECE):
                    data = await asyncio.shield(asyncio.to_thread(_read_readable, few))
                    if data:
                        yield data
                    sent += len(data)
                    if len(data) != sum(span.length for span in few):
                        self.record_truncation(sent)
                        break


class _TruncatedError(ReadLostError):
    """A file that was opened ends, or its device fails, before the range does."""


class GeneratedSource(ReadSource):
    """A source that is one function: `open_range(offset, length)`."""

    def __init__(self, open_range: Callable[[int, int], AsyncGenerator[Sequence[Span], None]]) -> None:
        self._open_range = open_range

    def __repr__(self) -> str:
        return f"<GeneratedSource {self._open_range!r}>"

    def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        return self._open_range(offset, length)


class LocalSource(ReadSource):
    """A stored object on the disks of this node."""

    failures = (ExtentGoneError, CorruptExtentError, DiskFailedError)

    def __init__(self, store: ObjectStore, record: Record) -> None:
        self._store, self._record = store, record

    def __repr__(self) -> str:
        return f"<LocalSource of {self._record.size} bytes>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        with self._store.open_spans(self._record, offset, length) as spans:
            yield spans


@contextmanager
def memory_spans(data: bytes) -> Iterator[Sequence[Span]]:
    """Bytes as a range of an open file in memory. The file is never written again: the kernel may still send
    its pages after the block ends."""
    fd = os.memfd_create("mesh-read", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        yield (Span(fd, 0, len(data)),)
    finally:
        os.close(fd)


def split_spans(spans: Iterable[Span], most: int) -> Iterator[list[Span]]:
    """Yields the spans in lists of at most `most` bytes; a large span is divided."""
    held: list[Span] = []
    room = most
    for span in spans:
        at = 0
        while at < span.length:
            length = min(span.length - at, room)
            held.append(span.sub_span(at, length))
            at, room = at + length, room - length
            if not room:
                yield held
                held, room = [], most
    if held:
        yield held


def _read_readable(spans: Sequence[Span]) -> bytes:
    """Returns the bytes of the spans up to the first that cannot be read (blocking)."""
    found = bytearray()
    for span in spans:
        try:
            data = os.pread(span.fd, span.length, span.offset)
        except OSError:
            break
        found += data
        if len(data) != span.length:
            break
    return bytes(found)
