"""Total and free bytes of a file system, if it reports them; reserving some of them for a file, and giving
them back.

Some FUSE and network file systems report zeros. That means unknown, not full: writes are then attempted, and
fail with ENOSPC when there is no room.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate", None)  # absent from some C libraries
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

ASSUMED_FREE: Final = 16 << 30
"""Free bytes that a cache without a configured size assumes where they are unknown."""


class DiskSpace(NamedTuple):
    """Bytes of a file system, all 0 if it does not tell: `total`; `free`, which this process may still
    write; `usable`, which are in use or free, so without root's reserve and what a quota withholds."""

    total: int
    free: int
    usable: int

    @property
    def is_known(self) -> bool:
        """Whether the file system told its size."""
        return self.total > 0

    @property
    def free_for_cache(self) -> int:
        """Free bytes for the size of a cache."""
        return self.free if self.is_known else ASSUMED_FREE


def measure_disk_space(path: Path | str) -> DiskSpace:
    """Return the space of the file system that holds `path` (blocking). Raises OSError."""
    found = os.statvfs(path)
    usable = found.f_blocks - found.f_bfree + found.f_bavail
    return DiskSpace(*(blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail, usable)))


def reserve_space(fd: int, offset: int, length: int) -> None:
    """Reserve disk space for bytes of a file without changing its size, where the file system can.

    Raises OSError only for ENOSPC and EDQUOT.
    """
    if _fallocate is None or length <= 0 or _fallocate(fd, _KEEP_SIZE, offset, length) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number))


def free_space(fd: int, offset: int, length: int) -> bool:
    """Give the disk space of bytes of a file back: they become zeros, and its size stays. Returns whether the
    file system could.
    """
    if _fallocate is None or length <= 0:
        return False
    return bool(_fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)
