"""Tunes the C heap of processes that fetch: keeps freed pages instead of returning them to the kernel.

Law: the heap retains freed memory up to a bound. Otherwise the kernel zeroes new pages for every piece.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

# malloc.h of glibc, see mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT: Final = 16 << 20  # bytes that the heap keeps at its end
_LARGE: Final = 4 << 20  # size in bytes from which on a block is mapped and unmapped separately


@cache
def keep_freed_pages() -> bool:
    """Applies the settings, once per process; returns False if the C library does not support them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _KEPT) and mallopt(_MMAP_THRESHOLD, _LARGE))
