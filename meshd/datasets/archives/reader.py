"""Reads archives: by offset, forward only, in one sequential pass, or as an asynchronous stream.

It also makes the index of an archive and the bytes of its decompressed copy.

Law: memory is bounded by a piece and the codec, whatever the archive claims. The asynchronous stream
reads ahead by about one megabyte in a thread; everything else here blocks. Invariant: a file is yielded
whole, or ArchiveError or TarError ends the pass.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.core.api_errors import BatchError
from meshd.datasets.archives.decompression import PIECE, decompress, decompress_member
from meshd.store.errors import DiskFailedError
from meshd.store.integrity.verification import StreamVerifier, damage_context, verify_extents
from meshd.transform.parquet.client import ParquetError, parquet_rows
from meshwire.dataset.archive_index import FILE_TYPES, ArchiveIndex, index_tar
from meshwire.dataset.archive_paths import ArchiveError, slices_of
from meshwire.formats.tar import TarError, scan_tar
from meshwire.formats.zip_archive import STORED, scan_zip

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.dataset.archive_paths import ArchiveKind, CopyKind
    from meshwire.formats.tar import TarMember
    from meshwire.formats.zip_archive import ZipMember


_AHEAD: Final = 64 << 10


def read_spans(spans: Sequence[Span], offset: int, length: int) -> bytes:
    """Read at most `length` bytes, fewer only at the end. Raises DiskFailedError."""
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
        raise DiskFailedError("a data file ends before the end of an extent")
    return data


def span_pieces(spans: Sequence[Span], offset: int, length: int) -> Iterator[bytes]:
    """Yield these bytes, at most 1 MiB at a time, and verify the extents that are completely among them.

    Raises DiskFailedError, CorruptExtentError.
    """
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
    """Reads by offset with read-ahead: the headers of small members share a read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._start, self._data = 0, b""

    def __repr__(self) -> str:
        return f"<BufferedSpanReader at {self._start}>"

    def read_at(self, offset: int, length: int) -> bytes:
        """Read at most `length` bytes, fewer only at the end."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = read_spans(self._spans, offset, max(length, _AHEAD))
            self._start, begin = offset, 0
        return self._data[begin : begin + length]


class ForwardReader:
    """Reads a stream by ascending offsets; skipped bytes are lost."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)
        self._data, self._start = b"", 0  # the current piece, and its offset

    def __repr__(self) -> str:
        return f"<ForwardReader at {self._start}>"

    @property
    def seen(self) -> int:
        """The number of bytes of the stream that were received."""
        return self._start + len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        """Read at most `length` bytes, fewer only at the end of the stream."""
        parts: list[bytes] = []
        while length > 0 and self._reach(offset):
            part = self._data[offset - self._start :][:length]
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def skip_to_end(self) -> None:
        """Read to the end, where the checksum of the whole stream is verified."""
        while self._reach(self.seen):
            pass

    def _reach(self, offset: int) -> bool:
        """Advance to the piece with `offset`. Returns False if the stream ends before."""
        if offset < self._start:
            raise ValueError("a stream is read in ascending order only")
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
"""Above the first few: minimum compressed bytes per member, and bytes of names per byte of the archive."""
SCATTERED: Final = ("tar", "zip", "parquet", "table")
"""Kinds that are read by offset, not from the first byte to the last."""
UNLIMITED: Final = 1 << 60  # the end of a stream of unknown length


class DecompressedSizeError(ArchiveError):
    """Decompressed, an archive has more than `most` bytes, the limit for an archive of its size."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"decompressed, it has more than {most} bytes, this node's limit for an archive of its size; "
            "store it less compressed or as a plain tar, or raise --archive-ratio"
        )
        self.most = most


class MemberStart(NamedTuple):
    """The start of a file: `size` bytes follow as pieces."""

    name: str
    size: int


WalkEvent = MemberStart | bytes


def walk(kind: ArchiveKind, spans: Sequence[Span], size: int, most: int) -> Iterator[WalkEvent]:
    """Yield the files of an archive of `size` bytes that may have `most` bytes decompressed.

    Raises ArchiveError, TarError.
    """
    if kind == "zip":
        yield from _walk_zip(spans, size, most)
    elif kind == "tar":
        yield from walk_tar(BufferedSpanReader(spans), size)
    else:
        source = ForwardReader(limit_bytes(decompress(kind, span_pieces(spans, 0, size)), most))
        yield from walk_tar(source, UNLIMITED)
        source.skip_to_end()


def walk_tar(source: BufferedSpanReader | ForwardReader, end: int) -> Iterator[WalkEvent]:
    """Yield the files of a tar that is read by offset."""
    for member in limit_members(scan_tar(source.read_at, 0, end)):
        if member.type not in FILE_TYPES:
            continue
        yield MemberStart(member.name, member.size)
        for at in range(0, member.size, PIECE):
            length = min(PIECE, member.size - at)
            data = source.read_at(member.data_offset + at, length)
            if len(data) != length:
                raise TarError("the archive ends inside a member", member.start)
            yield data


def _walk_zip(spans: Sequence[Span], size: int, most: int) -> Iterator[WalkEvent]:
    for member in zip_files(spans, size, most):
        yield MemberStart(member.name, member.size)
        yield from member_pieces(spans, member)


def zip_files(spans: Sequence[Span], size: int, most: int) -> list[ZipMember]:
    """Return the files of a zip by offset. Raises ArchiveError, also if they have more than `most` bytes."""
    members = [each for each in scan_zip(BufferedSpanReader(spans).read_at, size) if each.type == "0"]
    if len(members) > MAX_MEMBERS:
        raise ArchiveError(f"more than {MAX_MEMBERS} members")
    total = sum(member.size for member in members)
    if total > most:
        raise DecompressedSizeError(most)
    return members


def member_pieces(spans: Sequence[Span], member: ZipMember) -> Iterator[bytes]:
    """Yield the bytes of a zip member. Raises ArchiveError."""
    packed = span_pieces(spans, member.data_offset, member.packed)
    if member.method == STORED:
        return packed
    return decompress_member(packed, member.size, member.crc32, member.name)


def limit_bytes(stream: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Yield the stream, up to `most` bytes. Raises ArchiveError if it has more."""
    left = most
    for piece in stream:
        left -= len(piece)
        if left < 0:
            raise DecompressedSizeError(most)
        yield piece


