"""Pieces of shards as open files: what is made goes through shared memory, large members lie where they are.

Law: a member is read only if the object it is in is still the one that was laid out. Small members' checksums
are compared on the way; the sum of a record is put together of the extents' sums where those are known.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from awscrt.checksums import combine_crc32c, crc32c

from meshd.assembly.errors import BatchError
from meshd.service.translation import store_errors
from meshd.store.errors import CorruptExtentError, ExtentGoneError
from meshd.store.proving import Passing
from meshd.store.records import Span
from meshd.telemetry import metrics
from meshwire.s3.errors import S3Error
from meshwire.tfrecords import MAX_NUMBER, NumberError, converted, masked

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.store.interface import ObjectStore
    from meshd.store.proving import Proofs
    from meshd.store.records import Extent, Record
    from meshwire.shardforms import Piece, Shard, SourceObject

_COPIED: Final = 64 << 10
"""Members up to here are copied beside their headers: one send for many instead of two for each."""
_GROUP: Final = 1 << 20
_GROUP_PIECES: Final = 600
_READ: Final = 1 << 20


class Plain(Protocol):
    """The object whose bytes the offsets of an archive's members are of: itself, or its inflated copy. Raises
    BatchError."""

    async def plain(self, bucket: str, key: str, record: Record) -> Record: ...


class Source:
    """The objects of a bucket, as they were when a layout was made of them."""

    def __init__(self, store: ObjectStore, archives: Plain, bucket: str) -> None:
        self.store, self._archives, self.bucket = store, archives, bucket

    def __repr__(self) -> str:
        return f"<Source {self.bucket}>"

    def record(self, key: str) -> Record | None:
        """What a key names now."""
        with store_errors():
            return self.store.get(self.bucket, key)

    def present(self, member: SourceObject) -> Record | None:
        """The object a member is in; None when it is gone or another one now."""
        record = self.record(member.key)
        return record if record is not None and record.etag == member.etag else None

    async def holder(self, member: SourceObject) -> Record:
        """The object with a member's bytes. Raises S3Error SlowDown, UnprocessableSource."""
        record = self.present(member)
        if record is None:
            raise S3Error("SlowDown", f"{member.key} was replaced meanwhile; ask again.")
        if not member.name:
            return record
        with unprocessable():
            return await self._archives.plain(self.bucket, member.key, record)


@contextmanager
def unprocessable() -> Iterator[None]:
    """An archive that cannot be read, in S3's words."""
    try:
        yield
    except BatchError as error:
        raise S3Error("UnprocessableSource", error.message) from error


async def shard_groups(
    source: Source, shard: Shard, offset: int, length: int, proofs: Proofs | None = None
) -> AsyncGenerator[Sequence[Span], None]:
    """Open files and ranges of a part of a shard, about a megabyte at a time, each group valid until the next
    is asked for. `proofs`: a copy's, of members that are parts of extents (files in archives). Raises S3Error
    SlowDown when a member was replaced meanwhile, StoreError."""
    group: list[Piece] = []
    size = 0
    for piece in shard.pieces(offset, length):
        group.append(piece)
        size += piece.length
        if size >= _GROUP or len(group) >= _GROUP_PIECES:
            with ExitStack() as stack:
                yield await _Opening(source, stack, proofs).spans(group)
            group, size = [], 0
    if group:
        with ExitStack() as stack:
            yield await _Opening(source, stack, proofs).spans(group)


class _Opening:
    """One group's files, open while `stack` is."""

    def __init__(self, source: Source, stack: ExitStack, proofs: Proofs | None) -> None:
        self._source, self._stack, self._proofs = source, stack, proofs
        self._parts: dict[int, _Part] = {}  # by the identity of pieces that the group holds

    async def spans(self, group: Sequence[Piece]) -> Sequence[Span]:
        """Large members as they lie, all that is between them copied together by a thread."""
        parts = [await self._part(piece) for piece in group]
        scratch = self._stack.enter_context(_Scratch())
        return await asyncio.to_thread(scratch.assemble, parts)

    async def _part(self, piece: Piece) -> _Part:
        """A piece that is sent and summed is opened once."""
        found = self._parts.get(id(piece))
        if found is None:
            found = self._parts[id(piece)] = await self._opened(piece)
        return found

    async def _opened(self, piece: Piece) -> _Part:
        if piece.summed:
            parts = tuple([await self._part(each) for each in piece.summed])
            return _Part(length=piece.length, summed=parts, skip=piece.offset)
        if piece.object is None:
            return _Part(data=piece.data, length=piece.length)
        if piece.told:
            return await self._number(piece, piece.object)
        try:
            part = self._open(piece, piece.object, await self._source.holder(piece.object))
        except ExtentGoneError:  # moved by compaction
            part = self._open(piece, piece.object, await self._source.holder(piece.object))
        if self._proofs is not None:
            await self._proofs.require(part.spans)
        return part

    async def _number(self, piece: Piece, item: SourceObject) -> _Part:
        """What a file spells. Raises S3Error UnprocessableSource."""
        name = f"{item.key}/-/{item.name}" if item.name else item.key
        if item.size > MAX_NUMBER:
            raise S3Error("UnprocessableSource", f"{name} has {item.size} bytes: that is no {piece.told}")
        try:
            data = converted(piece.told, await self._text(item))[piece.offset :][: piece.length]
        except NumberError as error:
            raise S3Error("UnprocessableSource", f"{name}: {error}") from error
        return _Part(data=data, length=piece.length)

    async def _text(self, item: SourceObject) -> bytes:
        record, store = await self._source.holder(item), self._source.store
        if self._proofs is not None:
            with store.reading(record, item.offset, item.size) as spans:
                await self._proofs.require(self._named(spans, item))
        text = store.read_now(record, item.offset, item.size)
        return await asyncio.to_thread(store.read, record, item.offset, item.size) if text is None else text

    def _open(self, piece: Piece, item: SourceObject, record: Record) -> _Part:
        opened = self._stack.enter_context(self._source.store.reading(record, piece.offset, piece.length))
        spans, whole = self._named(opened, item), piece.length == record.size
        return _Part(spans, piece.length, extents=record.extents if whole else ())

    def _named(self, spans: Sequence[Span], item: SourceObject) -> Sequence[Span]:
        name = f"s3://{self._source.bucket}/{item.key}"
        return [span.named(name) for span in spans]


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes made here, ranges of open files (`extents`: what they are, where it is all of an object), or the
    bytes from `skip` of the masked sum of others."""

    spans: Sequence[Span] = ()
    length: int = 0
    data: bytes = b""
    extents: Sequence[Extent] = ()
    summed: Sequence[_Part] = ()
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


class _Scratch:
    """Bytes made here, in shared memory, so that they are sent like a file's; neighbours become one span."""

    def __init__(self) -> None:
        self._fd, self._size = -1, 0

    def __enter__(self) -> _Scratch:
        self._fd = os.memfd_create("mesh-shard", os.MFD_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def assemble(self, parts: Sequence[_Part]) -> Sequence[Span]:
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
