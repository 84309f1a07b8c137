"""Materialize jobs: write the objects of a view as ordinary objects.

Law: each object is what the view returns at that moment, including the ETag. The job walks the listing
of the view once, in order; objects that cannot be made are missing from the listing and from the
output. From rotational disks, what as many objects as fit a window are made of is loaded in the order of the
disks before the first of them is written.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

from meshd.core.read_source import split_spans
from meshd.errors import MeshdError
from meshd.jobs.authorization import BucketGrant
from meshd.jobs.outputs import OutputDigest, OutputSpec, OutputWriter, remove_stale_outputs
from meshd.peer_reads.load_window import LoadWindow
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
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.store.records import Span
    from meshd.views.dispatch import ViewDispatcher
    from meshd.views.view_kind import AssembledObject
    from meshwire.s3.result_types import ObjectEntry

_PAGE: Final = 1000
_AT_A_TIME: Final = 8
_WINDOW_OBJECTS: Final = 8192
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
            async for entries in self._windows(running):
                for entry in entries:
                    grant.require_access(entry.key)
                    present.add(spec.target.prefix + entry.key)
                await self._load(running, writer, entries)
                for entry in entries:
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

    async def _windows(self, running: JobRun) -> AsyncIterator[list[ObjectEntry]]:
        """Yield the objects of the view, as many at a time as fit a window; without one, one at a time."""
        window: list[ObjectEntry] = []
        size = 0
        async for entry in self._entries(running):
            if window and (size + entry.size > self._tools.window_bytes or len(window) == _WINDOW_OBJECTS):
                yield window
                window, size = [], 0
            window.append(entry)
            size += entry.size
        if window:
            yield window

    async def _load(self, running: JobRun, writer: OutputWriter, entries: Sequence[ObjectEntry]) -> None:
        """Load what these objects are made of, in so far as they have to be written. An object that is larger
        than a window is loaded while it is written."""
        if not self._tools.window_bytes or entries[0].size > self._tools.window_bytes:
            return
        found: list[tuple[OutputSpec, AssembledObject]] = []
        for entry in entries:
            with suppress(S3Error, MeshdError):  # the writer of the object reports it
                made = await self._views.find_assembled(running.spec.source.bucket, entry.key)
                if made is None or made.add_places is None:
                    return
                found.append((_output(running, entry, made), made))
        there = await writer.which_exist([output for output, _ in found])
        await self._load_ranges(
            [
                (made, 0, made.record.size)
                for (_, made), exists in zip(found, there, strict=True)
                if not exists
            ]
        )

    async def _load_ranges(self, ranges: Sequence[tuple[AssembledObject, int, int]]) -> None:
        """Load (offset, length) of these objects."""
        window = LoadWindow(self._tools.store)
        for made, offset, length in ranges:
            with suppress(S3Error, MeshdError):  # the reader of these bytes reports it
                if made.add_places is not None:
                    await made.add_places(window, offset, length)
        await window.load(self._tools.pages, self._tools.objects)

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
        record, output = made.record, _output(running, entry, made)
        if await writer.output_exists(output):
            return True
        sums = OutputDigest(record.etag)
        await writer.write_output(output, self._body(made, sums, proofs), sums)
        return False

    async def _body(
        self, made: AssembledObject, sums: OutputDigest, proofs: VerifiedExtents
    ) -> AsyncGenerator[bytes, None]:
        crc, passing = 0, StreamVerifier()
        async with aclosing(self._loaded_groups(made, proofs)) as groups:
            async for spans in groups:
                await proofs.require_verified(spans)
                for few in split_spans(spans, _SMALL):
                    data, crc = await asyncio.to_thread(read_spans, few, passing, crc)
                    yield data
        sums.checksums = {"crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode()}

    async def _loaded_groups(
        self, made: AssembledObject, proofs: VerifiedExtents
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Yield the bytes of an object. One that is larger than a window is loaded in pieces, each before it
        is read."""
        size, piece = made.record.size, self._tools.window_bytes // _AT_A_TIME
        if size <= self._tools.window_bytes or made.add_places is None:
            piece = 0
        for offset in range(0, size, piece or max(1, size)):
            length = min(piece or size, size - offset)
            if piece:
                await self._load_ranges([(made, offset, length)])
            async with aclosing(made.groups_for_copy(proofs, offset, length)) as groups:
                async for spans in groups:
                    yield spans


def _output(running: JobRun, entry: ObjectEntry, made: AssembledObject) -> OutputSpec:
    record = made.record
    kind = record.headers.get("content-type", _OTHERWISE)
    return OutputSpec(running.spec.target.prefix + entry.key, record.size, record.etag, kind)
