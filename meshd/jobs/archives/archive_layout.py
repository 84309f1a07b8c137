"""Archive layout: the groups of generated and copied bytes that make a tar or zip, and shard compression.

Law: the same files give the same bytes. Tar members have plain headers (no owner, no time, mode 0644);
zip members are stored uncompressed so that each can be read in place; a compressed shard is one stream
at a fixed level. Invariant: memory is two groups.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from meshd.jobs.source_reader import GROUP_BYTES, SourceRange
from meshwire.formats.tar import BLOCK, END, padding, tar_member_header
from meshwire.formats.zip_archive import CRC_AT, central_directory, data_descriptor, zip_local_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from meshd.store.api import Buffer
    from meshwire.jobs.job_plan import SourceFile


_FILES: Final = 2000
_ZEROS: Final = bytes(BLOCK)


@dataclass(slots=True)
class ArchiveGroup:
    """A part of an archive, `size` bytes: `made` are put at their places, `pieces` read to theirs."""

    size: int = 0
    made: list[tuple[int, bytes]] = field(default_factory=list)
    pieces: list[SourceRange] = field(default_factory=list)

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
    """Bytes of the tar of these files."""
    return len(END) + sum(_header_size(item) + item.size + padding(item.size) for item in files)


def tar_groups(files: Iterable[SourceFile]) -> Iterator[ArchiveGroup]:
    """The tar of these files, a few megabytes at a time."""
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
"""Bytes of a file up to which its checksum is in its header."""


class ZipLayout:
    """One archive, made once, in order: take a group, fill it, `seal` it, take the next."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._crcs = [0] * len(files)
        self._parts: list[tuple[int, int, int]] = []  # (file, place, bytes) of the present group
        self._marks: list[tuple[int, int]] = []  # (file, place of its checksum)

    def __repr__(self) -> str:
        return f"<ZipPacking {len(self._files)} files>"

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
        """The group that was given last has its bytes (blocking)."""
        for number, at, length in self._parts:
            self._crcs[number] = zlib.crc32(buffer[at : at + length], self._crcs[number])
        for number, at in self._marks:
            buffer[at : at + 4] = self._crcs[number].to_bytes(4, "little")
        self._parts, self._marks = [], []


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
_GZIP: Final = 31  # zlib's window bits: a gzip member, whose header has no time


class Compressor(Protocol):
    """Takes bytes, gives bytes when it has some."""

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
