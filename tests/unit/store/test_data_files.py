"""Files of large objects: what the kernel says of pages that it could not write out."""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING

import pytest

from meshd.store.disks.layout import DRAFTS, EXTENTS, Disks
from meshd.store.engine import data_files
from meshd.store.engine.data_files import LargeObjectFile

if TYPE_CHECKING:
    from pathlib import Path

_PIECE = bytes(8 << 20)


@pytest.fixture
def file(tmp_path: Path) -> LargeObjectFile:
    (tmp_path / EXTENTS / DRAFTS).mkdir(parents=True)
    return LargeObjectFile(Disks({0: tmp_path}), 0, 1, "w0")


def answer(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """From now on the kernel says this of the pages that it was to write out."""

    def sync_file_range(fd: int, offset: int, length: int, flags: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(data_files, "_sync_file_range", sync_file_range)


def test_pages_that_could_not_be_written_fail_the_write(
    file: LargeObjectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says it once for each descriptor: the sync at the end would succeed."""
    answer(monkeypatch, errno.EIO)
    file.append([_PIECE])
    with pytest.raises(OSError, match="Input/output error"):
        file.append([_PIECE])
    file.discard()


def test_a_file_system_without_the_call_is_no_failure(
    file: LargeObjectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, errno.EINVAL)
    for _ in range(3):
        file.append([_PIECE])
    assert file.size == 3 * len(_PIECE)
    file.discard()
