"""Shard views, read: tars and TFRecords put together of the source's extents while they are sent.

Law: nothing is stored. A shard is generated headers and the files that hold its members; large members go to
the socket by sendfile. A member that was replaced since the layout was made shows at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.service.views.kinds import Made
from meshd.service.views.shards.layouts import Layouts
from meshd.service.views.shards.pieces import Source, shard_groups
from meshd.store.records import Record
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing

if TYPE_CHECKING:
    from meshd.kit.clock import Clock
    from meshd.service.archives.reading import Archives
    from meshd.service.remote.objects import RemoteObjects
    from meshd.service.views.shards.layouts import Laid
    from meshd.store.interface import ObjectStore
    from meshwire.s3.operations import ListObjects
    from meshwire.shardforms import Shard, SourceObject
    from meshwire.shardlayouts import ShardLayout
    from meshwire.shardviews import ShardsView

PAGE_LIMIT: Final = 1000
_BEYOND: Final = "\U0010ffff"


class ShardReader:
    """One a worker."""

    def __init__(self, store: ObjectStore, clock: Clock, archives: Archives, objects: RemoteObjects) -> None:
        self._store, self._archives = store, archives
        self._objects = objects
        self._layouts = Layouts(store, clock, archives, self._objects)

    def __repr__(self) -> str:
        return f"<ShardReader, {self._layouts}>"

    async def find(self, view: ShardsView, key: str) -> Made:
        """Raises S3Error NoSuchKey, UnprocessableSource."""
        shard = await self.shard(view, key)
        source = self._source(view)
        return Made(
            _record(shard),
            lambda offset, length: shard_groups(source, shard, offset, length),
            lambda proofs, offset, length: shard_groups(source, shard, offset, length, proofs),
            lambda tear, offset, length: shard_groups(source, shard, offset, length, tear=tear),
        )

    def _source(self, view: ShardsView) -> Source:
        return Source(self._store, self._archives, view.source, self._objects)

    async def shard(self, view: ShardsView, key: str) -> Shard:
        """Raises S3Error NoSuchKey, UnprocessableSource."""
        laid = await self._layouts.recent(view)
        shard = laid.layout.shards.get(key)
        if shard is not None:
            shard = await self._current(view, laid, shard)
            if shard is None:
                shard = (await self._layouts.again(view)).layout.shards.get(key)
        if shard is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return shard

    async def _current(self, view: ShardsView, laid: Laid, shard: Shard) -> Shard | None:
        """The shard of objects as they are now; None when the layout must be made anew for that. They are
        looked up once while the store does not change."""
        revision = self._layouts.revision(view)
        if laid.checked.get(shard.key, laid.revision) == revision:
            return shard
        source = self._source(view)
        await source.look_up({member.key for member in shard.members})
        now = await asyncio.to_thread(_looked_up, source, shard, view.keeps_places)
        if now is None:
            return None
        if now is not shard:
            shard = laid.layout.shards[shard.key] = now
        laid.checked[shard.key] = revision
        return shard

    async def listing(self, view: ShardsView, operation: ListObjects) -> ObjectListing:
        """A page of shards with their true sizes."""
        laid = await self._layouts.recent(view)
        return await asyncio.to_thread(_page, laid.layout, operation)  # ETags are worked out for that


def _looked_up(source: Source, shard: Shard, keeps_places: bool) -> Shard | None:
    """The shard, or what it is of objects that were replaced; None when that moves them (blocking)."""
    objects = {member.key: member for member in shard.members}
    if all(map(source.present, objects.values())):
        return shard
    return _replaced(source, shard) if keeps_places else None


def _replaced(source: Source, shard: Shard) -> Shard | None:
    """The same shard of what has its members' keys now; None when one is gone."""
    members: list[SourceObject] = []
    for member in shard.members:
        record = source.record(member.key)
        if record is None:
            return None
        members.append(member._replace(etag=record.etag, size=record.size, modified=record.modified))
    return shard.of_others(members)


def _record(shard: Shard) -> Record:
    """A shard as the service answers objects; it has no bytes of its own."""
    headers = {"content-type": shard.content_type}
    return Record(shard.size, shard.etag, 0, shard.modified, (), headers)


def _page(layout: ShardLayout, operation: ListObjects) -> ObjectListing:
    limit = min(operation.max_keys, PAGE_LIMIT)
    entries: list[ObjectEntry] = []
    prefixes: list[str] = []
    last, at = "", layout.place(max(operation.prefix, operation.after))
    while at < len(layout.keys) and layout.keys[at].startswith(operation.prefix):
        key = layout.keys[at]
        rolled = _rolled(key, operation)
        shown = rolled or key
        if shown > operation.after:
            if len(entries) + len(prefixes) == limit:
                return ObjectListing(tuple(entries), tuple(prefixes), limit > 0, last)
            last = shown
            if rolled:
                prefixes.append(rolled)
            else:
                shard = layout.shards[key]
                entries.append(ObjectEntry(key, shard.size, shard.etag, shard.modified))
        at = layout.place(rolled + _BEYOND) if rolled else at + 1
    return ObjectListing(tuple(entries), tuple(prefixes))


def _rolled(key: str, operation: ListObjects) -> str:
    """The common prefix a key is rolled up to; empty when it stands for itself."""
    if not operation.delimiter:
        return ""
    at = key.find(operation.delimiter, len(operation.prefix))
    return key[: at + len(operation.delimiter)] if at >= 0 else ""
