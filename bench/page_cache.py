"""The page cache of one file system, emptied or filled: what others have in memory stays there."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

BLKFLSBUF: Final = 0x1261
"""ioctl of linux/fs.h: write back and drop the buffers of a block device."""
INODES: Final = "2"
"""For /proc/sys/vm/drop_caches: inodes and directory entries, of all file systems, but no pages of files."""


def drop_pages(folder: Path) -> None:
    """Write back all files below the folder and drop their pages; those that a process maps stay."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile, or a socket
                _drop_file(Path(place, name))


def read_files(folder: Path) -> None:
    """Bring all files below the folder into the page cache."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            if file.is_file():
                with file.open("rb", buffering=0) as opened:
                    while opened.read(1 << 20):
                        pass


def drop_metadata(device: Path) -> None:
    """Drop what is in memory of the device's inode tables, extent maps and directories."""
    descriptor = os.open(device, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        fcntl.ioctl(descriptor, BLKFLSBUF)
    finally:
        os.close(descriptor)
    Path("/proc/sys/vm/drop_caches").write_text(INODES)


def _drop_file(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
