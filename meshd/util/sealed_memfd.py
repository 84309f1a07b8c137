"""Sealed memfds: shared memory that no process can change any more.

Invariant: a sealed memfd keeps its size and content for good, for every process that holds a descriptor.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

_CONTENT: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def seal(fd: int) -> bool:
    """Let a memfd that allows it never be written again; whether that is so now."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CONTENT | fcntl.F_SEAL_SEAL)
    except OSError:  # mapped for writing, or pages of it are under way: it stays as it is
        return False
    return True


def is_sealed(fd: int, size: int) -> bool:
    """Whether this is sealed memory of just this size."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _CONTENT == _CONTENT and os.fstat(fd).st_size == size
    except OSError:  # a file
        return False
