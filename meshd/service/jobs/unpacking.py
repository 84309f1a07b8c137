"""Compressed archives, unpacked for the length of a job: afterwards any file is read where it lies.

Law: one pass over an archive; what it held is kept beside the job's plan under the archive's ETag, so that a
job killed while it unpacks does not begin anew. A copy and its list are used only when both are there.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, NamedTuple

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.kit import failpoints
from meshd.service.jobs.plans import scratch
from meshd.store.records import Meta
from meshwire.archives.index import ArchiveIndex
from meshwire.archives.kinds import archive_kind
from meshwire.columns import ColumnError
from meshwire.shardindex import index_tar

if TYPE_CHECKING:
    from meshd.assembly.catalog import Catalog
    from meshd.service.archives.reading import Archives
    from meshd.service.jobs.kinds import Running
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

UNPACKED = "unpacked/"


class _File(NamedTuple):
    """A file as the index is made of it."""

    name: str
    size: int
    data_offset: int
    type: str = "0"


def unpacked_name(etag: str, size: int) -> str:
    """What a copy is called, below the run's scratch."""
    return f"{UNPACKED}{etag}-{size:x}"


class Unpacking:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, catalog: Catalog, archives: Archives) -> None:
        self._store, self._catalog, self._archives = store, catalog, archives

    def __repr__(self) -> str:
        return "<Unpacking>"

    async def index(self, running: Running, bucket: str, key: str, record: Record) -> ArchiveIndex:
        """Where the files of an archive lie: in itself, or (`inflated`) in the copy that is there now. Raises
        BatchError BadSample."""
        kind = archive_kind(key)
        if kind in ("tar", "zip"):
            found = await self._archives.index(bucket, key, record)
            if not found.inflated:
                return found
        name = scratch(running) + unpacked_name(record.etag, record.size)
        return await self._kept(name) or await self._unpack(running, name, bucket, key, record)

    async def _kept(self, name: str) -> ArchiveIndex | None:
        document = await asyncio.to_thread(self._catalog.read, f"{name}.files")
        if document is not None and self._store.get(RESERVED_BUCKET, name) is not None:
            with suppress(ColumnError):  # another release wrote it
                return await asyncio.to_thread(ArchiveIndex.from_bytes, document)
        return None

    async def _unpack(
        self, running: Running, name: str, bucket: str, key: str, record: Record
    ) -> ArchiveIndex:
        writer = self._store.writer(RESERVED_BUCKET, name, size=None)
        found: list[_File] = []
        at = 0
        try:
            async with aclosing(self._archives.stream(bucket, key, record)) as files:
                async for file in files:
                    found.append(_File(file.name, file.size, at))
                    at += file.size
                    async for piece in file.pieces:
                        await writer.write(piece)
                        running.tally.unpacked += len(piece)
            await writer.commit(Meta(f"{record.etag}-{record.size:x}"))
        except BaseException:
            await writer.abort()
            raise
        failpoints.hit("jobs.unpacked")
        kind = archive_kind(key)
        assert kind is not None
        index = ArchiveIndex(kind, await asyncio.to_thread(index_tar, found), at, inflated=True)
        await self._catalog.write(f"{name}.files", await asyncio.to_thread(index.to_bytes))
        failpoints.hit("jobs.unpacked.listed")
        return index
