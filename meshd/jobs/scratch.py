"""Scratch objects of a job run: its stored plan and its decompressed archives.

Law: a plan is durable before the first output is written, and an interrupted run resumes with the same
plan: source changes apply to the next run only. An archive is decompressed once per run, and the copy
is used only together with its index. The scratch objects of a run are deleted when the run ends; none is
written afterwards.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, NamedTuple

from meshd.core.document_store import RESERVED_BUCKET, find_intact
from meshd.jobs.output_store import COMMIT_SECONDS
from meshd.store.records import Meta
from meshd.util import failpoints
from meshd.util.async_tasks import finish_before_cancel
from meshwire.dataset.archive_index import ArchiveIndex, index_tar
from meshwire.dataset.archive_paths import archive_kind
from meshwire.frame.columns import ColumnError
from meshwire.jobs.job_plan import JobPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.jobs.job_kind import JobRun
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record


_PAGE = 1000


def scratch_prefix(running: JobRun) -> str:
    """Return the prefix of all scratch objects of a run."""
    return f"jobs/{running.name}/"


class PlanStore:
    """Stores the plans of jobs. One instance per node, in the coordinator."""

    def __init__(self, store: ObjectStore, catalog: DocumentStore) -> None:
        self._store, self._catalog = store, catalog

    async def load_or_make_plan(self, running: JobRun, make: Callable[[], Awaitable[JobPlan]]) -> JobPlan:
        """Return the plan of a run; make and store it if there is none yet."""
        name = f"{scratch_prefix(running)}plan"
        document = await asyncio.to_thread(self._catalog.read_intact, name)
        if document is not None:
            try:
                return await asyncio.to_thread(JobPlan.from_bytes, document)
            except ColumnError:  # written by another release: rebuilt
                pass
        plan = await make()
        document = await asyncio.to_thread(plan.to_bytes)
        await finish_before_cancel(self._catalog.write_document(name, document), COMMIT_SECONDS)
        failpoints.hit("jobs.planned")
        return plan

    async def delete_job_scratch(self, job_id: str) -> None:
        """Delete the scratch objects of all runs of a job."""
        while keys := list(self._list_scratch_keys(f"jobs/{job_id}-")):
            await self._store.delete_many(RESERVED_BUCKET, keys)

    def job_ids(self) -> set[str]:
        """Return the jobs that have scratch objects."""
        found, after = set[str](), ""
        while (key := next(self._list_scratch_keys("jobs/", after), "")) != "":
            job_id = key.removeprefix("jobs/").partition("-")[0]
            found.add(job_id)
            after = f"jobs/{job_id}-\U0010ffff"
        return found

    def _list_scratch_keys(self, prefix: str, after: str = "") -> Iterator[str]:
        """Return a page of keys."""
        page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_PAGE)
        return iter([key for key, _ in page.entries])


UNPACKED_PREFIX = "unpacked/"


class _File(NamedTuple):
    """A file, as input of the index."""

    name: str
    size: int
    data_offset: int
    type: str = "0"


def unpacked_name(etag: str, size: int) -> str:
    """Return the name of a decompressed copy, below the scratch prefix of the run."""
    return f"{UNPACKED_PREFIX}{etag}-{size:x}"


class ArchiveDecompressor:
    """Decompresses archives for jobs. One instance per node, in the coordinator."""

    def __init__(self, store: ObjectStore, catalog: DocumentStore, archives: ArchiveService) -> None:
        self._store, self._catalog, self._archives = store, catalog, archives

    async def decompressed_index(
        self, running: JobRun, bucket: str, key: str, record: Record
    ) -> ArchiveIndex:
        """Return the positions of the files of an archive: in itself, or (`inflated`) in its present copy.

        Raises BatchError BadSample.
        """
        kind = archive_kind(key)
        if kind in ("tar", "zip"):
            found = await self._archives.get_index(bucket, key, record)
            if not found.inflated:
                return found
        name = scratch_prefix(running) + unpacked_name(record.etag, record.size)
        return await self._load_index(name) or await self._unpack(running, name, bucket, key, record)

    async def _load_index(self, name: str) -> ArchiveIndex | None:
        document = await asyncio.to_thread(self._catalog.read_intact, f"{name}.files")
        if document is not None and find_intact(self._store, name) is not None:
            with suppress(ColumnError):  # written by another release
                return await asyncio.to_thread(ArchiveIndex.from_bytes, document)
        return None

    async def _unpack(
        self, running: JobRun, name: str, bucket: str, key: str, record: Record
    ) -> ArchiveIndex:
        writer = self._store.writer(RESERVED_BUCKET, name, size=None)
        found: list[_File] = []
        at = 0
        try:
            async with aclosing(self._archives.local.stream_files(bucket, key, record)) as files:
                async for file in files:
                    found.append(_File(file.name, file.size, at))
                    at += file.size
                    async for piece in file.pieces:
                        await writer.write(piece)
                        running.tally.unpacked += len(piece)
            commit = writer.commit(Meta(f"{record.etag}-{record.size:x}"))
            await finish_before_cancel(commit, COMMIT_SECONDS)
        except BaseException:
            await writer.abort()
            raise
        failpoints.hit("jobs.unpacked")
        kind = archive_kind(key)
        assert kind is not None
        index = ArchiveIndex(kind, await asyncio.to_thread(index_tar, found), at, inflated=True)
        document = await asyncio.to_thread(index.to_bytes)
        await finish_before_cancel(self._catalog.write_document(f"{name}.files", document), COMMIT_SECONDS)
        failpoints.hit("jobs.unpacked.listed")
        return index
