"""Source files: sample bytes, read with pread from the store's data files.

Invariant: at most OPEN_FILES files are open. A short read is an error, never a short sample, and bytes
with a known checksum are verified.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from awscrt.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Piece = tuple[str, int, int] | tuple[str, int, int, int]
"""(path, offset, length): bytes of one file; a fourth number is their crc32c."""
Pieces = tuple[Piece, ...]
"""The bytes of one field or one asset, piece after piece."""
AssetPlace = tuple[str, Pieces]
"""(sha256 in hex, the pieces that hold the bytes)."""

OPEN_FILES: Final = 128
READAHEAD_BYTES: Final = 16 << 20  # bytes
PROC_PREFIX = "/proc/"
"""Memory of another process. It is not kept open, because its descriptor number is soon reused."""


class SourceGoneError(OSError):
    """The file or the bytes are not there (removed or compacted since the lookup): look them up again."""


class SourceDamagedError(OSError):
    """The bytes do not match their stored checksum."""


class SourceFiles:
    """Open files by path; closes the least recently used first. Not thread-safe."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SourceFiles {len(self._open)} open>"

    def read_pieces(self, pieces: Sequence[Piece]) -> bytes:
        """Return the joined bytes of all pieces. Raises SourceGoneError, SourceDamagedError."""
        if len(pieces) == 1:
            return self._read_one(*pieces[0])
        return b"".join([self._read_one(*piece) for piece in pieces])

    def readahead(self, pieces: Iterable[Piece]) -> None:
        """Let the kernel read ahead up to READAHEAD_BYTES of these pieces, which are read soon.

        The disk can then serve the requests in the order that suits it. `read_pieces` reports files that
        cannot be opened.
        """
        left = READAHEAD_BYTES
        for path, offset, length, *_ in pieces:
            left -= length
            if left < 0:
                return
            if not path.startswith(PROC_PREFIX):
                with suppress(OSError):
                    os.posix_fadvise(self._descriptor(path), offset, length, os.POSIX_FADV_WILLNEED)

    def _read_one(self, path: str, offset: int, length: int, checksum: int | None = None) -> bytes:
        data = self._read_bytes(path, offset, length)
        if checksum is not None and crc32c(data) != checksum:
            raise SourceDamagedError(
                f"the {length} bytes at {offset} of {os.path.basename(path)} fail their checksum"
            )
        return data

    def _read_bytes(self, path: str, offset: int, length: int) -> bytes:
        try:
            if path.startswith(PROC_PREFIX):
                return _read_memory(path, offset, length)
            data = os.pread(self._descriptor(path), length, offset)
            while len(data) < length:
                more = os.pread(self._descriptor(path), length - len(data), offset + len(data))
                if not more:
                    raise SourceGoneError(
                        f"{os.path.basename(path)} has fewer than {length} bytes at {offset}"
                    )
                data += more
        except OSError as error:
            self._forget(path)
            raise SourceGoneError(
                f"cannot read {os.path.basename(path)}: {error.strerror or error}"
            ) from error
        return data

    def _descriptor(self, path: str) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if len(self._open) > OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def _forget(self, path: str) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])


def _read_memory(path: str, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, length, offset)
    finally:
        os.close(fd)
    if len(data) != length:
        raise SourceGoneError(f"{path} has fewer than {length} bytes at {offset}")
    return data
