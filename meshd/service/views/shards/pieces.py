"""Pieces of shards as open files, from this node's disks and from other nodes.

Law: a member is read only if the object it is in is still the one that was laid out. What cannot be read here
comes from another owner of that very version, or not at all.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from meshd.assembly.elsewhere import Lost, Part
from meshd.assembly.errors import BatchError
from meshd.assembly.memory import Memory
from meshd.service.remote.continuing import CutShortError
from meshd.service.remote.waiting import Waiting
from meshd.service.remote.wire import FarRecord
from meshd.service.semantics.translation import store_errors
from meshd.service.views.failing import refusal, unreachable
from meshd.service.views.shards.stretches import Scratch, Stretch
from meshd.store.errors import CorruptExtentError, ExtentGoneError
from meshd.store.noticing import notice_behind
from meshd.store.proving import naming
from meshd.store.records import Span
from meshwire.s3.errors import S3Error
from meshwire.tfrecords import MAX_NUMBER, NumberError, converted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence

    from meshd.service.remote.objects import RemoteObjects
    from meshd.service.semantics.tearing import Tear
    from meshd.store.interface import ObjectStore
    from meshd.store.proving import Proofs
    from meshd.store.records import Record
    from meshwire.shardforms import Piece, Shard, SourceObject

_GROUP: Final = 1 << 20
_GROUP_PIECES: Final = 600


class Plain(Protocol):
    """The object whose bytes the offsets of an archive's members are of: itself, or its inflated copy. Raises
    BatchError."""

    async def plain(self, bucket: str, key: str, record: Record) -> Record: ...


class Source:
    """The objects of a bucket, as they were when a layout was made of them. Of those that other nodes hold
    `record` knows what was looked up before."""

    def __init__(self, store: ObjectStore, archives: Plain, bucket: str, objects: RemoteObjects) -> None:
        self.store, self._archives, self.bucket = store, archives, bucket
        self.objects = objects
        self._looked_up: dict[str, Record | None] = {}
        self._waiting = None if self.objects.alone else Waiting(self.objects)

    def __repr__(self) -> str:
        return f"<Source {self.bucket}>"

    async def look_up(self, keys: Collection[str]) -> None:
        """Ask other nodes for the objects of these keys. Raises S3Error SlowDown."""
        if self.objects.alone:
            return
        wanted = [key for key in keys if key not in self._looked_up]
        with unreachable():
            found = await self.objects.many([(self.bucket, key) for key in wanted])
        self._looked_up.update(zip(wanted, found, strict=True))

    def read(self, item: SourceObject, record: Record) -> bytes:
        """A member's bytes, of the object that holds them (blocking). Raises StoreError."""
        if isinstance(record, FarRecord) and self._waiting is not None:
            return self._waiting.read(self.bucket, item.key, record, item.offset, item.size)
        return self.store.read(record, item.offset, item.size)

    def part(self, item: SourceObject, record: Record, offset: int, length: int) -> Part:
        """How other nodes are asked for bytes of the object that holds a member."""
        return Part(self.bucket, item.key, record.etag, record.size, offset, length)

    def record(self, key: str) -> Record | None:
        """What a key names now."""
        if key in self._looked_up:
            return self._looked_up[key]
        with store_errors():
            return self.store.get(self.bucket, key)

    def present(self, member: SourceObject) -> Record | None:
        """The object a member is in; None when it is gone or another one now."""
        record = self.record(member.key)
        return record if record is not None and record.etag == member.etag else None

    async def of_others(self, piece: Piece) -> AsyncGenerator[bytes, None]:
        """A piece of an object that this node cannot read. Raises CutShortError, S3Error."""
        if piece.object is None:
            raise CutShortError("what was made here cannot be read")
        record, key = await self.holder(piece.object), piece.object.key
        rest = self.objects.of_others(self.bucket, key, record, piece.offset, piece.length)
        async with aclosing(rest) as pieces:
            async for data in pieces:
                yield data

    async def holder(self, member: SourceObject) -> Record:
        """The object with a member's bytes. Raises S3Error SlowDown, UnprocessableSource."""
        await self.look_up({member.key})
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
        if error.code == "Busy":
            raise refusal(error) from error
        raise S3Error("UnprocessableSource", error.message) from error


async def shard_groups(
    source: Source,
    shard: Shard,
    offset: int,
    length: int,
    proofs: Proofs | None = None,
    tear: Tear | None = None,
) -> AsyncGenerator[Sequence[Span], None]:
    """Open files and ranges of a part of a shard, about a megabyte at a time, each group valid until the next
    is asked for. `proofs`: a copy's, of members that are parts of extents (files in archives). Told by `tear`
    that a member cannot be read to its end they go on with what another node has of it. Raises S3Error
    SlowDown when a member was replaced meanwhile, StoreError."""
    for group in _grouped(shard.pieces(offset, length)):
        left = group
        while left:
            with ExitStack() as stack:
                spans = await _Opening(source, stack, proofs).spans(left)
                yield spans
                sent = None if tear is None else tear.take()
            if sent is None:
                break
            notice_behind(spans, sent)
            torn, left = _behind(left, sent)
            async with aclosing(source.of_others(torn)) as rest:
                async for data in rest:
                    with Scratch() as scratch:
                        yield scratch.assemble([Stretch(data=data, length=len(data))])


