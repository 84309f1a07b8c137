"""Reading a data file past the page cache: what lies on the device, not what memory remembers of it.

Law: reads only; nothing that clients have in memory is pushed out. Where the file system cannot do that
(tmpfs), it reads as everybody does. Invariant: bytes are lent until the next piece is asked for.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING, Final, Self

from awscrt.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Extent

_PIECE: Final = 1 << 20
_BLOCK: Final = 4096


class DirectFile:
    """One data file, a context manager. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._buffer = memoryview(mmap.mmap(-1, _PIECE))
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

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes, up to a MiB at a time; fewer than `length` where the file ends."""
        at, end = offset - offset % _BLOCK, offset + length
        while at < end:
            wanted = min(_PIECE, end - at + (at - end) % _BLOCK)
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
        os.close(self._fd)  # it opens so, but cannot read so
        self._fd = self._open(0)
        return os.preadv(self._fd, [self._buffer[:wanted]], at)

    def intact(self, extent: Extent) -> bool:
        """Whether the bytes match their checksum."""
        bad: list[Extent] = []
        for _ in self.compared(extent, bad):
            pass
        return not bad

    def compared(self, extent: Extent, bad: list[Extent]) -> Iterator[int]:
        """The sizes of pieces as they are read; in the end the extent is among the `bad`, or not."""
        crc = seen = 0
        for piece in self.pieces(extent.offset, extent.length):
            crc, seen = crc32c(piece, crc), seen + len(piece)
            yield len(piece)
        if seen != extent.length or crc != extent.crc32c:
            bad.append(extent)

    def forget(self, extent: Extent) -> None:
        """Have the kernel drop what it remembers of these bytes."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, extent.offset, extent.length, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
