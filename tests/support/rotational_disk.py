"""A directory on a disk whose reads are counted below the file system, with the seeks of a rotational drive.

`rotational_disk(folder)` mounts ext4 on a loop device of its own. The kernel's block tracepoints say which
reads reached the device; `bench.drive_model` says which of them are seeks. Nothing is delayed, and no figure
depends on time.

Law: needs root, loop devices, e2fsprogs and tracefs; where one is missing the test is skipped with the
reason, and fails in CI (`tests.support.required`). What is mounted is unmounted when the context ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.drive_model import Completed, DriveStats, Geometry, Issued, Request, replay
from bench.page_cache import drop_pages
from tests.support.required import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "rotational-disk"
"""For MESH_TEST_WITHOUT."""
MIB: Final = 1 << 20
SECTOR: Final = 512
LIMIT_S: Final = 60
"""For one program of the system."""
READ_AHEAD_KIB: Final = 128
TRACE_KIB: Final = 8192
"""Of each core; a request takes about 200 bytes."""
_EVENT: Final = re.compile(r"block_rq_(issue|complete): \d+,\d+ (\w+) (?:\d+ )?\([^)]*\) (\d+) \+ (\d+) ")


@dataclass(frozen=True, slots=True)
class ReadLog(DriveStats):
    """`requests`: the reads (offset, length in bytes) in the order in which they reached the device."""

    requests: tuple[Request, ...] = ()


class RotationalDisk:
    """`path` is a directory on the disk; `device` its block device, which says that it is rotational."""

    def __init__(self, path: Path, device: Path, trace: Path, size: int) -> None:
        self.path, self.device = path, device
        self._trace, self._geometry = trace, Geometry(size)

    def __repr__(self) -> str:
        return f"<RotationalDisk {self.path} on {self.device}>"

    def drop_caches(self) -> None:
        """Write back all files of the disk, drop their pages from memory, and forget the reads so far.

        Pages that a process maps stay, as do inodes and extent maps of the file system.
        """
        drop_pages(self.path)
        self._trace.joinpath("trace").write_text("")

    def stats(self) -> ReadLog:
        """Reads since `drop_caches`, with the seeks of a drive that takes 32 at a time in one direction.

        Raises RuntimeError when there were more than the trace holds.
        """
        lost = sum(map(_overrun, self._trace.glob("per_cpu/cpu*/stats")))
        if lost:
            raise RuntimeError(f"{lost} events of {self.device} are lost: trace fewer reads at a time")
        events = list(_events(self._trace.joinpath("trace").read_text()))
        counted = replay(self._geometry, events)
        reads = (each.request for each in events if isinstance(each, Issued) and not each.request.write)
        return ReadLog(
            **{each.name: getattr(counted, each.name) for each in fields(DriveStats)}, requests=tuple(reads)
        )


def _overrun(stats: Path) -> int:
    return int(re.findall(r"overrun: (\d+)", stats.read_text())[0])


def _events(text: str) -> Iterator[Issued | Completed]:
    """Reads and writes of data in a trace; flushes and discards carry none."""
    for kind, flags, sector, sectors in _EVENT.findall(text):
        if ("R" not in flags and "W" not in flags) or sectors == "0":
            continue
        if kind == "issue":
            write = "W" in flags
            yield Issued(Request(int(sector) * SECTOR, int(sectors) * SECTOR, write=write))
        else:
            yield Completed(int(sector) * SECTOR)


@contextmanager
def rotational_disk(folder: Path, *, size: int = 256 * MIB) -> Iterator[RotationalDisk]:
    """Make the disk in `folder` (a sparse file of `size` bytes) and mount it at `folder/disk`."""
    _require()
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(size)
    with ExitStack() as stack:
        stack.callback(image.unlink)
        # Metadata in front and large block groups: a file that is written at once lies in one piece.
        layout = ("-b", "4096", "-m", "0", "-O", "^has_journal")
        options = "packed_meta_blocks=1,lazy_itable_init=0,nodiscard"
        _run("mkfs.ext4", "-q", "-F", *layout, "-E", options, str(image))
        device = Path(_run("losetup", "--find", "--show", str(image)))
        try:
            queue = Path("/sys/block", device.name, "queue")
            (queue / "rotational").write_text("1")
            (queue / "read_ahead_kb").write_text(str(READ_AHEAD_KIB))
            _run("mount", "-o", "noatime", str(device), str(mounted))
            stack.callback(_run, "umount", str(mounted))
        finally:
            _run("losetup", "--detach", str(device))  # by the kernel, when it is unmounted
        trace = stack.enter_context(_traced(device))
        yield RotationalDisk(mounted, device, trace, size)


@contextmanager
def _traced(device: Path) -> Iterator[Path]:
    """A trace instance of its own for requests of the device."""
    with _tracefs() as root:
        instance = Path(tempfile.mkdtemp(prefix="rotational-", dir=root / "instances"))
        try:
            (instance / "buffer_size_kb").write_text(str(TRACE_KIB))
            number = device.stat().st_rdev
            kernel = os.major(number) << 20 | os.minor(number)
            for event in ("block_rq_issue", "block_rq_complete"):
                (instance / "events/block" / event / "filter").write_text(f"dev == {kernel}")
                (instance / "events/block" / event / "enable").write_text("1")
            yield instance
        finally:
            (instance / "events/enable").write_text("0")
            instance.rmdir()


@contextmanager
def _tracefs() -> Iterator[Path]:
    """A mount of tracefs that nobody else unmounts."""
    place = Path(tempfile.mkdtemp(prefix="tracefs-"))
    try:
        _run("mount", "-t", "tracefs", "nodev", str(place))
        try:
            yield place
        finally:
            _run("umount", str(place))
    finally:
        place.rmdir()


def _require() -> None:
    """Skip the test, in CI fail it, where no such disk can be made."""
    if os.geteuid() != 0:
        missing(NAME, "run the tests as root")
    for program in ("losetup", "mkfs.ext4"):
        if shutil.which(program) is None:
            missing(NAME, f"`apt-get install mount e2fsprogs`, which bring {program}")
    if not Path("/dev/loop-control").exists():
        missing(NAME, "a kernel with loop devices, and /dev/loop-control")
    if "tracefs" not in Path("/proc/filesystems").read_text():
        missing(NAME, "a kernel with tracefs")
    if subprocess.run(["losetup", "--find"], capture_output=True, check=False, timeout=LIMIT_S).returncode:
        missing(NAME, "a free loop device")
    try:
        with _tracefs() as root:
            if not (root / "events/block/block_rq_issue").exists():
                missing(NAME, "a kernel with block tracepoints (CONFIG_BLK_DEV_IO_TRACE)")
    except ProgramError as error:
        missing(NAME, f"permission to mount: {error}")


class ProgramError(RuntimeError):
    """A program of the system failed; the message has what it printed."""


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise ProgramError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
