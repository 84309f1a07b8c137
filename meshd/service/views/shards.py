"""Shard views, read: tars and TFRecords put together of the source's extents while they are sent.

Law: nothing is stored. A shard is generated headers and the files that hold its members; large members go to
the socket by sendfile. What is laid out is a scan of the source at some moment after which a read or listing
was asked for; a member that was replaced since makes the scan be done again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshd.kit.singleflight import SingleFlight
from meshd.service.translation import store_errors
from meshd.service.views.kinds import Made
from meshd.service.views.pieces import Source, shard_groups, unprocessable
from meshd.store.records import Record
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing
from meshwire.samples import Evaluation
from meshwire.shardforms import SourceObject
from meshwire.shardlayouts import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.kit.clock import Clock
    from meshd.service.archives.reading import Archives
    from meshd.store.interface import ObjectStore
    from meshwire.expressions import Value
    from meshwire.s3.operations import ListObjects
    from meshwire.samples import Answered
    from meshwire.shardforms import Shard
    from meshwire.shardlayouts import ShardLayout
    from meshwire.shardviews import ShardsView

_PAGE: Final = 1000
_LAYOUTS: Final = 16
_CONTENT: Final = 64 << 10
"""Files up to here are read for expressions; larger ones are none."""
_SCAN_SHARE: Final = 10
"""A scan of a store that changes all the time is repeated after ten times the time it takes: milliseconds for
thousands of objects, half a minute for a million."""
PAGE_LIMIT: Final = 1000


@dataclass(slots=True)
class _Scan:
    layout: ShardLayout
    answered: Mapping[Answered, Value]
    revision: int  # of the store, before the scan
    done: float
    seconds: float
    checked: dict[str, int] = field(default_factory=dict)  # shard → the revision its members were intact at


class ShardReader:
    """One a worker."""

    def __init__(self, store: ObjectStore, clock: Clock, archives: Archives) -> None:
        self._store, self._clock, self._archives = store, clock, archives
        self._scans: OrderedDict[ShardsView, _Scan] = OrderedDict()
        self._scanning: SingleFlight[ShardsView, _Scan] = SingleFlight()

    def __repr__(self) -> str:
        return f"<ShardReader of {len(self._scans)} layouts>"

    async def find(self, view: ShardsView, key: str) -> Made:
        """Raises S3Error NoSuchKey, UnprocessableSource."""
        shard = await self.shard(view, key)
        source = self._source(view)
        return Made(_record(shard), lambda offset, length: shard_groups(source, shard, offset, length))

    def _source(self, view: ShardsView) -> Source:
        return Source(self._store, self._archives, view.source)

    async def shard(self, view: ShardsView, key: str) -> Shard:
        """Raises S3Error NoSuchKey, UnprocessableSource."""
        scan = await self._scanned(view)
        shard = scan.layout.shards.get(key)
        if shard is not None and not self._intact(view, scan, shard):
            self._scans.pop(view, None)
            shard = (await self._scanned(view)).layout.shards.get(key)
        if shard is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return shard

    def _intact(self, view: ShardsView, scan: _Scan, shard: Shard) -> bool:
        """Whether every object is what it was; looked up once while the store does not change."""
        revision = self._store.revision()
        if scan.checked.get(shard.key, scan.revision) == revision:
            return True
        objects = {member.key: member for member in shard.members}
        intact = all(map(self._source(view).present, objects.values()))
        if intact:
            scan.checked[shard.key] = revision
        return intact

    async def listing(self, view: ShardsView, operation: ListObjects) -> ObjectListing:
        """A page of shards with their true sizes."""
        layout = (await self._scanned(view)).layout
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

    async def _scanned(self, view: ShardsView) -> _Scan:
        scan = self._scans.get(view)
        if scan is None or self._stale(scan):
            answered = {} if scan is None else scan.answered
            scan, _ = await self._scanning.run(view, lambda: self._scan(view, answered))
            self._scans[view] = scan
            if len(self._scans) > _LAYOUTS:
                self._scans.popitem(last=False)
        self._scans.move_to_end(view)
        return scan

    def _stale(self, scan: _Scan) -> bool:
        age = self._clock.monotonic() - scan.done
        return age > _SCAN_SHARE * scan.seconds and self._store.revision() != scan.revision

    async def _scan(self, view: ShardsView, answered: Mapping[Answered, Value]) -> _Scan:
        began, revision = self._clock.monotonic(), self._store.revision()
        contents = _Contents(self._source(view))
        evaluation = Evaluation(contents.read, answered)
        with store_errors():
            files = await asyncio.to_thread(self._objects, view)
            if view.samples == "archives":
                files = await self._members(view, files, contents)
            layout = await asyncio.to_thread(lay_out, view, files, evaluation)
        now = self._clock.monotonic()
        return _Scan(layout, evaluation.answered, revision, now, now - began)

    def _objects(self, view: ShardsView) -> list[SourceObject]:
        """What the view takes of the bucket (blocking)."""
        found: list[SourceObject] = []
        after, more = "", True
        while more:
            page = self._store.list_entries(view.source, prefix=view.prefix, after=after, limit=_PAGE)
            found += [
                SourceObject(entry.key, entry.etag, entry.size, entry.modified_ms)
                for entry in page.entries
                if view.takes(entry.key)
            ]
            after, more = page.next_after, page.truncated
        return found

    async def _members(
        self, view: ShardsView, archives: Iterable[SourceObject], contents: _Contents
    ) -> list[SourceObject]:
        """The files of these archives, in their order. Raises S3Error UnprocessableSource."""
        found: list[SourceObject] = []
        for archive in archives:
            record = contents.source.present(archive)
            if record is None:  # went meanwhile
                continue
            with unprocessable():
                index = await self._archives.index(view.source, archive.key, record)
            rows = zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True)
            files = [archive._replace(name=name, offset=at, size=size) for name, at, size in rows if name]
            if files and view.reads_files:
                contents.holders[archive.key] = await contents.source.holder(files[0])
            found += files
        return found


class _Contents:
    """Small files' bytes, for expressions. `holders`: where those of archives are."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.holders: dict[str, Record] = {}

    def __repr__(self) -> str:
        return f"<_Contents of {self.source}>"

    def read(self, item: SourceObject) -> bytes | None:
        """None for what is too large, or not what it was (blocking)."""
        if item.size > _CONTENT:
            return None
        record = self.holders.get(item.key) if item.name else self.source.present(item)
        return None if record is None else self.source.store.read(record, item.offset, item.size)


def _record(shard: Shard) -> Record:
    """A shard as the service answers objects; it has no bytes of its own."""
    headers = {"content-type": shard.content_type}
    return Record(shard.size, shard.etag, 0, shard.modified, (), headers)


def _rolled(key: str, operation: ListObjects) -> str:
    """The common prefix a key is rolled up to; empty when it stands for itself."""
    if not operation.delimiter:
        return ""
    at = key.find(operation.delimiter, len(operation.prefix))
    return key[: at + len(operation.delimiter)] if at >= 0 else ""