def plausible_members(members: Iterable[TarMember], packed: int) -> Iterator[TarMember]:
    """Yield the members of a tar that is stored in `packed` bytes, compressed or not.

    Raises TarError for more members or longer names than may be kept in memory for an archive of this size.
    """
    names = min(_MAX_NAMES, _FEW_NAMES + _PACKED * packed)
    for number, member in enumerate(limit_members(members)):
        names -= len(member.name)
        if names < 0 or number >= _FEW + packed // _PACKED:
            raise TarError(f"more members, or longer names, than are allowed in {packed} bytes", member.start)
        yield member


def limit_members(members: Iterable[TarMember]) -> Iterator[TarMember]:
    """Yield the members. Raises TarError if there are too many."""
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise TarError(f"more than {MAX_MEMBERS} members", member.start)
        yield member


def index_tar_archive(kind: ArchiveKind, spans: Iterable[Span], size: int, packed: int) -> ArchiveIndex:
    """Index a tar by its headers alone (blocking). Raises TarError."""
    members = plausible_members(scan_tar(BufferedSpanReader(list(spans)).read_at, 0, size), packed)
    return ArchiveIndex(kind, index_tar(members), size, inflated=kind != "tar")


def index_compressed_tar(kind: ArchiveKind, spans: Iterable[Span], size: int, most: int) -> ArchiveIndex:
    """Index a compressed tar without keeping a copy (blocking). Raises ArchiveError, TarError."""
    source = ForwardReader(limit_bytes(decompress(kind, span_pieces(list(spans), 0, size)), most))
    files = index_tar(plausible_members(scan_tar(source.read_at, 0, UNLIMITED), size))
    source.skip_to_end()
    return ArchiveIndex(kind, files, source.seen, inflated=True)


class _Copied(NamedTuple):
    """A member of a zip's copy, as input of the index."""

    name: str
    size: int
    data_offset: int
    type: str = "0"


def index_zip_members(members: list[ZipMember], size: int) -> ArchiveIndex:
    """Return the index of a zip: with offsets in the zip if all its files are stored, else in its copy."""
    if all(member.method == STORED for member in members):
        return ArchiveIndex("zip", index_tar(members), size, inflated=False)
    at, found = 0, []
    for member in members:
        found.append(_Copied(member.name, member.size, at))
        at += member.size
    # One extra byte if the copy is as large as the archive: a snapshot tells the two apart by their size.
    return ArchiveIndex("zip", index_tar(found), at + (at == size), inflated=True)


def inflate_members(spans: Sequence[Span], members: Iterable[ZipMember]) -> None:
    """Decompress every member to verify it (blocking). Raises ArchiveError if one is damaged."""
    for member in members:
        for _ in member_pieces(spans, member):
            pass


def decompressed_pieces(kind: CopyKind, spans: Iterable[Span], size: int, most: int) -> Iterator[bytes]:
    """Yield the decompressed copy of a file in pieces (blocking). Raises ArchiveError, UnreadableError."""
    spans = list(spans)
    if slices_of(kind)[0] in ("parquet", "table"):
        yield from limit_bytes(_rows(spans, size, "rows" if kind == "parquet" else kind), most)
        return
    if kind != "zip":
        yield from limit_bytes(decompress(kind, span_pieces(spans, 0, size)), most)
        return
    members = zip_files(spans, size, most)
    for member in members:
        yield from member_pieces(spans, member)
    if sum(member.size for member in members) == size:  # see `index_zip_members`
        yield b"\0"


def _rows(spans: Sequence[Span], size: int, kind: str) -> Iterator[bytes]:
    """Yield the rows of a Parquet file, or the records of (slices of) a table. Raises
    ArchiveError, UnreadableError."""
    try:
        yield from parquet_rows(partial(read_spans, spans), size, kind=kind)
    except ParquetError as error:
        raise ArchiveError(str(error)) from error


_BYTES: Final = 1 << 20
_EVENTS: Final = 1000


class StreamedFile(NamedTuple):
    """A file: `pieces` yields exactly `size` bytes in pieces of at most 1 MiB."""

    name: str
    size: int
    pieces: AsyncIterator[bytes]


async def stream_files(
    store: ObjectStore, kind: ArchiveKind, record: Record, url: str, most: int
) -> AsyncGenerator[StreamedFile, None]:
    """Stream an archive: see `ArchiveService.stream_files`."""
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
        """Return the next event, None at the end. Raises BatchError BadSample, CorruptExtentError."""
        if not self._ready:
            try:
                with damage_context(self._url):
                    self._ready.extend(await asyncio.to_thread(self._fetch))
            except (ArchiveError, TarError) as error:
                await verify_extents(self._spans, self._url)  # raises if it is this disk that is damaged
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
        """Yield the rest of the current file."""
        while True:
            event = await self.next_event()
            if event is None:
                return
            if isinstance(event, MemberStart):
                self._ready.appendleft(event)
                return
            yield event
