"""Restrictions a sandbox process puts on itself: capabilities, resource limits, Landlock, system calls.

Law: every step only removes rights and cannot be undone. A step that the kernel does not support is
reported: without a system call filter nothing runs, without Landlock no file can be opened.
A system call that is not listed is refused with EPERM, so calls of future kernels are refused, too. No listed
call creates a process or thread, runs a program, opens a socket, signals or inspects another process, or
changes a file. Invariant: filters accumulate and are never removed.
https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

OPEN_FILES: Final = 64
CPU_SECONDS: Final = 6 * 3600  # over the whole life of a process
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPSET, _LANDLOCK = (
    {"x86_64": 126, "aarch64": 91},
    (444, 445, 446),
)  # create ruleset, add rule, restrict self
_CAPABILITY_VERSION = 0x20080522
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights in each version; 16 from version 5 on
_NETWORK, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
_libc = ctypes.CDLL(None, use_errno=True)


class RestrictionError(OSError):
    """A required step failed."""


def set_parent_death_signal(parent: int) -> None:
    """Make the kernel kill this process when `parent` dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """Drop all capabilities, also for programs run later. Raises RestrictionError."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails if the capability does not exist
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
        _check(_libc.syscall(number, header, none), "capset")


def set_resource_limits(*, files: int = 0) -> None:
    """Set the limits that hold from the first import on. `files`: files that are open for good."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process before the store
    for name, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 64 << 10),  # its log is the only file it can write
        (resource.RLIMIT_NOFILE, OPEN_FILES + files),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, CPU_SECONDS),
    ):
        resource.setrlimit(name, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # the parent's is lower; see `set_memory_limit`


def set_memory_limit(statm: int, more: int) -> int:
    """Limit the address space to `more` bytes beyond the present size; returns the limit.

    `statm`: an open /proc/self/statm.
    """
    pages = int(os.pread(statm, 100, 0).split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return most


def landlock_version() -> int:
    """Return the version of Landlock in the kernel, 0 if it has none."""
    found: int = _libc.syscall(_LANDLOCK[0], None, 0, 1)
    return max(0, found)


def restrict_files(readable: Sequence[str]) -> int:
    """Allow only files below `readable` to be read from now on, and none to be written.

    Returns Landlock's version. Raises RestrictionError.
    """
    version = landlock_version()
    if not version:
        raise RestrictionError("this kernel has no Landlock")
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    handled = struct.pack("=QQQ", rights, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    handled = handled[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _libc.syscall(_LANDLOCK[0], handled, len(handled), 0)
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path)
        _check(_libc.syscall(_LANDLOCK[2], ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # does not exist on this machine
    try:
        rights = _READ_FILE | _EXECUTE | (_READ_DIR if os.path.isdir(path) else 0)
        _check(_libc.syscall(_LANDLOCK[1], ruleset, 1, struct.pack("=Qi", rights, fd), 0), path)
    finally:
        os.close(fd)


def install_syscall_filter(*, files: bool, last: bool) -> None:
    """Refuse every system call that is not listed. Raises SeccompUnavailableError."""
    install_filter(build_filter(os.getpid(), files=files, last=last))


def _check(outcome: int, what: str) -> None:
    if outcome < 0:
        raise RestrictionError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


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


@dataclass(frozen=True, slots=True)
class _Machine:
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


def install_filter(code: bytes) -> None:
    """Install the filter on this thread and on threads it creates. Raises SeccompUnavailableError."""
    libc = ctypes.CDLL(None, use_errno=True)
    given = _Sock(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0):
        raise SeccompUnavailableError(
            f"the kernel refuses the system call filter: {os.strerror(ctypes.get_errno())}"
        )
