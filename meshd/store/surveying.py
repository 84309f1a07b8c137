"""Walking a data file's members, as fsck, rebuild, inspect and compaction see them.

Law: reads only. A header that is torn or lies ends the walk and is told as `damage`; what lies behind it
cannot be trusted, for data may look like headers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from awscrt import checksums

from meshd.kit import failpoints
from meshd.store.members import RESERVE, parse
from meshd.store.records import Extent
from meshwire import tars

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.members import Member

_PIECE = 1 << 20  # a multiple of a tar block, so that a header never spans two pieces' first blocks
_OPENING = b"PaxHeaders/"
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class Found(NamedTuple):
    """A member with its truth; `start` is where its header begins, `extent` where its data lie."""

    member: Member
    extent: Extent
    start: int
    next: int


@dataclass(slots=True)
class FileSurvey:
    """One data file, open for reading; a context manager."""

    disk: int
    file: int
    path: str
    fd: int = -1
    size: int = 0
    end: int = 0  # where the walk ended: behind the last good member
    ended: bool = False  # the tar's own end mark was met there
    damage: list[str] = field(default_factory=list)

    def __enter__(self) -> FileSurvey:
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def members(self, limit: int | None = None) -> Iterator[Found]:
        """Our members up to byte `limit` (None: the end of the file). Past a damaged one it goes on at the
        next.
        """
        end, at = self.size if limit is None else min(limit, self.size), 0
        self.damage.clear()
        while True:
            try:
                yield from self._run(at, end)
            except tars.TarError as error:
                self.damage.append(str(error))
                following = self._resume(error.offset + tars.BLOCK, end)
                if following is None:
                    return
                at = following
            else:
                self.ended = self._pread(self.end, len(tars.END)) == tars.END
                return

    def _run(self, start: int, end: int) -> Iterator[Found]:
        for entry in tars.scan(self._pread, start, end):
            self.end = entry.next_offset
            member = parse(entry)
            if member is None:
                self.damage.append(f"the member at byte {entry.start} does not say what it is")
                continue
            extent = Extent(self.disk, self.file, entry.data_offset, entry.size, member.crc32c)
            yield Found(member, extent, entry.start, entry.next_offset)

    def _resume(self, start: int, end: int) -> int | None:
        """Where the next member of this very file begins. One inside an object's data says another place."""
        for at in range(start, end, _PIECE):
            piece = self._pread(at, _PIECE)
            found = piece.find(_OPENING)
            while found >= 0:
                if found % tars.BLOCK == 0 and self._is_member(at + found, end):
                    return at + found
                found = piece.find(_OPENING, found + 1)
        return None

    def _is_member(self, at: int, end: int) -> bool:
        try:
            entry = next(tars.scan(self._pread, at, end), None)
        except tars.TarError:
            return False
        member = None if entry is None else parse(entry)
        return member is not None and (member.file, member.at) == (self.file, at)

    def _pread(self, offset: int, length: int) -> bytes:
        failpoints.hit("store.survey.before_read")
        return os.pread(self.fd, length, offset)

    def read(self, extent: Extent) -> bytes:
        """All bytes of an extent (manifests and uploads: small)."""
        return os.pread(self.fd, extent.length, extent.offset)

    def intact(self, extent: Extent) -> bool:
        """Whether the bytes match their checksum; reads them in pieces."""
        crc, at, stop = 0, extent.offset, extent.offset + extent.length
        while at < stop:
            piece = os.pread(self.fd, min(_PIECE, stop - at), at)
            if not piece:
                return False
            crc = checksums.crc32c(piece, crc)
            at += len(piece)
        return crc == extent.crc32c


def is_own(first: Found, count: int) -> bool:
    """Whether a file with these members is a large object's own."""
    return count == 1 and first.extent.offset == RESERVE and first.member.kind in ("object", "part")
