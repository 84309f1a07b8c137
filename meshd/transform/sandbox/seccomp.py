"""Seccomp filter: the system calls a sandbox process may make.

Law: an unlisted call is refused with EPERM, so calls of future kernels are refused, too. No listed call
creates a process or thread, runs a program, opens a socket, signals or inspects another process, or
changes a file. Invariant: filters accumulate and are never removed.
https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06  # ld abs word, jeq, jset, ret, on constants
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # in struct seccomp_data
_WRITING: Final = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)
)

# name: number on x86-64, on arm64; -1 if the call does not exist.
_CALLS: Final[dict[str, tuple[int, int]]] = {
    "access": (21, -1),
    "arch_prctl": (158, -1),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "dup": (32, 23),
    "dup3": (292, 24),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "lstat": (6, -1),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mincore": (27, 232),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "poll": (7, -1),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "read": (0, 63),
    "readlink": (89, -1),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "sigaltstack": (131, 132),
    "stat": (4, -1),
    "statfs": (137, 43),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, -1),
    "times": (100, 153),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
_OPEN, _OPENAT = (2, -1), (257, 56)
_TGKILL, _PRLIMIT, _FCNTL = (234, 131), (302, 261), (72, 25)
_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicate, flags; not F_SETOWN, which would signal others
_SECCOMP = ((157, 167), (317, 277))  # prctl, seccomp: to install the next filter
_MISSING = ((435, 435), (437, 437))  # clone3, openat2: refused as unknown, so libc falls back to older calls


class _Machine(msgspec.Struct, frozen=True):
    audit: int
    column: int


_MACHINES: Final = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}


class SeccompUnavailableError(OSError):
    """This machine or its kernel cannot filter system calls."""


class _Program:
    """A classic BPF program: every rule jumps ahead to its own verdict."""

    def __init__(self, machine: _Machine) -> None:
        self._machine, self._code = machine, bytearray()
        self._put(_LOAD, 0, 0, _ARCHITECTURE)
        self._put(_EQUAL, 1, 0, machine.audit)
        self._put(_RETURN, 0, 0, _RET_KILL_PROCESS)
        self._put(_LOAD, 0, 0, _NUMBER)

    def _put(self, code: int, if_true: int, if_false: int, constant: int) -> None:
        self._code += struct.pack("=HBBI", code, if_true, if_false, constant)

    def verdict(self, call: tuple[int, int], verdict: int) -> None:
        number = call[self._machine.column]
        if number >= 0:
            self._put(_EQUAL, 0, 1, number)
            self._put(_RETURN, 0, 0, verdict)

    def if_clear(self, call: tuple[int, int], argument: int, bits: int) -> None:
        """Allow the call if none of `bits` is set in its argument."""
        self._if(call, argument, [(_BITS, bits, False)])

    def if_equal(self, call: tuple[int, int], argument: int, *values: int) -> None:
        """Allow the call if its argument is one of `values`."""
        self._if(call, argument, [(_EQUAL, value, True) for value in values])

    def _if(self, call: tuple[int, int], argument: int, tests: Sequence[tuple[int, int, bool]]) -> None:
        """Add the rule of a call. `tests`: (comparison, constant, the outcome that allows the call)."""
        number = call[self._machine.column]
        if number < 0:
            return
        self._put(_EQUAL, 0, 2 * len(tests) + 2, number)
        self._put(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)  # the low word: both machines are little-endian
        for comparison, constant, wanted in tests:
            self._put(comparison, int(not wanted), int(wanted), constant)
            self._put(_RETURN, 0, 0, _RET_ALLOW)
        self._put(_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)

    def finish(self) -> bytes:
        self._put(_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)
        return bytes(self._code)


def build_filter(pid: int, *, files: bool, last: bool, machine: str | None = None) -> bytes:
    """Return the filter for process `pid`.

    `files`: files may be opened for reading; `last`: no further filter can be installed. Raises
    SeccompUnavailableError on a machine whose system calls are not known.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        raise SeccompUnavailableError(f"there is no system call filter for {platform.machine()}")
    built = _Program(known)
    for call in _CALLS.values():
        built.verdict(call, _RET_ALLOW)
    if files:
        built.if_clear(_OPENAT, 2, _WRITING)
        built.if_clear(_OPEN, 1, _WRITING)
    for call in _SECCOMP if not last else ():
        built.verdict(call, _RET_ALLOW)
    built.if_equal(_TGKILL, 0, pid)  # abort() signals its own thread
    built.if_equal(_PRLIMIT, 0, 0)  # only its own limits, and it cannot raise the hard ones
    built.if_equal(_FCNTL, 1, *_DESCRIPTOR_COMMANDS)
    for call in _MISSING:
        built.verdict(call, _RET_ERRNO | errno.ENOSYS)
    return built.finish()


class _Sock(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(*, files: bool, last: bool) -> None:
    """Refuse every unlisted system call of this thread and of threads it creates; see `build_filter`.

    Raises SeccompUnavailableError.
    """
    code, libc = build_filter(os.getpid(), files=files, last=last), ctypes.CDLL(None, use_errno=True)
    given = _Sock(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0):
        raise SeccompUnavailableError(
            f"the kernel refuses the system call filter: {os.strerror(ctypes.get_errno())}"
        )
