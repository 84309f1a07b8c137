"""Whether bytes of a file are in memory: as the kernel has them, and without starting a read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from meshd.util.page_cache import missing_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_bytes_are_missing_until_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert missing_bytes(fd, 0, 4 * MIB) == 0
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if missing_bytes(fd, 0, 4 * MIB) == 0:
            pytest.skip("this file system keeps its files in memory")
        assert missing_bytes(fd, 0, 4 * MIB) == 4 * MIB
        assert missing_bytes(fd, 100, 10) == 4096
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 4096, MIB)
        assert missing_bytes(fd, MIB, 4096) == 0
        assert missing_bytes(fd, MIB - 1, 3) == 4096
    finally:
        os.close(fd)


def test_bytes_beyond_the_end_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 10)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert missing_bytes(fd, 0, 10) == 0
        assert missing_bytes(fd, 0, 0) == 0
        assert missing_bytes(fd, 8192, 10) == 4096
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        missing_bytes(fd, 0, 10)
