"""The C heap of a process that fetches: pieces of answers come and go by the hundred a second.

Law: what was freed stays with the heap up to a bound; else every piece has its pages given back to the
kernel, and zeroed for the next one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

# malloc.h of glibc, see mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT: Final = 16 << 20  # bytes at the end of a heap that stay there
_LARGE: Final = 4 << 20  # bytes of a block from which on it is mapped and unmapped by itself


@cache
def keep_freed_pages() -> bool:
    """Once a process; whether its C library can be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _KEPT) and mallopt(_MMAP_THRESHOLD, _LARGE))
