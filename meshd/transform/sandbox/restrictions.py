"""Restrictions a sandbox process puts on itself: capabilities, resource limits, Landlock. `seccomp` filters
its system calls.

Law: every step only removes rights and cannot be undone. A step that the kernel does not support is
reported: without a system call filter nothing runs, without Landlock no file can be opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
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


def _check(outcome: int, what: str) -> None:
    if outcome < 0:
        raise RestrictionError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
