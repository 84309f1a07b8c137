"""Sealed memfds: shared memory that no process can change any more.

Invariant: a sealed memfd keeps its size and content for good, for every process that holds a descriptor.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

_CONTENT: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def seal(fd: int) -> bool:
    """Seals a memfd that allows sealing; returns True if it is sealed now."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CONTENT | fcntl.F_SEAL_SEAL)
    except OSError:  # mapped for writing, or its pages are being written: it stays unsealed
        return False
    return True


def is_sealed(fd: int, size: int) -> bool:
    """Returns True if this is sealed memory of exactly this size."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _CONTENT == _CONTENT and os.fstat(fd).st_size == size
    except OSError:  # a file
        return False
