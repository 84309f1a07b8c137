"""What a job finds in its source, pinned: objects, and the files in archives.

Law: every object is one the job's maker may read; one that may not be is an error, never left out. An archive
that cannot be read fails the job, or is skipped by its own name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import BatchError
from meshd.service.jobs.contents import Contents
from meshd.service.jobs.plans import scratch
from meshd.service.jobs.unpacking import Unpacking, unpacked_name
from meshwire.archives.kinds import archive_stem
from meshwire.jobplans import FileList
from meshwire.jobspecs import is_archive
from meshwire.shardforms import SourceObject

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.assembly.catalog import Catalog
    from meshd.service.archives.reading import Archives
    from meshd.service.jobs.kinds import Running
    from meshd.service.jobs.principals import Grant
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.archives.index import ArchiveIndex
    from meshwire.jobspecs import JobSpec

_PAGE: Final = 1000


class Inventories:
    """Makes them. One a node (the steward's)."""

    def __init__(
        self, store: ObjectStore, catalog: Catalog, archives: Archives, objects: RemoteObjects
    ) -> None:
        self._store, self._archives, self._objects = store, archives, objects
        self._unpacking = Unpacking(store, catalog, archives)

    def __repr__(self) -> str:
        return "<Inventories>"

    async def objects(self, running: Running, grant: Grant) -> tuple[FileList, Contents]:
        """The source's objects as files, named as they are below its folder."""
        spec, found = running.spec, FileList()
        start = np.zeros(1, dtype=np.int64)
        async for key, record in self._list(spec, grant):
            if spec.layout.takes(key):
                name = key[len(spec.source.prefix) :].lstrip("/") or key
                found.add(_source(key, record), [name], start, np.array([record.size]))
        return found, Contents(self._store, spec.source.bucket, self._objects)

    async def archives(self, running: Running, grant: Grant) -> tuple[FileList, Contents]:
        """The files in the source's archives. Raises BatchError BadSample."""
        spec, found = running.spec, FileList(archives=True)
        contents = Contents(self._store, spec.source.bucket, self._objects)
        async for key, record in self._list(spec, grant):
            if not is_archive(key):
                continue
            try:
                await self._add(found, contents, running, key, record)
            except BatchError as error:
                if error.code != "BadSample" or spec.on_bad != "skip":
                    raise
                running.tally.fail(f"s3://{spec.source.bucket}/{key}", error.message)
        return found, contents

    async def _add(
        self, found: FileList, contents: Contents, running: Running, key: str, record: Record
    ) -> None:
        spec = running.spec
        bucket = spec.source.bucket
        if self._objects.alone:
            index = await self._unpacking.index(running, bucket, key, record)
        else:  # whoever holds it inflates it: offsets are the same whichever node runs the job
            index = await self._archives.index(bucket, key, record)
        folder, match = _folder(spec, key), spec.layout.match
        names = list(index.names)
        last = {name: number for number, name in enumerate(names)}  # a name that stands twice was replaced
        chosen = sorted(number for name, number in last.items() if not match or name.endswith(match))
        offsets, sizes = index.offsets[chosen], index.sizes[chosen]
        shown = [folder + _cleaned(names[number]) for number in chosen]
        found.add(_source(key, record), shown, offsets, sizes, unpacked=index.inflated)
        if index.inflated and spec.layout.reads_files:
            await self._note_inflated(contents, running, key, record, index)

    async def _note_inflated(
        self, contents: Contents, running: Running, key: str, record: Record, index: ArchiveIndex
    ) -> None:
        """Where the files of a compressed archive are read."""
        bucket, objects = running.spec.source.bucket, self._objects
        here = objects.here(bucket, key, record.etag)
        if objects.alone:
            name = scratch(running) + unpacked_name(record.etag, record.size)
            contents.unpacked[key] = self._store.get(RESERVED_BUCKET, name)
        elif here is not None:
            contents.unpacked[key] = await self._archives.plain(bucket, key, here)
        else:
            contents.sizes[key] = index.size

    async def _list(self, spec: JobSpec, grant: Grant) -> AsyncGenerator[tuple[str, Record], None]:
        """The source's objects in order of their keys."""
        bucket, prefix = spec.source.bucket, spec.source.prefix
        after, more = "", True
        while more:
            if self._objects.alone:
                page = await asyncio.to_thread(
                    self._store.list, bucket, prefix=prefix, after=after, limit=_PAGE
                )
            else:
                page = await self._objects.page(bucket, prefix, after, _PAGE)
            for key, record in page.entries:
                grant.require(key)
                yield key, record
            after, more = page.next_after, page.truncated


def _source(key: str, record: Record) -> SourceObject:
    return SourceObject(key, record.etag, record.size, record.modified)


def _folder(spec: JobSpec, key: str) -> str:
    """What the names of an archive's files begin with."""
    if spec.names == "keep":
        return ""
    below = archive_stem(key)[spec.source.prefix.rfind("/") + 1 :].lstrip("/")
    return f"{below}/"


def _cleaned(name: str) -> str:
    """A member's name as a relative one: nothing above or beside the folder it is put in."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"
