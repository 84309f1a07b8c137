"""Linux system calls that `os` lacks, and writes of whole buffer lists.

Law: the only module of the store that uses ctypes. Preallocation and early writeback are hints: where
the kernel or the file system lacks them, nothing breaks.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.store.api import Buffer

_libc = ctypes.CDLL(None, use_errno=True)
_IOV_MAX = 1000
_LARGEST = 1 << 20  # per call: a call of 8 MiB was measured to cost eight times as much per byte
_KEEP_SIZE = 1
_WRITE = 2
_WAIT = 1 | 2 | 4

try:
    _fallocate = _libc.fallocate
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _sync_file_range = _libc.sync_file_range
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
except AttributeError:  # pragma: no cover - a libc without these calls
    _fallocate = _sync_file_range = None  # type: ignore[assignment]  # absent: both hints are skipped


def preallocate(fd: int, length: int) -> None:
    """Reserves disk space for `length` bytes without changing the file size.

    Raises OSError only for ENOSPC and EDQUOT.
    """
    if _fallocate is None or length <= 0 or _fallocate(fd, _KEEP_SIZE, 0, length) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number))


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Asks the kernel to start writing these pages out; returns at once."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _WRITE)


def finish_writeback(fd: int, offset: int, length: int) -> None:
    """Waits until these pages are written out. This is no durability guarantee: only fdatasync gives one."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _WAIT)


def _pieces(buffer: Buffer) -> Iterable[Buffer]:
    if len(buffer) <= _LARGEST:
        return (buffer,)
    view = memoryview(buffer)
    return (view[start : start + _LARGEST] for start in range(0, len(view), _LARGEST))


def _batches(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    batch: list[Buffer] = []
    size = 0
    for buffer in buffers:
        for piece in _pieces(buffer):
            if batch and (size + len(piece) > _LARGEST or len(batch) == _IOV_MAX):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece)
    if batch:
        yield batch


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes all buffers with pwritev, up to 1 MiB per call; returns the number of bytes."""
    total = 0
    for batch in _batches(buffers):
        wanted = sum(map(len, batch))
        written = os.pwritev(fd, batch, offset + total)
        if written < wanted:
            rest = b"".join(batch)
            while written < wanted:
                written += os.pwrite(fd, rest[written:], offset + total + written)
        total += wanted
    return total
