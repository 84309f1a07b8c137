"""Data file scans: the members of a data file in order, and reads that bypass the page cache.

`DataFileScan` serves fsck, rebuild, inspect and compaction; `DirectFile` reads what is on the device.
Law: read only. A torn or inconsistent header ends the scan and is reported as `damage`; bytes behind it
are not trusted, because object data may look like headers. Direct reads do not evict pages that clients
use; without O_DIRECT (tmpfs) they fall back to ordinary reads.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
from awscrt import checksums
from awscrt.checksums import crc32c

from meshd.store.engine.member_header import RESERVE, parse_member_header
from meshd.store.engine.packs import (
    DIRECTORY,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    OPENING,
    is_pack,
    parse_entry,
)
from meshd.store.records import Extent, Record
from meshd.util import failpoints
from meshwire.formats import tar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from meshd.store.engine.member_header import Member


_PIECE = 1 << 20
_SIGNS = re.compile(re.escape(OPENING) + rb"|ustar\0")
_SIGN_BYTES = 5  # those of a longest sign but the first
_MAGIC_OFFSET = 257  # of a tar header
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class ScannedMember(NamedTuple):
    """A parsed member. `start`: where its header begins; `extent`: where its data are; `next`: where the next
    one begins."""

    member: Member
    extent: Extent
    start: int
    next: int

    def as_record(self) -> Record:
        """Returns the record of the object or delete marker that the member describes."""
        member = self.member
        return Record(
            self.extent.length,
            member.etag,
            int(member.stamp),
            member.modified,
            (self.extent,),
            member.headers,
            member.metadata,
            member.checksums,
            member.checksum_type,
            (),
            member.owner,
            moves=member.moves,
            version=member.version,
            marker=member.kind == "marker",
            tags=member.tags,
            acl=member.acl,
            amended=member.amended,
            through=member.through,
        )


class DataFileScan(msgspec.Struct):
    """One data file, open for reading. A context manager."""

    disk: int
    file: int
    path: str
    fd: int = -1
    size: int = 0
    end: int = 0  # where the scan ended: behind the last good member
    ended: bool = False  # the tar end mark was found there
    damage: list[str] = msgspec.field(default_factory=list)

    def __enter__(self) -> DataFileScan:
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def members(self, limit: int | None = None) -> Iterator[ScannedMember]:
        """Yields the members up to byte `limit` (None: the end of the file). After a damaged member the scan
        resumes at the next one."""
        end, at = self.size if limit is None else min(limit, self.size), 0
        self.damage.clear()
        while True:
            try:
                if self._pread(at, len(OPENING)) == OPENING:  # of a pack whose own header is damaged
                    stopped = yield from self._entries(at, min(end, at + MAX_BYTES), end)
                    found = self._resume(stopped, end)
                else:
                    yield from self._run(at, end)
                    self.ended = self._pread(self.end, len(tar.END)) == tar.END
                    return
            except tar.TarError as error:
                self.damage.append(str(error))
                found = self._resume(error.offset + tar.BLOCK, end)
            if found is None:
                return
            at = found

    def _run(self, start: int, end: int) -> Iterator[ScannedMember]:
        for entry in tar.scan_tar(self._pread, start, end):
            self.end = entry.next_offset
            member = parse_member_header(entry)
            if member is not None:
                extent = Extent(self.disk, self.file, entry.data_offset, entry.size, member.crc32c)
                yield ScannedMember(member, extent, entry.start, entry.next_offset)
            elif is_pack(entry):
                yield from self._pack(entry)
            else:
                self.damage.append(f"the member at byte {entry.start} has no valid header record")

    def _pack(self, pack: tar.TarMember) -> Iterator[ScannedMember]:
        """Yields the entries of a pack, those behind damaged ones, too."""
        at, end = pack.data_offset, pack.data_offset + pack.size
        while True:
            at = yield from self._entries(at, end, pack.next_offset)
            if at > pack.data_offset and self._pread(at, len(DIRECTORY)) == DIRECTORY:
                return
            self.damage.append(f"the entry at byte {at} of the pack at byte {pack.start} is damaged")
            found = self._resume(at + 1, end)
            if found is None:
                return
            at = found

    def _entries(self, start: int, end: int, following: int) -> Generator[ScannedMember, None, int]:
        """Yields entries of a pack from `start` on, as long as they are valid; returns where they end.
        `following`: where the member behind the pack begins."""
        raw = self._pread(start, end - start)
        at = 0
        while (entry := parse_entry(raw, at, self.file, start)) is not None:
            extent = Extent(self.disk, self.file, entry.data, entry.size, entry.member.crc32c)
            yield ScannedMember(entry.member, extent, start + at, following)
            at = entry.data + entry.size - start
        return start + at

    def _resume(self, start: int, end: int) -> int | None:
        """Returns the offset of the next member of this file, or of the next entry of a pack. A header inside
        an object's data records another position."""
        for at in range(start, end, _PIECE):
            piece = self._pread(at, min(_PIECE + _SIGN_BYTES, end - at))
            for sign in _SIGNS.finditer(piece):
                packed = sign[0] == OPENING
                place = at + sign.start() - (0 if packed else _MAGIC_OFFSET)
                if place >= start and (packed or place % tar.BLOCK == 0) and self._is_member(place, end):
                    return place
        return None

    def _is_member(self, at: int, end: int) -> bool:
        if self._pread(at, len(OPENING)) == OPENING:
            return self._is_entry(at, end)
        try:
            entry = next(tar.scan_tar(self._pread, at, end), None)
        except tar.TarError:
            return False
        if entry is None:
            return False
        member = parse_member_header(entry)
        if member is None:
            return is_pack(entry) and self._is_entry(entry.data_offset, end)
        return (member.file, member.at) == (self.file, at)

    def _is_entry(self, at: int, end: int) -> bool:
        raw = self._pread(at, min(MAX_HEADER_BYTES, end - at))
        return parse_entry(raw, 0, self.file, at) is not None

    def _pread(self, offset: int, length: int) -> bytes:
        failpoints.hit("store.survey.before_read")
        return os.pread(self.fd, length, offset)

    def read_extent(self, extent: Extent) -> bytes:
        """Reads all bytes of a small extent (a manifest or an upload record)."""
        return os.pread(self.fd, extent.length, extent.offset)

    def is_intact(self, extent: Extent) -> bool:
        """Returns True if the bytes match their checksum. Reads them in pieces."""
        crc, at, stop = 0, extent.offset, extent.offset + extent.length
        while at < stop:
            piece = os.pread(self.fd, min(_PIECE, stop - at), at)
            if not piece:
                return False
            crc = checksums.crc32c(piece, crc)
            at += len(piece)
        return crc == extent.crc32c


