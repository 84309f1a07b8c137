"""Materialize jobs: write the objects of a view as ordinary objects.

Law: each object is what the view returns at that moment, including the ETag. The job walks the listing
of the view once, in order; objects that cannot be made are missing from the listing and from the
output.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.core.read_source import split_spans
from meshd.jobs.authorization import BucketGrant
from meshd.jobs.outputs import OutputDigest, OutputSpec, OutputWriter, remove_stale_outputs
from meshd.store.integrity.verification import (
    StreamVerifier,
    VerifiedExtents,
    damage_context,
    read_spans,
)
from meshd.util import failpoints
from meshwire.errors import S3Error
from meshwire.s3.operations import ListObjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.views.dispatch import ViewDispatcher
    from meshd.views.view_kind import AssembledObject
    from meshwire.s3.result_types import ObjectEntry

_PAGE: Final = 1000
_AT_A_TIME: Final = 8
_TRIES: Final = 5
_SMALL: Final = 4 << 20
_OTHERWISE: Final = "application/octet-stream"


class MaterializeJob:
    """Writes the objects of a view. One instance per node, in the coordinator."""

    def __init__(self, tools: JobServices, views: ViewDispatcher) -> None:
        self._tools, self._views = tools, views

    async def run_job(self, running: JobRun) -> None:
        """Run a job: see `JobKind.run_job`."""
        spec, tally = running.spec, running.tally
        grant = BucketGrant.for_bucket(self._tools.access, running.caller, "s3:GetObject", spec.source.bucket)
        writer = OutputWriter(self._tools, running)
        present: set[str] = set()
        proofs = VerifiedExtents()
        limit = asyncio.Semaphore(_AT_A_TIME)
        tally.phase = "writing"
        async with asyncio.TaskGroup() as group:
            async for entry in self._entries(running):
                grant.require_access(entry.key)
                present.add(spec.target.prefix + entry.key)
                await limit.acquire()
                task = group.create_task(self._one(running, writer, entry, proofs))
                task.add_done_callback(lambda _: limit.release())
        failpoints.hit("jobs.materialized")
        tally.phase = "tidying"
        await remove_stale_outputs(self._tools, running, frozenset(present))

    async def _entries(self, running: JobRun) -> AsyncIterator[ObjectEntry]:
        """Yield the objects of the view, one page at a time; the known totals grow with the pages."""
        source, tally = running.spec.source, running.tally
        after, more = "", True
        while more:
            operation = ListObjects(source.bucket, 2, prefix=source.prefix, after=after, max_keys=_PAGE)
            page = await self._views.list_page(operation)
            if page is None:
                raise S3Error("NoSuchBucket", f"{source.bucket} is no longer a view.")
            tally.outputs_total += len(page.entries)
            tally.samples_total = tally.outputs_total
            tally.bytes_total += sum(entry.size for entry in page.entries)
            for entry in page.entries:
                yield entry
            after, more = page.next_after, page.truncated

    async def _one(
        self, running: JobRun, writer: OutputWriter, entry: ObjectEntry, proofs: VerifiedExtents
    ) -> None:
        """Write one object; retry if the source changes at the same moment."""
        for attempt in range(_TRIES):
            try:
                with damage_context(f"s3://{running.spec.source.bucket}/{entry.key}"):
                    there = await self._write_once(running, writer, entry, proofs)
            except S3Error as error:
                if error.code not in ("SlowDown", "ServiceUnavailable") or attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(0.1 * 2**attempt)
            else:
                running.tally.record_output(1, entry.size, there=there)
                return

    async def _write_once(
        self, running: JobRun, writer: OutputWriter, entry: ObjectEntry, proofs: VerifiedExtents
    ) -> bool:
        """Write an object unless it exists already. Returns whether it existed."""
        made = await self._views.find_assembled(running.spec.source.bucket, entry.key)
        if made is None:
            raise S3Error("NoSuchBucket", f"{running.spec.source.bucket} is no longer a view.")
        record = made.record
        kind = record.headers.get("content-type", _OTHERWISE)
        output = OutputSpec(running.spec.target.prefix + entry.key, record.size, record.etag, kind)
        if await writer.output_exists(output):
            return True
        sums = OutputDigest(record.etag)
        await writer.write_output(output, _body(made, sums, proofs), sums)
        return False


async def _body(
    made: AssembledObject, sums: OutputDigest, proofs: VerifiedExtents
) -> AsyncGenerator[bytes, None]:
    crc, passing = 0, StreamVerifier()
    async with aclosing(made.groups_for_copy(proofs, 0, made.record.size)) as groups:
        async for spans in groups:
            await proofs.require_verified(spans)
            for few in split_spans(spans, _SMALL):
                data, crc = await asyncio.to_thread(read_spans, few, passing, crc)
                yield data
    sums.checksums = {"crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode()}
