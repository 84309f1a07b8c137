"""Reads archive bytes: by offset, forward only, in one sequential pass, or as an asynchronous stream.

Law: memory is bounded by a piece and the codec, whatever the archive claims. The asynchronous stream
reads ahead by about one megabyte in a thread; everything else here blocks. Invariant: a file is yielded
whole, or ArchiveError or TarError ends the pass.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.core.api_errors import BatchError
from meshd.datasets.archives.decompression import PIECE, decompress, decompress_member
from meshd.store.errors import DiskFailedError
from meshd.store.integrity.verification import StreamVerifier, damage_context, verify_extents
from meshwire.dataset.archive_index import FILE_TYPES
from meshwire.dataset.archive_keys import ArchiveError
from meshwire.formats.tar import TarError, scan_tar
from meshwire.formats.zip_archive import STORED, scan_zip

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.dataset.archive_keys import ArchiveKind
    from meshwire.formats.tar import TarMember
    from meshwire.formats.zip_archive import ZipMember


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


def span_pieces(spans: Sequence[Span], offset: int, length: int) -> Iterator[bytes]:
    """These bytes, at most 1 MiB at a time, extents that are among them compared. Raises DiskFailedError,
    CorruptExtentError."""
    passing = StreamVerifier()
    for span in spans:
        first, last = min(offset, span.length), min(offset + length, span.length)
        for at in range(first, last, PIECE):
            part = span.sub_span(at, min(PIECE, last - at))
            data = _pread(part.fd, part.length, part.offset)
            passing.verify_chunk(part, data)
            yield data
        offset, length = offset - first, length - (last - first)


class BufferedSpanReader:
    """Reads by offset, and ahead: the headers of small members share a read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._start, self._data = 0, b""

    def __repr__(self) -> str:
        return f"<Ahead at {self._start}>"

    def read_at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = read_spans(self._spans, offset, max(length, _AHEAD))
            self._start, begin = offset, 0
        return self._data[begin : begin + length]


class ForwardReader:
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

    def read_at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end of the stream."""
        parts: list[bytes] = []
        while length > 0 and self._reach(offset):
            part = self._data[offset - self._start :][:length]
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip_to_end(self) -> None:
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


MAX_MEMBERS: Final = 10_000_000
_MAX_NAMES: Final = 1 << 30
_FEW, _FEW_NAMES = 500_000, 64 << 20
_PACKED: Final = 8
"""Beyond the first few: bytes that a member takes at least, compressed; bytes of a name for each of them."""
SCATTERED: Final = ("tar", "zip", "parquet")
"""Read here and there, not from the first byte to the last."""
UNLIMITED: Final = 1 << 60  # the end of a stream whose end is not known


class DecompressedSizeError(ArchiveError):
    """Inflated, an archive has more than `most` bytes, the limit for one of its size."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"inflated it has more than {most} bytes, this node's limit for an archive of its size; store it "
            "less compressed or as a plain tar, or have --archive-ratio raised"
        )
        self.most = most


class MemberStart(NamedTuple):
    """A file begins: `size` bytes follow, as pieces."""

    name: str
    size: int


WalkEvent = MemberStart | bytes


def walk(kind: ArchiveKind, spans: Sequence[Span], size: int, most: int) -> Iterator[WalkEvent]:
    """The files of an archive of `size` bytes; inflated it may have `most`. Raises ArchiveError, TarError."""
    if kind == "zip":
        yield from _walk_zip(spans, size, most)
    elif kind == "tar":
        yield from walk_tar(BufferedSpanReader(spans), size)
    else:
        source = ForwardReader(limit_bytes(decompress(kind, span_pieces(spans, 0, size)), most))
        yield from walk_tar(source, UNLIMITED)
        source.skip_to_end()


def walk_tar(source: BufferedSpanReader | ForwardReader, end: int) -> Iterator[WalkEvent]:
    """The files of a tar that is read by offset."""
    for member in limit_members(scan_tar(source.read_at, 0, end)):
        if member.type not in FILE_TYPES:
            continue
        yield MemberStart(member.name, member.size)
        for at in range(0, member.size, PIECE):
            length = min(PIECE, member.size - at)
            data = source.read_at(member.data_offset + at, length)
            if len(data) != length:
                raise TarError("the file ends inside a member", member.start)
            yield data


