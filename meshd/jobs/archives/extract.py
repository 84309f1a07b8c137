"""Extract jobs: write every file in a set of archives as an object of its own.

Law: an extracted object equals a PUT of the same bytes: ETag, checksum, content type from the name.
Adjacent small files are read and committed together.
"""

from __future__ import annotations

import asyncio
import mimetypes
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.jobs.authorization import BucketGrant
from meshd.jobs.outputs import OutputDigest, OutputSpec, write_planned_outputs
from meshd.jobs.source_reader import GROUP_BYTES, SourceRange, read_ranges
from meshwire import names
from meshwire.checksums.body_checksums import BodyDigests, BodyVerifier
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.jobs.outputs import OutputWriter
    from meshd.jobs.scratch import PlanStore
    from meshd.jobs.source_inventory import SourceInventory
    from meshd.jobs.source_reader import ReadableSource, SourceReader
    from meshwire.jobs.job_plan import FileList, JobPlan, SourceFile

_BATCH: Final = 256
_OTHERWISE: Final = "application/octet-stream"


class ExtractJob:
    """Extracts archives to objects. One instance per node, in the coordinator."""

    def __init__(self, tools: JobServices, inventories: SourceInventory, plan_store: PlanStore) -> None:
        self._tools, self._inventories, self._plan_store = tools, inventories, plan_store

    async def run_job(self, running: JobRun) -> None:
        """Run a job: see `JobKind.run_job`."""
        plan = await self._plan_store.load_or_make_plan(running, lambda: self._plan(running))
        running.tally.samples_total = len(plan)
        batches = _batches(plan)

        async def extract(reader: SourceReader, writer: OutputWriter) -> None:
            await _BatchExtractor(running, plan, reader, writer).run(batches)

        await write_planned_outputs(self._tools, running, plan, extract)

    async def _plan(self, running: JobRun) -> JobPlan:
        spec = running.spec
        grant = BucketGrant.for_bucket(self._tools.access, running.caller, "s3:GetObject", spec.source.bucket)
        files, _ = await self._inventories.list_archive_files(running, grant)
        if not len(files):
            raise PlanError("source", f"there are no matching files in archives under {spec.source}")
        return await asyncio.to_thread(_plan_outputs, files, spec.target.prefix)


def _plan_outputs(files: FileList, prefix: str) -> JobPlan:
    """Return the plan of the outputs. Raises PlanError for names that cannot be keys."""
    plan = files.plan_file_outputs(prefix)
    for key in plan.outputs:
        try:
            names.check_key(key)
        except names.NameProblemError as error:
            raise PlanError("source", f"{key[:200]!r} is not a valid key: {error}") from None
    return plan


def _batches(plan: JobPlan) -> Iterator[tuple[int, int]]:
    """Yield runs of files that are read together; a large file is a run of its own."""
    first = weight = 0
    for number, size in enumerate(plan.size.tolist()):
        if number > first and (weight + size > GROUP_BYTES or number - first == _BATCH):
            yield first, number
            first, weight = number, 0
        weight += size
    yield first, len(plan)


class _BatchExtractor:
    """Extracts batches, one after the other."""

    def __init__(self, running: JobRun, plan: JobPlan, reader: SourceReader, writer: OutputWriter) -> None:
        self._tally, self._plan, self._reader, self._writer = running.tally, plan, reader, writer

    async def run(self, batches: Iterator[tuple[int, int]]) -> None:
        for first, end in batches:
            keys = self._plan.outputs.take_rows(np.arange(first, end))
            wanted = await self._missing(self._plan.files(first, end), keys)
            if wanted and wanted[0][1].size > GROUP_BYTES:
                await self._store_large(*wanted[0])
            elif wanted:
                await self._store(wanted)

    async def _missing(
        self, files: Sequence[SourceFile], keys: Sequence[str]
    ) -> list[tuple[OutputSpec, SourceFile]]:
        """Return the outputs that do not exist yet."""
        outputs = [
            OutputSpec(
                key, item.size, self._plan.file_digest(item), mimetypes.guess_type(key)[0] or _OTHERWISE
            )
            for key, item in zip(keys, files, strict=True)
        ]
        missing = []
        there = await self._writer.which_exist(outputs)
        for output, item, done in zip(outputs, files, there, strict=True):
            if done:
                self._tally.record_output(1, item.size, there=True)
            else:
                missing.append((output, item))
        return missing

    async def _store(self, wanted: Sequence[tuple[OutputSpec, SourceFile]]) -> None:
        """Write small files, all at once."""
        opened = await self._open_sources([item for _, item in wanted])
        bodies = await asyncio.to_thread(_read, [item for _, item in wanted], opened)
        async with asyncio.TaskGroup() as group:
            for (output, _), (data, sums) in zip(wanted, bodies, strict=True):
                group.create_task(self._commit(output, _one(data), sums))

    async def _store_large(self, output: OutputSpec, item: SourceFile) -> None:
        sums = OutputDigest()
        await self._commit(output, self._pieces(item, sums), sums)

    async def _commit(
        self, output: OutputSpec, body: AsyncGenerator[bytes, None], sums: OutputDigest
    ) -> None:
        await self._writer.write_output(output, body, sums)
        self._tally.record_output(1, sums.size, there=False)

    async def _pieces(self, item: SourceFile, sums: OutputDigest) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(BodyDigests())
        for at in range(0, item.size, GROUP_BYTES):
            part = item._replace(offset=item.offset + at, size=min(GROUP_BYTES, item.size - at))
            data = await asyncio.to_thread(_hash_source, part, await self._open_sources([part]), verifier)
            yield data
        sums.set_from_verifier(verifier)

    async def _open_sources(self, files: Sequence[SourceFile]) -> dict[int, ReadableSource]:
        pieces = _place_files(files)
        opened = await self._reader.open_sources(pieces)
        await self._reader.verify_extents(pieces, opened)
        return opened


def _place_files(files: Sequence[SourceFile]) -> list[SourceRange]:
    """Place the files in a buffer, one after the other."""
    pieces: list[SourceRange] = []
    size = 0
    for item in files:
        pieces.append(SourceRange(size, item.source, item.offset, item.size))
        size += item.size
    return pieces


def _read(files: Sequence[SourceFile], opened: dict[int, ReadableSource]) -> list[tuple[bytes, OutputDigest]]:
    """Return the bytes of each file, and the digests that a PUT would store (blocking)."""
    pieces = _place_files(files)
    buffer = bytearray(sum(item.size for item in files))
    read_ranges(memoryview(buffer), pieces, opened)
    found = []
    for piece in pieces:
        data = bytes(buffer[piece.at : piece.at + piece.length])
        verifier = BodyVerifier(BodyDigests())
        verifier.update(data)
        sums = OutputDigest()
        sums.set_from_verifier(verifier)
        found.append((data, sums))
    return found


def _hash_source(item: SourceFile, opened: dict[int, ReadableSource], verifier: BodyVerifier) -> bytes:
    buffer = bytearray(item.size)
    read_ranges(memoryview(buffer), [SourceRange(0, item.source, item.offset, item.size)], opened)
    verifier.update(buffer)
    return bytes(buffer)


async def _one(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data