def is_large_object_file(first: ScannedMember, count: int) -> bool:
    """Returns True if a file with these members is a large object's file."""
    return count == 1 and first.extent.offset == RESERVE and first.member.kind in ("object", "part")


_DIRECT_CHUNK: Final = 1 << 20
_BLOCK: Final = 4096


class DirectFile:
    """Reads one data file with O_DIRECT where possible. A context manager. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffer = memoryview(mmap.mmap(-1, _DIRECT_CHUNK))
        self._fd = self._open(os.O_DIRECT)

    def __repr__(self) -> str:
        return f"<DirectFile {self._path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def _open(self, flag: int) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | flag)
        except OSError as error:
            if error.errno != errno.EINVAL or not flag:
                raise
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def iter_chunks(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yields the bytes in chunks of up to 1 MiB; fewer than `length` if the file ends early."""
        at, end = offset - offset % _BLOCK, offset + length
        while at < end:
            wanted = min(_DIRECT_CHUNK, end - at + (at - end) % _BLOCK)
            got = self._read(wanted, at)
            if offset < at + got:
                yield self._buffer[max(0, offset - at) : min(got, end - at)]
            if got < wanted:
                return
            at += got

    def _read(self, wanted: int, at: int) -> int:
        try:
            return os.preadv(self._fd, [self._buffer[:wanted]], at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        os.close(self._fd)  # this file system opens with O_DIRECT but cannot read with it
        self._fd = self._open(0)
        return os.preadv(self._fd, [self._buffer[:wanted]], at)

    def is_intact(self, extent: Extent) -> bool:
        """Returns True if the bytes match their checksum."""
        bad: list[Extent] = []
        for _ in self.compare_extent(extent, bad):
            pass
        return not bad

    def compare_extent(self, extent: Extent, bad: list[Extent]) -> Iterator[int]:
        """Yields the sizes of the chunks as they are read; at the end appends the extent to `bad` if it is
        damaged."""
        crc = seen = 0
        for piece in self.iter_chunks(extent.offset, extent.length):
            crc, seen = crc32c(piece, crc), seen + len(piece)
            yield len(piece)
        if seen != extent.length or crc != extent.crc32c:
            bad.append(extent)

    def evict_cached_pages(self, extent: Extent) -> None:
        """Asks the kernel to drop cached pages of these bytes."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, extent.offset, extent.length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
