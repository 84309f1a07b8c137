"""Shard and reshard jobs: pack objects, or the files in existing shards, into new shards.

Law: a shard is written in one pass over its files, in plan order. The same files give the same
bytes: tar members have plain headers (no owner, no time, mode 0644); zip members are stored uncompressed so
that each can be read in place; a compressed shard is one stream at a fixed level. Invariant: memory is two
groups for each shard in progress.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import zlib
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from awscrt.checksums import crc32c
from zlib_ng import zlib_ng

from meshd.jobs.authorization import BucketGrant
from meshd.jobs.outputs import OutputDigest, OutputSpec, write_planned_outputs
from meshd.jobs.source_loader import OutputCursor, SourceLoader
from meshd.jobs.source_reader import GROUP_BYTES, SourceRange, read_ranges, verify_ranges
from meshwire.formats.tar import BLOCK, END, padding, tar_member_header
from meshwire.formats.zip_archive import CRC_AT, central_directory, data_descriptor, zip_local_header
from meshwire.jobs.job_spec import FORMATS
from meshwire.strict_json import PlanError
from meshwire.views.sample_groups import Evaluation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

    from meshd.jobs.job_kind import JobRun, JobServices
    from meshd.jobs.output_store import BodyPiece
    from meshd.jobs.outputs import OutputWriter
    from meshd.jobs.scratch import PlanStore
    from meshd.jobs.source_inventory import SmallFileReader, SourceInventory
    from meshd.jobs.source_reader import ReadableSource, SourceReader
    from meshd.store.writer_api import Buffer
    from meshwire.jobs.job_plan import FileList, JobPlan, SourceFile
    from meshwire.jobs.job_spec import JobSpec


class ShardJob:
    """Packs samples into shards. One instance per node, in the coordinator."""

    def __init__(self, tools: JobServices, inventories: SourceInventory, plan_store: PlanStore) -> None:
        self._tools, self._inventories, self._plan_store = tools, inventories, plan_store

    async def run_job(self, running: JobRun) -> None:
        """Run a job: see `JobKind.run_job`."""
        plan = await self._plan_store.load_or_make_plan(running, lambda: self._plan(running))
        running.tally.samples_total = int(plan.samples.sum())
        numbers = iter(range(len(plan)))
        loader = SourceLoader(self._tools, plan)

        async def write(reader: SourceReader, writer: OutputWriter) -> None:
            await _ShardWriter(running, plan, reader, writer, loader).run(numbers)

        await write_planned_outputs(self._tools, running, plan, write)

    async def _plan(self, running: JobRun) -> JobPlan:
        spec = running.spec
        grant = BucketGrant.for_bucket(self._tools.access, running.caller, "s3:GetObject", spec.source.bucket)
        look = (
            self._inventories.list_source_files
            if spec.kind == "shard"
            else self._inventories.list_archive_files
        )
        files, contents = await look(running, grant)
        if not len(files):
            what = "objects" if spec.kind == "shard" else "files in archives"
            raise PlanError("source", f"there are no matching {what} under {spec.source}")
        return await asyncio.to_thread(_laid_out, files, contents, spec)


def _laid_out(files: FileList, contents: SmallFileReader, spec: JobSpec) -> JobPlan:
    below = "" if files.archives else spec.source.prefix
    evaluation = Evaluation(contents.read)
    return files.plan_shards(
        spec.layout, spec.target.prefix, f".{spec.format}", below=below, evaluation=evaluation
    )


class _ShardWriter:
    """Writes outputs, one after the other, with its own buffers."""

    def __init__(
        self,
        running: JobRun,
        plan: JobPlan,
        reader: SourceReader,
        writer: OutputWriter,
        loader: SourceLoader,
    ) -> None:
        self._running, self._plan, self._reader, self._writer = running, plan, reader, writer
        self._loader, self._cursor = loader, OutputCursor(loader, reader, plan, 0)
        self._buffers = _Buffers()
        self._whole = running.spec.kind == "shard"  # the files are whole objects, verified while read

    async def run(self, numbers: Iterator[int]) -> None:
        plan, tally = self._plan, self._running.tally
        form = self._running.spec.format
        for number in numbers:
            key, made_of = plan.outputs[number], await asyncio.to_thread(plan.output_digest, number, form)
            files = await asyncio.to_thread(plan.files_of_output, number)
            size = tar_size(files) if form == "tar" else None
            output = OutputSpec(key, size, made_of, FORMATS[form])
            there = await self._writer.output_exists(output)
            if not there:
                self._cursor = OutputCursor(self._loader, self._reader, plan, number)
                sums = OutputDigest(f"{made_of}-{max(1, len(files))}")
                await self._writer.write_output(output, self._make_body(form, files, sums), sums)
            tally.record_output(int(plan.samples[number]), sum(item.size for item in files), there=there)

    def _make_body(
        self, form: str, files: Sequence[SourceFile], sums: OutputDigest
    ) -> AsyncGenerator[BodyPiece, None]:
        if form in COMPRESSORS:
            return self._compress_body(tar_groups(files), sums)
        if form == "zip":
            packing = ZipLayout(files)
            return self._body(packing.groups(), sums, packing.fill_checksums)
        return self._body(tar_groups(files), sums)

    async def _body(
        self,
        groups: Iterator[ArchiveGroup],
        sums: OutputDigest,
        seal: Callable[[memoryview], None] | None = None,
    ) -> AsyncGenerator[BodyPiece, None]:
        crc = 0
        for group in groups:
            buffer = self._buffers.acquire_buffer(group.size)
            opened = await self._open_sources(group)
            crc = await asyncio.to_thread(self._fill, buffer, group, opened, crc, seal)
            yield buffer
        sums.checksums = {"crc32c": _base64_crc(crc)}

    async def _compress_body(
        self, groups: Iterator[ArchiveGroup], sums: OutputDigest
    ) -> AsyncGenerator[BodyPiece, None]:
        compressor = COMPRESSORS[self._running.spec.format]()
        crc = 0
        for group in groups:
            buffer = self._buffers.acquire_buffer(group.size)
            opened = await self._open_sources(group)
            await asyncio.to_thread(self._fill, buffer, group, opened, 0)
            data = await asyncio.to_thread(compressor.compress, buffer)
            crc = crc32c(data, crc)
            yield data
        data = await asyncio.to_thread(compressor.flush)
        crc = crc32c(data, crc)
        yield data
        sums.checksums = {"crc32c": _base64_crc(crc)}

    async def _open_sources(self, group: ArchiveGroup) -> dict[int, ReadableSource]:
        await self._cursor.advance(sum(piece.length for piece in group.pieces))
        opened = await self._reader.open_sources(group.pieces)
        if not self._whole:
            await self._reader.verify_extents(group.pieces, opened)
        return opened

    def _fill(
        self,
        buffer: memoryview,
        group: ArchiveGroup,
        opened: dict[int, ReadableSource],
        crc: int,
        seal: Callable[[memoryview], None] | None = None,
    ) -> int:
        """Fill the buffer with a group's bytes and apply `seal`; returns the checksum so far (blocking).

        Raises CorruptExtentError.
        """
        for at, data in group.made:
            buffer[at : at + len(data)] = data
        read_ranges(buffer, group.pieces, opened)
        if self._whole:
            verify_ranges(buffer, group.pieces, opened)
        if seal is not None:
            seal(buffer)
        total: int = crc32c(buffer, crc)
        return total


def _base64_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class _Buffers:
    """Two buffers in turn, because new pages cost more than filling old ones.

    A buffer stays valid until the second next one is acquired.
    """

    def __init__(self) -> None:
        self._idle, self._busy = bytearray(), bytearray()

    def acquire_buffer(self, size: int) -> memoryview:
        self._idle, self._busy = self._busy, self._idle
        if len(self._busy) < size:
            self._busy = bytearray(size + (size >> 3))
        return memoryview(self._busy)[:size]


_FILES: Final = 2000
_ZEROS: Final = bytes(BLOCK)


class ArchiveGroup(msgspec.Struct):
    """A part of an archive, `size` bytes: `made` are generated bytes, `pieces` source ranges, with places."""

    size: int = 0
    made: list[tuple[int, bytes]] = msgspec.field(default_factory=list)
    pieces: list[SourceRange] = msgspec.field(default_factory=list)

    def add_bytes(self, data: bytes) -> None:
        if data:
            self.made.append((self.size, data))
            self.size += len(data)

    def add_source(self, source: int, offset: int, length: int) -> None:
        if length:
            self.pieces.append(SourceRange(self.size, source, offset, length))
            self.size += length

    @property
    def full(self) -> bool:
        return self.size >= GROUP_BYTES or len(self.pieces) >= _FILES


def tar_size(files: Iterable[SourceFile]) -> int:
    """Return the size in bytes of the tar of these files."""
    return len(END) + sum(_header_size(item) + item.size + padding(item.size) for item in files)


def tar_groups(files: Iterable[SourceFile]) -> Iterator[ArchiveGroup]:
    """Yield the tar of these files, a few megabytes at a time."""
    group = ArchiveGroup()
    for item in files:
        group.add_bytes(tar_member_header(item.name, item.size))
        taken = 0
        while taken < item.size:
            if group.full:
                yield group
                group = ArchiveGroup()
            length = min(item.size - taken, max(GROUP_BYTES - group.size, BLOCK))
            group.add_source(item.source, item.offset + taken, length)
            taken += length
        group.add_bytes(_ZEROS[: padding(item.size)])
        if group.full:
            yield group
            group = ArchiveGroup()
    group.add_bytes(END)
    yield group


def _header_size(item: SourceFile) -> int:
    if len(item.name) <= 100 and item.size < 1 << 32 and item.name.isascii():
        return BLOCK
    return len(tar_member_header(item.name, item.size))


_HELD: Final = 8 << 20
"""Files up to this size have their checksum in their header."""


class ZipLayout:
    """The layout of one zip, for one pass: take a group, fill it, call `fill_checksums`, take the next."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._crcs = [0] * len(files)
        self._parts: list[tuple[int, int, int]] = []  # (file, place, bytes) of the current group
        self._marks: list[tuple[int, int]] = []  # (file, place of its checksum)

    def __repr__(self) -> str:
        return f"<ZipLayout {len(self._files)} files>"

    def groups(self) -> Iterator[ArchiveGroup]:
        group, before = ArchiveGroup(), 0
        entries = []
        for number, item in enumerate(self._files):
            described = item.size > _HELD
            if group.full or (group.size and not described and group.size + item.size > _HELD):
                before += group.size
                yield group
                group = ArchiveGroup()
            offset = before + group.size
            if not described:
                self._marks.append((number, group.size + CRC_AT))
            group.add_bytes(zip_local_header(item.name, item.size, described=described))
            taken = 0
            while taken < item.size:
                length = item.size - taken if not described else min(item.size - taken, GROUP_BYTES)
                self._parts.append((number, group.size, length))
                group.add_source(item.source, item.offset + taken, length)
                taken += length
                if described:
                    before += group.size
                    yield group
                    group = ArchiveGroup()
            if described:
                group.add_bytes(data_descriptor(item.size, self._crcs[number]))
            entries.append((number, offset, described))
        before += group.size
        yield group
        last = ArchiveGroup()
        files = ((self._files[number], number, at, described) for number, at, described in entries)
        told = [(item.name, item.size, self._crcs[n], at, described) for item, n, at, described in files]
        last.add_bytes(central_directory(told, before))
        yield last

    def fill_checksums(self, buffer: memoryview) -> None:
        """Compute and fill in the checksums of the last group, whose buffer now has its bytes (blocking)."""
        for number, at, length in self._parts:
            self._crcs[number] = zlib_ng.crc32(buffer[at : at + length], self._crcs[number])
        for number, at in self._marks:
            buffer[at : at + 4] = self._crcs[number].to_bytes(4, "little")
        self._parts, self._marks = [], []


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
_GZIP: Final = 31  # zlib's window bits: a gzip member, with a header without a time


class Compressor(Protocol):
    """Takes bytes and returns compressed bytes when it has some."""

    def compress(self, data: Buffer, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _zstd() -> Compressor:
    options = {
        int(zstd.CompressionParameter.compression_level): _ZSTD_LEVEL,
        int(zstd.CompressionParameter.checksum_flag): 1,
    }
    made: Compressor = zstd.ZstdCompressor(options=options)
    return made


COMPRESSORS: Final[Mapping[str, Callable[[], Compressor]]] = {
    "tgz": lambda: zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP),
    "tar.zst": _zstd,
}
