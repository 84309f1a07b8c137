"""File systems below a node's directories: which can hold an index, and what weakens their promises.

An index is an LMDB file: processes write it and read it through shared memory maps, and lock each other by
`flock`. Network file systems keep neither promise, so an index on one may be damaged without notice. File
systems in user space differ; there a map is tried.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.errors import FormatError

if TYPE_CHECKING:
    from meshd.util.clock import Clock

_MOUNTS: Final = Path("/proc/self/mountinfo")
_BLOCK: Final = Path("/sys/dev/block")
_NETWORK: Final = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs"}) | {
    *("lustre", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
}
_NETWORK_IN_USER_SPACE: Final = frozenset({"blobfuse", "blobfuse2", "ceph-fuse", "curlftpfs", "davfs2"}) | {
    *("gcsfuse", "glusterfs", "goofys", "juicefs", "mount-s3", "mountpoint-s3", "rclone", "s3fs"),
    *("seaweedfs", "smbnetfs", "sshfs"),
}
_WEAK_OPTIONS: Final = {
    "nobarrier": "syncs do not reach the disk behind its write cache",
    "barrier=0": "syncs do not reach the disk behind its write cache",
    "data=writeback": "files may hold old bytes of others after a power cut",
}
_PAGE: Final = mmap.PAGESIZE
_SYNCS: Final = 9


class FileSystem(msgspec.Struct, frozen=True):
    """The mount below a directory. `kind`: as the kernel calls it, `ext4` or `fuse.sshfs`; `source`: device
    or server; `write_cache`: the device's, `write back`, `write through`, or "" if it has none of its own."""

    mount_point: str
    kind: str
    source: str
    options: frozenset[str]
    write_cache: str = ""

    @property
    def is_network(self) -> bool:
        """Whether other machines serve it."""
        first, _, program = self.kind.partition(".")
        if first.startswith("fuse"):
            return self._program(program) in _NETWORK_IN_USER_SPACE
        return first in _NETWORK

    def _program(self, program: str) -> str:
        """The program behind a file system in user space; some only name themselves as its source."""
        return program or self.source.partition(":")[0].partition("#")[0]

    @property
    def weaknesses(self) -> list[str]:
        """Mount options that weaken what a sync promises, each with what it does."""
        return [f"{name}: {what}" for name, what in _WEAK_OPTIONS.items() if name in self.options]


def file_system_of(path: Path, mounts: Path = _MOUNTS, block: Path = _BLOCK) -> FileSystem | None:
    """Return the file system that holds a path; None where the kernel does not tell (blocking)."""
    place = os.path.realpath(path)
    found: FileSystem | None = None
    device = ""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:  # id, parent, device, root, mount point, options, …, -, kind, source, options
        head, _, tail = line.partition(" - ")
        about, told = head.split(" "), tail.split(" ")
        if len(about) < 6 or len(told) < 3:
            continue
        point = _unescape(about[4])
        holds = place == point or place.startswith(f"{point.rstrip('/')}/")
        if holds and (found is None or len(point) >= len(found.mount_point)):  # the later one covers
            options = frozenset(f"{about[5]},{told[2]}".split(","))
            found, device = FileSystem(point, told[0], _unescape(told[1]), options), about[2]
    if found is None:
        return None
    cache = _write_cache(block / device)
    return FileSystem(found.mount_point, found.kind, found.source, found.options, cache)


def _unescape(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def _write_cache(device: Path) -> str:
    for queue in (device / "queue", device.resolve().parent / "queue"):  # a partition has none of its own
        with suppress(OSError):
            return (queue / "write_cache").read_text().strip()
    return ""


def require_index_file_system(directory: Path, mounts: Path = _MOUNTS) -> None:
    """Raise FormatError if an index in this directory would not be safe: on a network file system, or on one
    in user space whose memory maps do not show what is written (blocking)."""
    found = file_system_of(directory, mounts)
    if found is None:
        return
    advice = (
        f"{directory} is on {found.kind} ({found.source}): put the index on a local file system with "
        "--index-dir, and the data directory, which has the control store, on one with --data-dir; disks "
        "may stay"
    )
    if found.is_network:
        raise FormatError(
            f"an index on a network file system may be damaged without notice. {advice}. "
            "The setting `index-file-system: any` skips this check"
        )
    if found.kind.startswith("fuse") and not _maps_show_writes(directory):
        raise FormatError(
            f"this file system cannot map files into shared memory, as an index needs. {advice}"
        )


def sync_seconds(directory: Path, clock: Clock) -> float:
    """Return what a sync of a page takes that is written again and again: the median of a few (blocking).
    Raises OSError."""
    probe, took = directory / "probe.sync", []
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for number in range(_SYNCS + 1):  # the first one also writes where the file lies
            began = clock.monotonic()
            os.pwrite(fd, bytes([number]) * _PAGE, 0)
            os.fdatasync(fd)
            took.append(clock.monotonic() - began)
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
    return statistics.median(took[1:])


def _maps_show_writes(directory: Path) -> bool:
    probe = directory / "probe.map"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, bytes(_PAGE), 0)
            with mmap.mmap(fd, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                before = mapped[0]
                os.pwrite(fd, b"\1", 0)
                return (before, mapped[0]) == (0, 1)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.errno not in (errno.ENODEV, errno.EINVAL, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)
