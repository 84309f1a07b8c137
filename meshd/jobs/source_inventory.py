"""Source inventory of a job: the pinned objects, the files inside archives, and small files' contents.

Law: the job's user must be allowed to read every object; a forbidden object is an error, never skipped.
An unreadable archive fails the job or is skipped under its own name. Small files are read in a thread
and only while the object is unchanged; a file that is too large or gone has no content for expressions.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.core.peer_source import ObjectRange
from meshd.jobs.scratch import ArchiveDecompressor, scratch_prefix, unpacked_name
from meshd.peer_reads.remote_objects import BlockingObjects
from meshwire.dataset.archive_paths import archive_stem
from meshwire.formats.shard_encoding import SourceObject
from meshwire.jobs.job_plan import FileList
from meshwire.jobs.job_spec import is_archive

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.jobs.authorization import BucketGrant
    from meshd.jobs.job_kind import JobRun
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.archive_index import ArchiveIndex
    from meshwire.jobs.job_spec import JobSpec


_CONTENT: Final = 64 << 10


class SmallFileReader:
    """Reads small files for expressions, for one plan. Construct it in the event loop.

    `unpacked`: the decompressed copies of archives, by key; `sizes`: decompressed sizes of archives on other
    nodes.
    """

    def __init__(self, store: ObjectStore, bucket: str, objects: RemoteObjects) -> None:
        self._store, self._bucket = store, bucket
        self._waiting = None if objects.single_node else BlockingObjects(objects)
        self.unpacked: dict[str, Record | None] = {}
        self.sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<SmallFileReader of {self._bucket}>"

    def read(self, item: SourceObject) -> bytes | None:
        """Read a file (blocking): see `meshwire.views.sample_groups.ReadContents`."""
        if item.size > _CONTENT:
            return None
        record = self.unpacked[item.key] if item.key in self.unpacked else self._current_record(item)
        if record is None and self._waiting is not None and item.key not in self.unpacked:
            return self._read_remote(self._waiting, item)
        return None if record is None else self._read(record, item.offset, item.size)

    def _read_remote(self, waiting: BlockingObjects, item: SourceObject) -> bytes | None:
        size = self.sizes.get(item.key, -1)
        try:
            return waiting.read_part(
                ObjectRange(self._bucket, item.key, item.etag, size, item.offset, item.size)
            )
        except BatchError as error:
            if error.code == "Busy":
                raise
            return None

    def _current_record(self, item: SourceObject) -> Record | None:
        record = self._store.get(self._bucket, item.key)
        return record if record is not None and record.etag == item.etag else None

    def _read(self, record: Record, offset: int, length: int) -> bytes | None:
        parts: list[bytes] = []
        for place in self._store.locate(record):
            taken = min(length, place.length - offset)
            if taken > 0:
                try:
                    fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:  # moved since the lookup
                    return None
                try:
                    parts.append(os.pread(fd, taken, place.offset + offset))
                finally:
                    os.close(fd)
                length -= taken
            offset = max(0, offset - place.length)
        return b"".join(parts)


_PAGE: Final = 1000


class SourceInventory:
    """Lists the sources of jobs. One instance per node, in the coordinator."""

    def __init__(
        self, store: ObjectStore, catalog: DocumentStore, archives: ArchiveService, objects: RemoteObjects
    ) -> None:
        self._store, self._archives, self._objects = store, archives, objects
        self._unpacking = ArchiveDecompressor(store, catalog, archives)

    async def list_source_files(
        self, running: JobRun, grant: BucketGrant
    ) -> tuple[FileList, SmallFileReader]:
        """Return the source's objects as files, named relative to its folder."""
        spec, found = running.spec, FileList()
        start = np.zeros(1, dtype=np.int64)
        async for key, record in self._list(spec, grant):
            if spec.layout.includes_key(key):
                name = key[len(spec.source.prefix) :].lstrip("/") or key
                found.add(_source(key, record), [name], start, np.array([record.size]))
        return found, SmallFileReader(self._store, spec.source.bucket, self._objects)

    async def list_archive_files(
        self, running: JobRun, grant: BucketGrant
    ) -> tuple[FileList, SmallFileReader]:
        """Return the files in the source's archives. Raises BatchError BadSample."""
        spec, found = running.spec, FileList(archives=True)
        contents = SmallFileReader(self._store, spec.source.bucket, self._objects)
        async for key, record in self._list(spec, grant):
            if not is_archive(key):
                continue
            try:
                await self._add(found, contents, running, key, record)
            except BatchError as error:
                if error.code != "BadSample" or spec.on_bad != "skip":
                    raise
                running.tally.record_failure(f"s3://{spec.source.bucket}/{key}", error.message)
        return found, contents

    async def _add(
        self, found: FileList, contents: SmallFileReader, running: JobRun, key: str, record: Record
    ) -> None:
        spec = running.spec
        bucket = spec.source.bucket
        if self._objects.single_node:
            index = await self._unpacking.decompressed_index(running, bucket, key, record)
        else:  # a node that holds it decompresses it: offsets are the same whichever node runs the job
            index = await self._archives.get_index(bucket, key, record)
        folder, match = _folder(spec, key), spec.layout.match
        names = list(index.names)
        last = {name: number for number, name in enumerate(names)}  # the last file of a repeated name counts
        chosen = sorted(number for name, number in last.items() if not match or name.endswith(match))
        offsets, sizes = index.offsets[chosen], index.sizes[chosen]
        shown = [folder + _clean_name(names[number]) for number in chosen]
        found.add(_source(key, record), shown, offsets, sizes, unpacked=index.inflated)
        if index.inflated and spec.layout.reads_files:
            await self._note_inflated(contents, running, key, record, index)

    async def _note_inflated(
        self, contents: SmallFileReader, running: JobRun, key: str, record: Record, index: ArchiveIndex
    ) -> None:
        """Record where the files of a compressed archive are read from."""
        bucket, objects = running.spec.source.bucket, self._objects
        here = objects.local_record(bucket, key, record.etag)
        if objects.single_node:
            name = scratch_prefix(running) + unpacked_name(record.etag, record.size)
            contents.unpacked[key] = self._store.get(RESERVED_BUCKET, name)
        elif here is not None:
            contents.unpacked[key] = await self._archives.decompressed(bucket, key, here)
        else:
            contents.sizes[key] = index.size

    async def _list(self, spec: JobSpec, grant: BucketGrant) -> AsyncGenerator[tuple[str, Record], None]:
        """Yield the source's objects in the order of their keys."""
        bucket, prefix = spec.source.bucket, spec.source.prefix
        after, more = "", True
        while more:
            if self._objects.single_node:
                page = await asyncio.to_thread(
                    self._store.list, bucket, prefix=prefix, after=after, limit=_PAGE
                )
            else:
                page = await self._objects.list_page(bucket, prefix, after, _PAGE)
            for key, record in page.entries:
                grant.require_access(key)
                yield key, record
            after, more = page.next_after, page.truncated


def _source(key: str, record: Record) -> SourceObject:
    return SourceObject(key, record.etag, record.size, record.modified)


def _folder(spec: JobSpec, key: str) -> str:
    """Return the prefix of the names of an archive's files."""
    if spec.names == "keep":
        return ""
    below = archive_stem(key)[spec.source.prefix.rfind("/") + 1 :].lstrip("/")
    return f"{below}/"


def _clean_name(name: str) -> str:
    """Return a member's name as a relative path that stays inside the folder it is put in."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"
