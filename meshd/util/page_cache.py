"""Page cache: maps of files, and whether the kernel has their bytes in memory (mincore(2)); freed memory.

A read that must not wait (RWF_NOWAIT) would not do: where the page is missing, the kernel begins to read it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Final

_PAGE: Final = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
_libc.syscall.restype = ctypes.c_long
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc
_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_READ: Final = 22  # <linux/mman.h>; since Linux 5.14
_UNREADABLE: Final = (errno.EFAULT, 133)  # 133: EHWPOISON, which `errno` has since Python 3.14
_CACHESTAT: Final = 451  # of all architectures; since Linux 6.5
_maps: weakref.WeakValueDictionary[str, ctypes.Array[ctypes.c_char]] = weakref.WeakValueDictionary()
_lock: Final = threading.Lock()


def map_file(path: str, offset: int, length: int) -> memoryview:
    """Return bytes of a file as a read-only view of a map of all of it, which lasts as long as views of it
    and keeps no descriptor open: a process may have some 65,000 maps, and views of many more parts of files.
    Nothing of these bytes may be cut off the file, and its name must not be given to another. Loads these
    bytes (blocking), where Linux can: on a failing disk, the first look at them would end the process
    (SIGBUS). Raises OSError."""
    with _lock:
        memory = _maps.get(path)
        if memory is None or len(memory) < offset + length:
            memory = _maps[path] = _map_all(path, offset + length)
    start = offset // _PAGE * _PAGE
    address = ctypes.addressof(memory) + start
    if _libc.madvise(address, offset + length - start, _POPULATE_READ) and ctypes.get_errno() in _UNREADABLE:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)
    return memoryview(memory).cast("B")[offset : offset + length].toreadonly()


def _map_all(path: str, least: int) -> ctypes.Array[ctypes.c_char]:
    """Map a file that has `least` bytes or more. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size < least:
            raise OSError(errno.EIO, "the file is shorter than it was written", path)
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        raise _error()
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def release_free_memory() -> None:
    """Give memory that the process has freed back to the system, where the C library can (a millisecond)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def missing_bytes(fd: int, offset: int, length: int) -> int:
    """Return how many of these bytes of a file are not in the page cache, in whole pages.

    `offset` and `length` in bytes; bytes beyond the end of the file are missing. Raises OSError.
    """
    return cached_pages(fd, offset, length).count(0) * _PAGE


def cached_pages(fd: int, offset: int, length: int) -> bytes:
    """Return a byte for each page of a range of a file, from that of `offset` on: 0 where the page cache does
    not have its bytes, or has not read them yet.

    `offset` and `length` in bytes; pages beyond the end of the file are missing. Raises OSError.
    """
    start = offset // _PAGE * _PAGE
    size = offset + length - start
    if size <= 0:
        return b""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _FAILED:
        raise _error()
    try:
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        if _libc.mincore(address, size, pages):
            raise _error()
        return pages.raw
    finally:
        _libc.munmap(address, size)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether the page cache has these bytes; False if the kernel cannot tell."""
    try:
        return missing_bytes(fd, offset, length) == 0
    except OSError:
        return False


def open_for_reading(path: str) -> int:
    """Return a descriptor for reads without the kernel's own read-ahead; −1 if the file cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # compacted or removed since the lookup
        return -1
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def is_absent(fd: int, offset: int) -> bool:
    """Return whether the page of a file at `offset` is neither in the page cache nor being read, without
    reading it (a microsecond). False if the kernel cannot tell (before Linux 6.5)."""
    counts = (ctypes.c_uint64 * 5)()
    where = (ctypes.c_uint64 * 2)(offset, 1)
    return not _libc.syscall(_CACHESTAT, fd, ctypes.byref(where), ctypes.byref(counts), 0) and not counts[0]


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