def _grouped(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += piece.length
        if size >= _GROUP or len(group) >= _GROUP_PIECES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _behind(group: Sequence[Piece], sent: int) -> tuple[Piece, list[Piece]]:
    """What is left of the piece that ended behind `sent` bytes of a group, and the pieces behind it."""
    for number, piece in enumerate(group):
        if sent < piece.length:
            left = replace(piece, offset=piece.offset + sent, length=piece.length - sent)
            return left, list(group[number + 1 :])
        sent -= piece.length
    raise ValueError("a group ended behind its end")


class _Opening:
    """One group's files, open while `stack` is."""

    def __init__(self, source: Source, stack: ExitStack, proofs: Proofs | None) -> None:
        self._source, self._stack, self._proofs = source, stack, proofs
        self._fetched: dict[Part, Span] = {}
        self._parts: dict[int, Stretch] = {}  # by the identity of pieces that the group holds

    async def spans(self, group: Sequence[Piece]) -> Sequence[Span]:
        """Large members as they lie, all that is between them copied together by a thread."""
        await self._fetch(group)
        parts = [await self._part(piece) for piece in group]
        scratch = self._stack.enter_context(Scratch())
        try:
            return await asyncio.to_thread(scratch.assemble, parts)
        except (CorruptExtentError, OSError) as error:
            if self._source.objects.alone or self._proofs is not None:
                raise
            sound = [await self._sound(*each, error) for each in zip(group, parts, strict=True)]
        again = self._stack.enter_context(Scratch())
        return await asyncio.to_thread(again.assemble, sound)

    async def _sound(self, piece: Piece, part: Stretch, error: Exception) -> Stretch:
        """A part, or, where a small one cannot be read here, what another node has of it. Raises `error`."""
        if part.lies or not part.spans:
            return part
        try:
            return replace(part, data=await asyncio.to_thread(part.read))
        except (CorruptExtentError, OSError):
            notice_behind(part.spans, 0)
        try:
            return Stretch(
                data=b"".join([data async for data in self._source.of_others(piece)]), length=part.length
            )
        except CutShortError:
            raise error from None

    async def _fetch(self, group: Sequence[Piece]) -> None:
        """What other nodes hold of a group's pieces, all at once. Raises S3Error SlowDown."""
        source = self._source
        if source.objects.alone:
            return
        pieces = [piece for piece in _all_of(group) if piece.object is not None and not piece.told]
        await source.look_up({piece.object.key for piece in pieces if piece.object is not None})
        parts: dict[Part, None] = {}
        for piece in pieces:
            assert piece.object is not None
            record = await source.holder(piece.object)
            if isinstance(record, FarRecord):
                parts[source.part(piece.object, record, piece.offset, piece.length)] = None
        if not parts:
            return
        with unreachable():
            fetched = await source.objects.fetch(list(parts), Memory(), proven=self._proofs is not None)
        self._stack.callback(fetched.close)
        for part, place in zip(parts, fetched.places, strict=True):
            if isinstance(place, Lost):
                raise S3Error("SlowDown", f"{part.key} cannot be read now: {place.message or place.code}")
            self._fetched[part] = Span(fetched.fd, place.offset, place.length)

    async def _part(self, piece: Piece) -> Stretch:
        """A piece that is sent and summed is opened once."""
        found = self._parts.get(id(piece))
        if found is None:
            found = self._parts[id(piece)] = await self._opened(piece)
        return found

    async def _opened(self, piece: Piece) -> Stretch:
        if piece.summed:
            parts = tuple([await self._part(each) for each in piece.summed])
            return Stretch(length=piece.length, summed=parts, skip=piece.offset)
        if piece.object is None:
            return Stretch(data=piece.data, length=piece.length)
        if piece.told:
            return await self._number(piece, piece.object)
        try:
            part = self._open(piece, piece.object, await self._source.holder(piece.object))
        except ExtentGoneError:  # moved by compaction
            part = self._open(piece, piece.object, await self._source.holder(piece.object))
        if self._proofs is not None:
            await self._proofs.require(part.spans)
        return part

    async def _number(self, piece: Piece, item: SourceObject) -> Stretch:
        """What a file spells. Raises S3Error UnprocessableSource."""
        name = f"{item.key}/-/{item.name}" if item.name else item.key
        if item.size > MAX_NUMBER:
            raise S3Error("UnprocessableSource", f"{name} has {item.size} bytes: that is no {piece.told}")
        try:
            data = converted(piece.told, await self._text(item))[piece.offset :][: piece.length]
        except NumberError as error:
            raise S3Error("UnprocessableSource", f"{name}: {error}") from error
        return Stretch(data=data, length=piece.length)

    async def _text(self, item: SourceObject) -> bytes:
        record, store = await self._source.holder(item), self._source.store
        if isinstance(record, FarRecord):
            with unreachable():
                part = self._source.part(item, record, item.offset, item.size)
                return (await self._source.objects.read_many([part]))[0]
        if self._proofs is not None:
            with naming(self._url(item)), store.reading(record, item.offset, item.size) as spans:
                await self._proofs.require(self._named(spans, item))
        text = store.read_now(record, item.offset, item.size)
        return await asyncio.to_thread(store.read, record, item.offset, item.size) if text is None else text

    def _open(self, piece: Piece, item: SourceObject, record: Record) -> Stretch:
        if isinstance(record, FarRecord):
            span = self._fetched[self._source.part(item, record, piece.offset, piece.length)]
            return Stretch(self._named([span], item), piece.length)
        with naming(self._url(item)):
            opened = self._stack.enter_context(self._source.store.reading(record, piece.offset, piece.length))
        spans, whole = self._named(opened, item), piece.length == record.size
        return Stretch(spans, piece.length, extents=record.extents if whole else ())

    def _named(self, spans: Sequence[Span], item: SourceObject) -> Sequence[Span]:
        name = self._url(item)
        return [span.named(name) for span in spans]

    def _url(self, item: SourceObject) -> str:
        return f"s3://{self._source.bucket}/{item.key}"


def _all_of(group: Sequence[Piece]) -> Iterator[Piece]:
    for piece in group:
        yield piece
        yield from _all_of(piece.summed)
