"""Shard views, read: tars put together of the source's extents while they are sent.

Law: nothing is stored. A shard is generated headers and the files that hold its members; large members go to
the socket by sendfile. What is laid out is a scan of the source at some moment after which a read or listing
was asked for; a member that was replaced since makes the scan be done again.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from awscrt.checksums import crc32c

from meshd.kit.singleflight import SingleFlight
from meshd.service.translation import store_errors
from meshd.service.views.kinds import Made
from meshd.store.errors import CorruptExtentError, ExtentGoneError
from meshd.store.records import Record, Span
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing
from meshwire.shardviews import SourceObject, lay_out

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.kit.clock import Clock
    from meshd.store.interface import ObjectStore
    from meshwire.s3.operations import ListObjects
    from meshwire.shardviews import Piece, Shard, ShardLayout, ShardsView

_PAGE: Final = 1000
_LAYOUTS: Final = 16
_COPIED: Final = 64 << 10
"""Members up to here are copied beside their headers: one send for many instead of two for each."""
_SCAN_SHARE: Final = 10
"""A scan of a store that changes all the time is repeated after ten times the time it takes: milliseconds for
thousands of objects, half a minute for a million."""
PAGE_LIMIT: Final = 1000
_GROUP: Final = 1 << 20
_GROUP_PIECES: Final = 600


@dataclass(slots=True)
class _Scan:
    layout: ShardLayout
    revision: int  # of the store, before the scan
    done: float
    seconds: float


class ShardReader:
    """One a worker."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._scans: OrderedDict[ShardsView, _Scan] = OrderedDict()
        self._scanning: SingleFlight[ShardsView, _Scan] = SingleFlight()

    def __repr__(self) -> str:
        return f"<ShardReader of {len(self._scans)} layouts>"

    # --- one shard ------------------------------------------------------------------------------------

    async def find(self, view: ShardsView, key: str) -> Made:
        """Raises S3Error NoSuchKey."""
        shard = await self.shard(view, key)
        return Made(shard_record(shard), lambda offset, length: self.groups(view, shard, offset, length))

    async def shard(self, view: ShardsView, key: str) -> Shard:
        """Raises S3Error NoSuchKey."""
        shard = (await self._layout(view)).shards.get(key)
        if shard is not None and not self._intact(view, shard):
            self._scans.pop(view, None)
            shard = (await self._layout(view)).shards.get(key)
        if shard is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return shard

    def _intact(self, view: ShardsView, shard: Shard) -> bool:
        return all(self._record(view, member) is not None for member in shard.members)

    def _record(self, view: ShardsView, member: SourceObject) -> Record | None:
        with store_errors():
            record = self._store.get(view.source, member.key)
        return record if record is not None and record.etag == member.etag else None

    async def groups(
        self, view: ShardsView, shard: Shard, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Open files and ranges of a part of a shard, about a megabyte at a time, each group valid until the
        next is asked for. Raises S3Error SlowDown when a member was replaced meanwhile, StoreError."""
        group: list[Piece] = []
        size = 0
        for piece in shard.pieces(offset, length):
            group.append(piece)
            size += piece.length
            if size >= _GROUP or len(group) >= _GROUP_PIECES:
                with ExitStack() as stack:
                    yield await self._spans(stack, view, group)
                group, size = [], 0
        if group:
            with ExitStack() as stack:
                yield await self._spans(stack, view, group)

    async def _spans(self, stack: ExitStack, view: ShardsView, group: Sequence[Piece]) -> Sequence[Span]:
        """Large members as they lie, all that is between them copied together by a thread."""
        parts = [self._part(stack, view, piece) for piece in group]
        scratch = stack.enter_context(_Scratch())
        return await asyncio.to_thread(scratch.assemble, parts)

    def _part(self, stack: ExitStack, view: ShardsView, piece: Piece) -> _Part:
        if piece.object is None:
            return _Part(data=piece.data)
        record = self._present(view, piece.object)
        try:
            spans = stack.enter_context(self._store.reading(record, piece.offset, piece.length))
        except ExtentGoneError:  # moved by compaction
            record = self._present(view, piece.object)
            spans = stack.enter_context(self._store.reading(record, piece.offset, piece.length))
        whole = len(record.extents) == 1 and piece.length == record.size
        return _Part(spans, piece.length, crc=record.extents[0].crc32c if whole else None)

    def _present(self, view: ShardsView, member: SourceObject) -> Record:
        record = self._record(view, member)
        if record is None:
            raise S3Error("SlowDown", f"{member.key} was replaced meanwhile; ask again.")
        return record

    # --- listings --------------------------------------------------------------------------------------

    async def listing(self, view: ShardsView, operation: ListObjects) -> ObjectListing:
        """A page of shards with their true sizes."""
        layout = await self._layout(view)
        limit = min(operation.max_keys, PAGE_LIMIT)
        entries: list[ObjectEntry] = []
        prefixes: list[str] = []
        last = ""
        for key, shard in layout.shards.items():
            rolled = _rolled(key, operation)
            shown = rolled or key
            if not key.startswith(operation.prefix) or shown <= operation.after or rolled in prefixes[-1:]:
                continue
            if len(entries) + len(prefixes) == limit:
                return ObjectListing(tuple(entries), tuple(prefixes), limit > 0, last)
            last = shown
            if rolled:
                prefixes.append(rolled)
            else:
                entries.append(ObjectEntry(key, shard.size, shard.etag, shard.modified))
        return ObjectListing(tuple(entries), tuple(prefixes))

    # --- layouts ----------------------------------------------------------------------------------------

    async def _layout(self, view: ShardsView) -> ShardLayout:
        scan = self._scans.get(view)
        if scan is None or self._stale(scan):
            scan, _ = await self._scanning.run(view, lambda: self._scan(view))
            self._scans[view] = scan
            if len(self._scans) > _LAYOUTS:
                self._scans.popitem(last=False)
        self._scans.move_to_end(view)
        return scan.layout

    def _stale(self, scan: _Scan) -> bool:
        age = self._clock.monotonic() - scan.done
        return age > _SCAN_SHARE * scan.seconds and self._store.revision() != scan.revision

    async def _scan(self, view: ShardsView) -> _Scan:
        began, revision = self._clock.monotonic(), self._store.revision()
        with store_errors():
            layout = await asyncio.to_thread(lambda: lay_out(view, self._objects(view)))
        now = self._clock.monotonic()
        return _Scan(layout, revision, now, now - began)

    def _objects(self, view: ShardsView) -> Iterator[SourceObject]:
        after, more = "", True
        while more:
            page = self._store.list(view.source, prefix=view.prefix, after=after, limit=_PAGE)
            for key, record in page.entries:
                yield SourceObject(key, record.etag, record.size, record.modified)
            after, more = page.next_after, page.truncated


def shard_record(shard: Shard) -> Record:
    """A shard as the service answers objects; it has no bytes of its own."""
    return Record(shard.size, shard.etag, 0, shard.modified, (), {"content-type": "application/x-tar"})


def _rolled(key: str, operation: ListObjects) -> str:
    """The common prefix a key is rolled up to; empty when it stands for itself."""
    if not operation.delimiter:
        return ""
    at = key.find(operation.delimiter, len(operation.prefix))
    return key[: at + len(operation.delimiter)] if at >= 0 else ""


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes made here, or ranges of open files; `crc`: of exactly these ranges, where it is known."""

    spans: Sequence[Span] = ()
    length: int = 0
    data: bytes = b""
    crc: int | None = None

    def read(self) -> bytes:
        """All of it (blocking). Raises CorruptExtentError."""
        if self.data:
            return self.data
        data = b"".join([os.pread(span.fd, span.length, span.offset) for span in self.spans])
        if len(data) != self.length or (self.crc is not None and crc32c(data) != self.crc):
            raise CorruptExtentError("a member of a shard is damaged; run meshd fsck and restore the object")
        return data


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
            if part.length > _COPIED:
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
