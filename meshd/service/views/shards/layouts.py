"""Layouts of shard views, made anew as their sources change.

Law: a layout is of the source as a scan found it. A scan that finds what the last one found keeps its layout,
and what expressions made of files that are still the same is not worked out again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshd.service.semantics.translation import store_errors
from meshd.service.views.failing import unreachable
from meshd.service.views.scanning import Scans
from meshd.service.views.shards.pieces import Source, unprocessable
from meshd.telemetry import metrics
from meshwire.samples import Evaluation
from meshwire.shardforms import SourceObject
from meshwire.shardlayouts import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.kit.clock import Clock
    from meshd.service.archives.reading import Archives
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.expressions import Value
    from meshwire.samples import Answered
    from meshwire.shardlayouts import ShardLayout
    from meshwire.shardviews import ShardsView

_PAGE: Final = 1000
_KEPT: Final = 8
_CONTENT: Final = 64 << 10
"""Files up to here are read for expressions; larger ones are none."""


@dataclass(slots=True)
class Laid:
    """`objects`: what was found; `revision`: of the store, before; `checked`: shards, each with the revision
    at which its members were looked up."""

    objects: list[SourceObject]
    layout: ShardLayout
    answered: Mapping[Answered, Value]
    revision: object
    checked: dict[str, object] = field(default_factory=dict)


class Layouts:
    """One a worker."""

    def __init__(self, store: ObjectStore, clock: Clock, archives: Archives, mesh: RemoteObjects) -> None:
        self._store, self._clock, self._archives, self._mesh = store, clock, archives, mesh
        self._scans: Scans[ShardsView, Laid] = Scans(
            self.revision, clock, self._scan, lambda view: mesh.births([view.source])
        )
        self._last: OrderedDict[ShardsView, Laid] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Layouts, {self._scans}>"

    def revision(self, view: ShardsView) -> object:
        """See `RemoteObjects.revision`."""
        return self._mesh.revision([view.source])

    async def recent(self, view: ShardsView) -> Laid:
        """The layout of the last scan, if that is recent enough. Raises S3Error UnprocessableSource."""
        return await self._scans.current(view)

    async def again(self, view: ShardsView) -> Laid:
        """That of a new scan, or of one under way. Raises like `recent`."""
        self._scans.forget(view)
        return await self._scans.current(view)

    async def _scan(self, view: ShardsView) -> Laid:
        began, revision, last = self._clock.monotonic(), self.revision(view), self._last.get(view)
        with store_errors():
            objects = await self._found(view)
            same = last is not None and await asyncio.to_thread(objects.__eq__, last.objects)
            if last is not None and same:  # what was written is elsewhere
                laid = Laid(last.objects, last.layout, last.answered, revision)
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
        self, view: ShardsView, objects: list[SourceObject], revision: object, known: Mapping[Answered, Value]
    ) -> Laid:
        contents = _Contents(Source(self._store, self._archives, view.source, self._mesh))
        evaluation = Evaluation(contents.read, known)
        files = objects
        if view.samples == "archives":
            files = await self._members(view, objects, contents)
        if view.reads_files:
            await contents.source.look_up({file.key for file in files})
        layout = await asyncio.to_thread(lay_out, view, files, evaluation)
        return Laid(objects, layout, evaluation.answered, revision)

    async def _found(self, view: ShardsView) -> list[SourceObject]:
        if self._mesh.alone:
            return await asyncio.to_thread(self._objects, view)
        with unreachable():
            entries = await self._mesh.entries(view.source, view.prefix)
        return [
            SourceObject(key, record.etag, record.size, record.modified)
            for key, record in entries
            if view.takes(key)
        ]

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
        archives = list(archives)
        await contents.source.look_up({archive.key for archive in archives})
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
        return None if record is None else self.source.read(item, record)