def _walk_zip(spans: Sequence[Span], size: int, most: int) -> Iterator[WalkEvent]:
    for member in zip_files(spans, size, most):
        yield MemberStart(member.name, member.size)
        yield from member_pieces(spans, member)


def zip_files(spans: Sequence[Span], size: int, most: int) -> list[ZipMember]:
    """The files of a zip, in order of place. Raises ArchiveError, also for more than `most` bytes of them."""
    members = [each for each in scan_zip(BufferedSpanReader(spans).read_at, size) if each.type == "0"]
    if len(members) > MAX_MEMBERS:
        raise ArchiveError(f"more than {MAX_MEMBERS} members")
    total = sum(member.size for member in members)
    if total > most:
        raise DecompressedSizeError(most)
    return members


def member_pieces(spans: Sequence[Span], member: ZipMember) -> Iterator[bytes]:
    """A zip member's bytes. Raises ArchiveError."""
    packed = span_pieces(spans, member.data_offset, member.packed)
    if member.method == STORED:
        return packed
    return decompress_member(packed, member.size, member.crc32, member.name)


def limit_bytes(stream: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The stream, as long as it has at most `most` bytes. Raises ArchiveError."""
    left = most
    for piece in stream:
        left -= len(piece)
        if left < 0:
            raise DecompressedSizeError(most)
        yield piece


def plausible_members(members: Iterable[TarMember], packed: int) -> Iterator[TarMember]:
    """The members of a tar that is stored in `packed` bytes, compressed or not: as many, and names as long,
    as may be kept in memory for an archive of this size. Raises TarError."""
    names = min(_MAX_NAMES, _FEW_NAMES + _PACKED * packed)
    for number, member in enumerate(limit_members(members)):
        names -= len(member.name)
        if names < 0 or number >= _FEW + packed // _PACKED:
            raise TarError(
                f"more members, or longer names, than are believed of {packed} bytes", member.start
            )
        yield member


def limit_members(members: Iterable[TarMember]) -> Iterator[TarMember]:
    """The members, as long as there are not too many. Raises TarError."""
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise TarError(f"more than {MAX_MEMBERS} members", member.start)
        yield member


_BYTES: Final = 1 << 20
_EVENTS: Final = 1000


class StreamedFile(NamedTuple):
    """A file: exactly `size` bytes come out of `pieces`, of which each has at most 1 MiB."""

    name: str
    size: int
    pieces: AsyncIterator[bytes]


async def stream_files(
    store: ObjectStore, kind: ArchiveKind, record: Record, url: str, most: int
) -> AsyncGenerator[StreamedFile, None]:
    """See `Archives.stream`."""
    with store.open_spans(record, 0, record.size) as spans:
        if kind in SCATTERED:
            await verify_extents(spans, url)
        source = _Source(walk(kind, spans, record.size, most), url, spans)
        while True:
            event = await source.next_event()
            if event is None:
                return
            if isinstance(event, MemberStart):
                yield StreamedFile(event.name, event.size, source.pieces())


class _Source:
    def __init__(self, events: Iterator[WalkEvent], url: str, spans: Sequence[Span]) -> None:
        self._events, self._url, self._spans = events, url, spans
        self._ready: deque[WalkEvent] = deque()

    async def next_event(self) -> WalkEvent | None:
        """The next event, None at the end. Raises BatchError BadSample, CorruptExtentError."""
        if not self._ready:
            try:
                with damage_context(self._url):
                    self._ready.extend(await asyncio.to_thread(self._fetch))
            except (ArchiveError, TarError) as error:
                await verify_extents(self._spans, self._url)  # damaged here, or stored so?
                raise BatchError(
                    "BadSample",
                    f"{self._url} cannot be read as an archive: {error}",
                    help="write it again",
                    detail={"url": self._url},
                ) from error
        return self._ready.popleft() if self._ready else None

    def _fetch(self) -> list[WalkEvent]:
        found: list[WalkEvent] = []
        room = _BYTES
        for event in self._events:
            found.append(event)
            room -= len(event.name if isinstance(event, MemberStart) else event)
            if room <= 0 or len(found) >= _EVENTS:
                break
        return found

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is left of the file that began last."""
        while True:
            event = await self.next_event()
            if event is None:
                return
            if isinstance(event, MemberStart):
                self._ready.appendleft(event)
                return
            yield event
