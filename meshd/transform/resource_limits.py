"""Resource limits of a transform worker: memory, CPU time and wall time for each row.

Law: a row is judged only in a process with enough room. A worker that retains too much memory exits
between two rows, and a row that ran out of memory is retried in a fresh process before it counts as
bad.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from pathlib import Path
from typing import Final

import msgspec

_STATM: Final = "/proc/self/statm"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_OOM: Final = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO: Final = "500"  # of -1000…1000: if the machine runs out of memory, kill this before the store
_CV2_NO_MEMORY: Final = -4
_M_TRIM_THRESHOLD: Final = -1  # <malloc.h>
_M_MMAP_THRESHOLD: Final = -3
_KEPT: Final = 32 << 20  # bytes that malloc keeps for the next row; larger arrays are mapped separately
_FRESH: Final = 64 << 20  # bytes beyond its initial memory that a fresh process uses at most


class RowLimits(msgspec.Struct, frozen=True):
    """Limits per row. `memory`: bytes beyond the initial memory of the process.

    `row_seconds`: wall-clock time. `row_cpu_seconds`: CPU time, so that a busy machine does not make samples
    bad.
    """

    memory: int = 2 << 30
    row_seconds: float = 60.0
    row_cpu_seconds: float = 20.0


class RowWatchdog:
    """Enforces the limits of this process from its construction on."""

    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
        self._begun_with = self._private_bytes()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = self._begun_with + limits.memory
        resource.setrlimit(
            resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
        _go_first()

    def __repr__(self) -> str:
        return f"<RowWatchdog, {self.used_bytes()} of {self.limits.memory} bytes>"

    def used_bytes(self) -> int:
        """Return the bytes in use beyond the initial memory of the process."""
        return self._private_bytes() - self._begun_with

    def _private_bytes(self) -> int:
        """Return the private memory of this process in bytes (data and stack, as RLIMIT_DATA counts it)."""
        return int(os.pread(self._statm, 256, 0).split()[5]) * _PAGE

    def begin_row(self) -> None:
        """Start the timers of a row."""
        signal.setitimer(signal.ITIMER_REAL, self.limits.row_seconds)
        signal.setitimer(signal.ITIMER_PROF, self.limits.row_cpu_seconds)

    def end_row(self) -> None:
        """Stop the timers: no row is being rendered."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def is_worn(self) -> bool:
        """Return whether earlier rows left so much memory in use that the process should be replaced."""
        return self.used_bytes() > self.limits.memory // 2

    def is_fresh(self) -> bool:
        """Return whether a row has about all the memory it can ever have."""
        return self.used_bytes() <= min(_FRESH, self.limits.memory // 4)


def keep_heap(memory: int) -> None:
    """Make malloc keep memory that a row frees.

    Image after image, the same few arrays are allocated and freed. Memory that goes back to the system costs
    a page fault per page when the next row uses it again, 3 µs or more in a virtual machine. `memory`: the
    limit of the process, an eighth of which is kept. Does nothing if the C library is not glibc.
    """
    mallopt, kept = getattr(ctypes.CDLL(None), "mallopt", None), min(_KEPT, memory // 8)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, kept)
        mallopt(_M_TRIM_THRESHOLD, kept)


def _go_first() -> None:
    try:
        _OOM.write_text(_FIRST_TO_GO)
    except OSError:  # the container does not expose the file
        return


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an op ran out of memory, however the op or a library below it reports that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or getattr(cause, "errno", 0) == errno.ENOMEM:
            return True
        if type(cause).__module__ == "cv2" and getattr(cause, "code", 0) == _CV2_NO_MEMORY:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
