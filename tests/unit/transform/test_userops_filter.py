"""The system call filter, run by an interpreter of its own: what it lets through, number by number."""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

import pytest

from meshd.transform.sandbox import seccomp

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
DENIED, MISSING = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
X86, ARM = 0xC000003E, 0xC00000B7
PID = 4711
# name: number on x86-64, on arm64
REFUSED = {
    "clone": (56, 220),
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "mkdirat": (258, 34),
    "linkat": (265, 37),
    "symlinkat": (266, 36),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "creat": (85, -1),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "shmget": (29, 194),
    "mq_open": (180, 180),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "ioctl": (16, 29),
    "setuid": (105, 146),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "sched_setaffinity": (203, 122),
    "timer_create": (222, 107),
    "inotify_init1": (294, 26),
    "a call of tomorrow": (700, 700),
}


def verdict(code: bytes, number: int, arch: int, args: Sequence[int] = ()) -> int:
    """What the kernel would do: classic BPF over struct seccomp_data."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *(list(args) + [0] * (6 - len(args))))
    at = accumulator = 0
    while True:
        op, if_true, if_false, constant = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif op == 0x15:
            at += if_true if accumulator == constant else if_false
        elif op == 0x45:
            at += if_true if accumulator & constant else if_false
        else:
            assert op == 0x06
            return int(constant)


MACHINES = pytest.mark.parametrize(
    ("machine", "arch", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)], ids=["x86-64", "arm64"]
)


def made(machine: str, *, files: bool = True, last: bool = True) -> bytes:
    return seccomp.build_filter(PID, files=files, last=last, machine=machine)


@MACHINES
def test_what_is_not_listed_is_refused(machine: str, arch: int, column: int) -> None:
    for files in (True, False):
        code = made(machine, files=files)
        for name, numbers in REFUSED.items():
            if numbers[column] >= 0:
                assert verdict(code, numbers[column], arch) == DENIED, name


@MACHINES
def test_another_machines_calls_end_the_process(machine: str, arch: int, column: int) -> None:
    code = made(machine)
    assert verdict(code, 0, 0x40000003) == KILL  # 32-bit x86
    assert verdict(code, 0, ARM if arch == X86 else X86) == KILL


def test_the_other_numbers_of_x86_64_are_refused() -> None:
    assert verdict(made("x86_64"), 0x40000000, X86) == DENIED  # x32's read
    assert verdict(made("x86_64"), 0, X86) == ALLOW


@MACHINES
def test_files_are_opened_for_reading_or_not_at_all(machine: str, arch: int, column: int) -> None:
    openat = (257, 56)[column]
    for flags, wanted in (
        (os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY, ALLOW),
        (os.O_WRONLY, DENIED),
        (os.O_RDWR, DENIED),
        (os.O_RDONLY | os.O_CREAT, DENIED),
        (os.O_RDONLY | os.O_TRUNC, DENIED),
        (os.O_RDONLY | os.O_APPEND, DENIED),
        (os.O_TMPFILE | os.O_RDWR, DENIED),
    ):
        assert verdict(made(machine), openat, arch, (0, 0, flags)) == wanted
        assert verdict(made(machine, files=False), openat, arch, (0, 0, flags)) == DENIED
    if column == 0:
        assert verdict(made(machine), 2, arch, (0, os.O_RDONLY)) == ALLOW
        assert verdict(made(machine), 2, arch, (0, os.O_WRONLY)) == DENIED
        assert verdict(made(machine, files=False), 2, arch, (0, os.O_RDONLY)) == DENIED


@MACHINES
def test_calls_about_processes_are_about_its_own(machine: str, arch: int, column: int) -> None:
    tgkill, prlimit, fcntl = ((234, 302, 72), (131, 261, 25))[column]
    code = made(machine)
    assert verdict(code, tgkill, arch, (PID, PID, 6)) == ALLOW
    assert verdict(code, tgkill, arch, (1, 1, 9)) == DENIED
    assert verdict(code, prlimit, arch, (0, 7)) == ALLOW
    assert verdict(code, prlimit, arch, (1, 7)) == DENIED
    assert verdict(code, fcntl, arch, (0, 3)) == ALLOW  # F_GETFL
    for command in (8, 10, 15, 1033):  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_ADD_SEALS
        assert verdict(code, fcntl, arch, (0, command)) == DENIED


@MACHINES
def test_a_filter_follows_only_where_one_is_to(machine: str, arch: int, column: int) -> None:
    for number in ((157, 317), (167, 277))[column]:
        assert verdict(made(machine, last=False), number, arch) == ALLOW
        assert verdict(made(machine, last=True), number, arch) == DENIED


@MACHINES
def test_newer_calls_with_older_ones_behind_them_are_missing(machine: str, arch: int, column: int) -> None:
    assert verdict(made(machine), 435, arch) == MISSING  # clone3
    assert verdict(made(machine), 437, arch) == MISSING  # openat2
