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
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc
_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_READ: Final = 22  # <linux/mman.h>; since Linux 5.14
_UNREADABLE: Final = (errno.EFAULT, 133)  # 133: EHWPOISON, which `errno` has since Python 3.14
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
    start = offset // _PAGE * _PAGE
    size = offset + length - start
    if size <= 0:
        return 0
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _FAILED:
        raise _error()
    try:
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        if _libc.mincore(address, size, pages):
            raise _error()
        return pages.raw.count(0) * _PAGE
    finally:
        _libc.munmap(address, size)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
