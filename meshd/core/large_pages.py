"""Large pages for shared memory that is about to be filled, whatever the host's setting for shared memory is.

Law: speed alone depends on them. Allocating and freeing pages of 4 KiB takes more than filling them; where
large ones take as much, as in memory that is fragmented or that a host has taken back from its virtual
machine, or the kernel gives none, nothing asks for more of them for a while. A host that denies them gets
none.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap
import os
from typing import TYPE_CHECKING, Final

from meshd.telemetry import metrics
from meshd.util.clock import thread_cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXTENT: Final = 2 << 20
"""Bytes of a large page."""
LEAST_BYTES: Final = 2 * EXTENT
"""Smaller memory is left as it is."""
SLOW: Final = 0.6e-3
"""Processor seconds for an extent above which nothing is gained: in pages of 4 KiB it takes 1 ms."""
PAUSE_SECONDS: Final = 5.0
_AT_A_TIME: Final = 4 * EXTENT
_COLLAPSE: Final = 25  # MADV_COLLAPSE, of Linux 6.1
_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def use_large_pages(fd: int, size: int, goes_on: Callable[[int], bool]) -> int:
    """Give a new memfd of `size` bytes large pages of zeros, until the kernel has no more, or `goes_on` is
    false for the bytes that have them (blocking).

    Returns these bytes. Afterwards nothing maps the memory, so that it can be sealed. Raises OSError.
    """
    whole, made = size // EXTENT * EXTENT, 0
    length = whole + EXTENT
    room = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        raise OSError(ctypes.get_errno(), "no address space")
    try:
        start = -(-room // EXTENT) * EXTENT
        if _libc.mmap(start, whole, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, fd, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), "the memory cannot be mapped")
        for first, end in itertools.pairwise(_groups(whole)):
            for each in range(first, end, EXTENT):
                os.pwrite(fd, b"\0", each)  # an extent without any page is taken for one that was cut off
            if _libc.madvise(start + first, end - first, _COLLAPSE):
                break
            made = end
            if not goes_on(made):
                break
    finally:
        _libc.munmap(room, length)
    return made


def _groups(whole: int) -> Iterator[int]:
    """Yield where groups of extents begin, and the end: the first has one, to see what it takes."""
    yield 0
    yield from range(EXTENT, whole, _AT_A_TIME)
    yield whole


class LargePages:
    """Asks for large pages, and stops for PAUSE_SECONDS where that does not pay. `use`: see
    `use_large_pages`. Use on one event loop only.
    """

    def __init__(self, use: Callable[[int, int, Callable[[int], bool]], int] = use_large_pages) -> None:
        self._use = use
        self._paused_until = 0.0

    def __repr__(self) -> str:
        return f"<LargePages, paused until {self._paused_until:.1f}>"

    async def prepare(self, fd: int, size: int) -> None:
        """Give a new memfd of `size` bytes large pages, if it is large and they can be had soon.

        Cancellation leaves it with some of them, or none; the caller may close `fd` meanwhile.
        """
        clock = asyncio.get_running_loop().time
        if size < LEAST_BYTES or clock() < self._paused_until:
            return
        try:
            made = await asyncio.to_thread(self._try, os.dup(fd), size)
        except (OSError, RuntimeError):  # no descriptor, or no thread: the memory is filled as it is
            made = 0
        metrics.frame_large_pages.inc(made)
        if made < size // EXTENT * EXTENT:
            self._paused_until = clock() + PAUSE_SECONDS

    def _try(self, fd: int, size: int) -> int:
        began = thread_cpu_seconds()
        try:
            return self._use(fd, size, lambda made: thread_cpu_seconds() - began < made // EXTENT * SLOW)
        except OSError:
            return 0
        finally:
            os.close(fd)
