"""Jobs that write archives: objects into shards, shards into other shards.

Law: a shard is written by one pass over its files, in the plan's order. Invariant: memory is two groups a
shard under way.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import closing
from typing import TYPE_CHECKING, Final

from awscrt.checksums import crc32c

from meshd.service.jobs.archives.compressing import COMPRESSORS
from meshd.service.jobs.archives.packing import tar_groups, tar_size
from meshd.service.jobs.archives.zipping import ZipPacking
from meshd.service.jobs.principals import Grant
from meshd.service.jobs.reading import SourceReader, compare_pieces, read_pieces
from meshd.service.jobs.tidying import remove_stale
from meshd.service.jobs.writing import Output, OutputWriter, Sums
from meshd.store.proving import Proofs
from meshwire.documents import PlanError
from meshwire.jobspecs import FORMATS
from meshwire.samples import Evaluation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from meshd.service.jobs.archives.packing import Group
    from meshd.service.jobs.contents import Contents
    from meshd.service.jobs.inventories import Inventories
    from meshd.service.jobs.kinds import Running, Tools
    from meshd.service.jobs.outputs import Lent
    from meshd.service.jobs.plans import PlanShelf
    from meshd.service.jobs.reading import Readable
    from meshwire.jobplans import FileList, JobPlan, SourceFile
    from meshwire.jobspecs import JobSpec

_AT_A_TIME: Final = 2


class Sharding:
    """One a node (the steward's)."""

    def __init__(self, tools: Tools, inventories: Inventories, shelf: PlanShelf) -> None:
        self._tools, self._inventories, self._shelf = tools, inventories, shelf

    def __repr__(self) -> str:
        return "<Sharding>"

    async def work(self, running: Running) -> None:
        """See JobKind.work."""
        tally, tools = running.tally, self._tools
        plan = await self._shelf.plan(running, lambda: self._plan(running))
        tally.phase = "writing"
        tally.outputs_total, tally.bytes_total = len(plan), plan.total
        tally.samples_total = int(plan.samples.sum())
        writer = OutputWriter(tools, running)
        numbers, proofs = iter(range(len(plan))), Proofs()
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_A_TIME):
                group.create_task(self._lane(running, plan, writer, numbers, proofs))
        tally.phase = "tidying"
        await remove_stale(tools, running, frozenset(plan.outputs))

    async def _lane(
        self,
        running: Running,
        plan: JobPlan,
        writer: OutputWriter,
        numbers: Iterator[int],
        proofs: Proofs,
    ) -> None:
        with closing(SourceReader(self._tools, running, plan, proofs)) as reader:
            await _Lane(running, plan, reader, writer).run(numbers)

    async def _plan(self, running: Running) -> JobPlan:
        spec = running.spec
        grant = Grant.of(self._tools.access, running.caller, "s3:GetObject", spec.source.bucket)
        look = self._inventories.objects if spec.kind == "shard" else self._inventories.archives
        files, contents = await look(running, grant)
        if not len(files):
            what = "objects" if spec.kind == "shard" else "files in archives"
            raise PlanError("source", f"there are no {what} under {spec.source} that fit")
        return await asyncio.to_thread(_laid_out, files, contents, spec)


def _laid_out(files: FileList, contents: Contents, spec: JobSpec) -> JobPlan:
    below = "" if files.archives else spec.source.prefix
    evaluation = Evaluation(contents.read)
    return files.laid_out(
        spec.layout, spec.target.prefix, f".{spec.format}", below=below, evaluation=evaluation
    )


class _Lane:
    """Writes one output after the other, with a buffer of its own."""

    def __init__(self, running: Running, plan: JobPlan, reader: SourceReader, writer: OutputWriter) -> None:
        self._running, self._plan, self._reader, self._writer = running, plan, reader, writer
        self._buffers = _Buffers()
        self._whole = running.spec.kind == "shard"  # files are objects, and compared as they pass

    async def run(self, numbers: Iterator[int]) -> None:
        plan, tally = self._plan, self._running.tally
        form = self._running.spec.format
        for number in numbers:
            key, made_of = plan.outputs[number], await asyncio.to_thread(plan.digest, number, form)
            files = await asyncio.to_thread(plan.of, number)
            size = tar_size(files) if form == "tar" else None
            output = Output(key, size, made_of, FORMATS[form])
            there = await self._writer.is_there(output)
            if not there:
                sums = Sums(f"{made_of}-{max(1, len(files))}")
                await self._writer.write(output, self._made(form, files, sums), sums)
            tally.done(int(plan.samples[number]), sum(item.size for item in files), there=there)

    def _made(self, form: str, files: Sequence[SourceFile], sums: Sums) -> AsyncGenerator[Lent, None]:
        if form in COMPRESSORS:
            return self._compressed(tar_groups(files), sums)
        if form == "zip":
            packing = ZipPacking(files)
            return self._body(packing.groups(), sums, packing.seal)
        return self._body(tar_groups(files), sums)

    async def _body(
        self, groups: Iterator[Group], sums: Sums, seal: Callable[[memoryview], None] | None = None
    ) -> AsyncGenerator[Lent, None]:
        crc = 0
        for group in groups:
            buffer = self._buffers.take(group.size)
            opened = await self._opened(group)
            crc = await asyncio.to_thread(self._fill, buffer, group, opened, crc, seal)
            yield buffer
        sums.checksums = {"crc32c": _spelled(crc)}

    async def _compressed(self, groups: Iterator[Group], sums: Sums) -> AsyncGenerator[Lent, None]:
        compressor = COMPRESSORS[self._running.spec.format]()
        crc = 0
        for group in groups:
            buffer = self._buffers.take(group.size)
            opened = await self._opened(group)
            await asyncio.to_thread(self._fill, buffer, group, opened, 0)
            data = await asyncio.to_thread(compressor.compress, buffer)
            crc = crc32c(data, crc)
            yield data
        data = await asyncio.to_thread(compressor.flush)
        crc = crc32c(data, crc)
        yield data
        sums.checksums = {"crc32c": _spelled(crc)}

    async def _opened(self, group: Group) -> dict[int, Readable]:
        opened = await self._reader.opened(group.pieces)
        if not self._whole:
            await self._reader.prove(group.pieces, opened)
        return opened

    def _fill(
        self,
        buffer: memoryview,
        group: Group,
        opened: dict[int, Readable],
        crc: int,
        seal: Callable[[memoryview], None] | None = None,
    ) -> int:
        """Put a group's bytes into the buffer, and what `seal` makes of them; the checksum so far (blocking).
        Raises CorruptExtentError."""
        for at, data in group.made:
            buffer[at : at + len(data)] = data
        read_pieces(buffer, group.pieces, opened)
        if self._whole:
            compare_pieces(buffer, group.pieces, opened)
        if seal is not None:
            seal(buffer)
        total: int = crc32c(buffer, crc)
        return total


def _spelled(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class _Buffers:
    """Memory used in turn: new pages cost more than filling them. What is taken is good until the next but
    one is."""

    def __init__(self) -> None:
        self._idle, self._busy = bytearray(), bytearray()

    def take(self, size: int) -> memoryview:
        self._idle, self._busy = self._busy, self._idle
        if len(self._busy) < size:
            self._busy = bytearray(size + (size >> 3))
        return memoryview(self._busy)[:size]
