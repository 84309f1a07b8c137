"""Reader of shard views, and the cache of their layouts.

Law: nothing is stored. A shard is generated headers plus the files that hold its members, and large
members reach the socket by sendfile. A layout describes the source as the last scan found it: an
unchanged scan keeps the layout, and unchanged files keep their expression results. A replaced member
shows at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from itertools import islice
from os.path import splitext
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import store_errors
from meshd.errors import MeshdError
from meshd.peer_reads.load_window import MAX_RANGES
from meshd.store.records import Record
from meshd.telemetry import metrics
from meshd.views.key_paging import build_page
from meshd.views.shards.member_io import (
    ReadAhead,
    ShardSource,
    shard_sources,
    translate_archive_errors,
)
from meshd.views.shards.read_ahead import add_shard_places
from meshd.views.source_scan_cache import SourceScanCache
from meshd.views.view_kind import AssembledObject, translate_peer_errors
from meshwire.errors import S3Error
from meshwire.formats.shard_encoding import SourceObject
from meshwire.s3.result_types import ObjectEntry, ObjectListing
from meshwire.views.sample_groups import Evaluation
from meshwire.views.shard_view import lay_out_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock
    from meshd.views.shards.read_ahead import ShardReadAhead
    from meshwire.dataset.expression_parser import Value
    from meshwire.formats.shard_encoding import Shard
    from meshwire.s3.operations import ListObjects
    from meshwire.views.sample_groups import EvaluationKey
    from meshwire.views.shard_view import ShardLayout, ShardsView


_PAGE: Final = 1000
_KEPT: Final = 8
_CONTENT: Final = 64 << 10
"""Files up to this size are read for expressions; the content of larger ones is none."""


class CachedLayout(msgspec.Struct):
    """A layout and its source. `objects`: the result of the scan; `revision`: the store's, before the scan.

    `checked`: shard keys, with the revision at which the members of the shard were last looked up.
    """

    objects: list[SourceObject]
    layout: ShardLayout
    answered: Mapping[EvaluationKey, Value]
    revision: object
    checked: dict[str, object] = msgspec.field(default_factory=dict)


class ShardLayoutCache:
    """Caches layouts of shard views, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        archives: ArchiveService,
        mesh: RemoteObjects,
        read_ahead: ShardReadAhead | None = None,
    ) -> None:
        self._store, self._clock, self._archives, self._mesh = store, clock, archives, mesh
        self._read_ahead = read_ahead
        self._scans: SourceScanCache[ShardsView, CachedLayout] = SourceScanCache(
            self.revision, clock, self._scan, lambda view: mesh.bucket_creation_times([view.source])
        )
        self._last: OrderedDict[ShardsView, CachedLayout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ShardLayoutCache, {self._scans}>"

    def revision(self, view: ShardsView) -> object:
        """Return the store's revision for the source: see `RemoteObjects.revision`."""
        return self._mesh.revision([view.source])

    async def get_layout(self, view: ShardsView) -> CachedLayout:
        """Return the layout of the last scan if it is recent enough. Raises S3Error UnprocessableSource."""
        return await self._scans.get_scan(view)

    async def rescan(self, view: ShardsView) -> CachedLayout:
        """Return the layout of a new scan, or of one in progress. Raises as `get_layout` does."""
        self._scans.invalidate_scan(view)
        return await self._scans.get_scan(view)

    async def _scan(self, view: ShardsView) -> CachedLayout:
        began, revision, last = self._clock.monotonic(), self.revision(view), self._last.get(view)
        with store_errors():
            objects = await self._list_sources(view)
            same = last is not None and await asyncio.to_thread(objects.__eq__, last.objects)
            if last is not None and same:  # the writes were elsewhere
                laid = CachedLayout(last.objects, last.layout, last.answered, revision)
            else:
                laid = await self._laid_out(view, objects, revision, {} if last is None else last.answered)
        metrics.view_layouts.labels("same" if same else "made").inc()
        metrics.view_layout_seconds.inc(self._clock.monotonic() - began)
        self._last[view] = laid
        self._last.move_to_end(view)
        if len(self._last) > _KEPT:
            self._last.popitem(last=False)
        return laid

    async def _laid_out(
        self,
        view: ShardsView,
        objects: list[SourceObject],
        revision: object,
        known: Mapping[EvaluationKey, Value],
    ) -> CachedLayout:
        source = ShardSource(self._store, self._archives, view.source, self._mesh)
        contents = _SmallFileReader(source, objects, self._read_ahead)
        evaluation = Evaluation(contents.read, known)
        files = objects
        if view.samples == "archives":
            files = await self._members(view, objects, contents)
        if view.reads_files:
            await contents.source.lookup_remote({file.key for file in files})
        layout = await asyncio.to_thread(lay_out_shards, view, files, evaluation)
        return CachedLayout(objects, layout, evaluation.results, revision)

    async def _list_sources(self, view: ShardsView) -> list[SourceObject]:
        if self._mesh.single_node:
            return await asyncio.to_thread(self._objects, view)
        with translate_peer_errors():
            entries = await self._mesh.list_entries(view.source, view.prefix)
        return [
            SourceObject(key, record.etag, record.size, record.modified)
            for key, record in entries
            if view.includes_key(key)
        ]

    def _objects(self, view: ShardsView) -> list[SourceObject]:
        """Return the objects of the bucket that the view includes (blocking)."""
        found: list[SourceObject] = []
        after, more = "", True
        while more:
            page = self._store.list_entries(view.source, prefix=view.prefix, after=after, limit=_PAGE)
            found += [
                SourceObject(entry.key, entry.etag, entry.size, entry.modified_ms)
                for entry in page.entries
                if view.includes_key(entry.key)
            ]
            after, more = page.next_after, page.truncated
        return found

    async def _members(
        self, view: ShardsView, archives: Iterable[SourceObject], contents: _SmallFileReader
    ) -> list[SourceObject]:
        """Return the files of these archives, in order. Raises S3Error UnprocessableSource."""
        found: list[SourceObject] = []
        archives = list(archives)
        await contents.source.lookup_remote({archive.key for archive in archives})
        for archive in archives:
            record = contents.source.current_member_object(archive)
            if record is None:  # removed or replaced since the scan
                continue
            with translate_archive_errors():
                index = await self._archives.get_index(view.source, archive.key, record)
            rows = zip(index.names, index.offsets.tolist(), index.sizes.tolist(), strict=True)
            files = [archive._replace(name=name, offset=at, size=size) for name, at, size in rows if name]
            if files and view.reads_files:
                contents.holders[archive.key] = await contents.source.require_member_object(files[0])
            found += files
        return found


class _SmallFileReader:
    """Reads small files for expressions, those of each extension in the order of `files`, and from rotational
    disks many at a time. `holders`: the objects with the bytes of archive members, by key. Made in the loop,
    read in a thread."""

    def __init__(
        self, source: ShardSource, files: Sequence[SourceObject], read_ahead: ShardReadAhead | None
    ) -> None:
        self.source = source
        self.holders: dict[str, Record] = {}
        self._files, self._read_ahead = files, read_ahead
        self._loop = asyncio.get_running_loop()
        self._loaded: dict[str, int] = {}  # by extension, the number of `files` up to which they are loaded
        self._numbers: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<_SmallFileReader of {self.source}>"

    def read(self, item: SourceObject) -> bytes | None:
        """Return the bytes of a file; None if it is too large or has changed (blocking)."""
        if item.size > _CONTENT:
            return None
        if self._read_ahead is not None and not item.name:
            self._load_from(item, self._read_ahead)
        record = self.holders.get(item.key) if item.name else self.source.current_member_object(item)
        return None if record is None else self.source.read_member(item, record)

    def _load_from(self, item: SourceObject, read_ahead: ShardReadAhead) -> None:
        """Load a window of files that have this extension, from this one on (blocking)."""
        if not self._numbers:
            self._numbers = {file.key: number for number, file in enumerate(self._files)}
        extension, first = splitext(item.key)[1], self._numbers.get(item.key, -1)
        if first < self._loaded.get(extension, 0):
            return
        window: list[SourceObject] = []
        size, stop = 0, first
        for file in islice(self._files, first, None):
            if size > read_ahead.window_bytes or len(window) == MAX_RANGES:
                break
            stop += 1
            if file.size <= _CONTENT and splitext(file.key)[1] == extension:
                window.append(file)
                size += file.size
        self._loaded[extension] = stop
        with suppress(S3Error, MeshdError):  # the read of a file reports it
            load = read_ahead.load_files(self.source, window)
            asyncio.run_coroutine_threadsafe(load, self._loop).result()


class ShardReader:
    """Reads shard views, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        archives: ArchiveService,
        objects: RemoteObjects,
        read_ahead: ShardReadAhead | None = None,
    ) -> None:
        """`read_ahead`: on a node with rotational disks."""
        self._store, self._archives = store, archives
        self._objects, self._read_ahead = objects, read_ahead
        self._layouts = ShardLayoutCache(store, clock, archives, self._objects, read_ahead)

    def __repr__(self) -> str:
        return f"<ShardReader, {self._layouts}>"

    async def find_object(self, view: ShardsView, key: str) -> AssembledObject:
        """Return an object of the view. Raises S3Error NoSuchKey, UnprocessableSource."""
        laid, shard = await self._find(view, key)
        source, ahead = self._source(view), self._read_ahead
        loading = None
        if ahead is not None:

            async def load(offset: int, length: int) -> None:
                open_source = partial(self._source, view)
                await ahead.load(view, laid.layout, open_source, (shard, offset, length))

            loading = ReadAhead(load, ahead.window_bytes)
        return AssembledObject(
            _record(shard),
            shard_sources(source, shard, ahead=loading),
            lambda proofs: shard_sources(source, shard, proofs),
            partial(add_shard_places, source, shard),
        )

    def _source(self, view: ShardsView) -> ShardSource:
        return ShardSource(self._store, self._archives, view.source, self._objects)

    async def shard(self, view: ShardsView, key: str) -> Shard:
        """Return a shard of the view. Raises S3Error NoSuchKey, UnprocessableSource."""
        return (await self._find(view, key))[1]

    async def _find(self, view: ShardsView, key: str) -> tuple[CachedLayout, Shard]:
        laid = await self._layouts.get_layout(view)
        shard = laid.layout.shards.get(key)
        if shard is not None:
            shard = await self._current(view, laid, shard)
            if shard is None:
                laid = await self._layouts.rescan(view)
                shard = laid.layout.shards.get(key)
        if shard is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return laid, shard

    async def _current(self, view: ShardsView, laid: CachedLayout, shard: Shard) -> Shard | None:
        """Return the shard of the present objects; None if that needs a new layout.

        The objects are looked up once while the store does not change.
        """
        revision = self._layouts.revision(view)
        if laid.checked.get(shard.key, laid.revision) == revision:
            return shard
        source = self._source(view)
        await source.lookup_remote({member.key for member in shard.members})
        now = await asyncio.to_thread(_looked_up, source, shard, view.keeps_positions)
        if now is None:
            return None
        if now is not shard:
            shard = laid.layout.shards[shard.key] = now
        laid.checked[shard.key] = revision
        return shard

    async def list_page(self, view: ShardsView, operation: ListObjects) -> ObjectListing:
        """Return a page of shards with their real sizes."""
        laid = await self._layouts.get_layout(view)
        return await asyncio.to_thread(_page, laid.layout, operation)  # in a thread: computes ETags


def _looked_up(source: ShardSource, shard: Shard, keeps_places: bool) -> Shard | None:
    """Return the shard, or its variant with replaced objects; None if they move in the layout (blocking)."""
    objects = {member.key: member for member in shard.members}
    if all(map(source.current_member_object, objects.values())):
        return shard
    return _refresh_shard(source, shard) if keeps_places else None


def _refresh_shard(source: ShardSource, shard: Shard) -> Shard | None:
    """Return the shard with the present objects of its members' keys; None if one is gone."""
    members: list[SourceObject] = []
    for member in shard.members:
        record = source.find_record(member.key)
        if record is None:
            return None
        members.append(member._replace(etag=record.etag, size=record.size, modified=record.modified))
    return shard.with_members(members)


def _record(shard: Shard) -> Record:
    """Return the record of a shard, which has no extents of its own."""
    headers = {"content-type": shard.content_type}
    return Record(shard.size, shard.etag, 0, shard.modified, (), headers)


def _page(layout: ShardLayout, operation: ListObjects) -> ObjectListing:
    def walk(prefix: str, after: str) -> Iterator[tuple[str, Shard]]:
        for at in range(layout.position_of(max(prefix, after)), len(layout.keys)):
            key = layout.keys[at]
            if not key.startswith(prefix):
                return
            if key > after:
                yield key, layout.shards[key]

    page = build_page(operation, walk)
    entries = [ObjectEntry(key, shard.size, shard.etag, shard.modified) for key, shard in page.items]
    return ObjectListing(tuple(entries), tuple(page.prefixes), page.truncated, page.last)
