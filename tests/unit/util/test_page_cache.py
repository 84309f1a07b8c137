"""Whether bytes of a file are in memory: as the kernel has them, and without starting a read."""

from __future__ import annotations

import gc
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from meshd.util import page_cache
from meshd.util.page_cache import cached_pages, map_file, missing_bytes

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
        assert [page & 1 for page in cached_pages(fd, MIB - 1, 4098)] == [0, 1, 0]
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


def test_parts_of_a_file_share_one_map(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"0123456789")
    views = [map_file(path, at, 3) for at in range(5)]
    assert [bytes(view) for view in views] == [b"012", b"123", b"234", b"345", b"456"]
    assert all(view.readonly for view in views)
    first = page_cache._maps[path]
    with (tmp_path / "file").open("ab") as file:
        file.write(b"abc")
    assert bytes(map_file(path, 5, 5)) == b"56789"
    assert page_cache._maps[path] is first
    more = map_file(path, 8, 5)
    assert bytes(more) == b"89abc"
    assert page_cache._maps[path] is not first
    (tmp_path / "file").unlink()
    assert bytes(views[0]) == b"012"
    del first, more
    views.clear()
    gc.collect()
    assert path not in page_cache._maps


def test_a_file_that_is_too_short_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with pytest.raises(OSError, match="shorter than it was written"):
        map_file(str(tmp_path / "file"), 8, 3)
    with pytest.raises(FileNotFoundError):
        map_file(str(tmp_path / "none"), 0, 1)


def test_bytes_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """To look at them would end the process. Here they were cut off, which is the same to the kernel."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("this kernel cannot load mapped bytes without the signal")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * mmap.PAGESIZE)
    held = map_file(str(path), 0, 10)
    os.truncate(path, mmap.PAGESIZE)
    assert bytes(map_file(str(path), 10, 10)) == bytes(held)
    with pytest.raises(OSError, match="Input/output error"):
        map_file(str(path), mmap.PAGESIZE - 1, 2)
