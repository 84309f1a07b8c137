"""The emulated drive itself, where it can be made; what it says where it cannot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.drive_model import DriveStats
from bench.rotational_drive import DriveError, missing, rotational_drive
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.rotational_drive import RotationalDrive

MIB = 1 << 20
SIZE, FILE = 512 * MIB, 16 * MIB
PHOTOGRAPH = 64 << 10
ROOT = Path(__file__).resolve().parents[2]
emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[RotationalDrive]:
    with rotational_drive(tmp_path / "drive", size=SIZE) as made:
        yield made


def read(file: Path, offsets: list[int]) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            os.pread(descriptor, PHOTOGRAPH, offset)
    finally:
        os.close(descriptor)


def spent(drive: RotationalDrive, work: Callable[[], object]) -> tuple[DriveStats, float]:
    """What the work asked of the drive, cold, and its seconds."""
    drive.drop_caches()
    drive.delay(True)
    before, began = drive.stats(), time.monotonic()
    work()
    seconds = time.monotonic() - began
    drive.delay(False)
    return drive.stats() - before, seconds


@emulated
def test_the_drive_takes_the_time_that_it_counts(drive: RotationalDrive) -> None:
    file = drive.path / "photographs"
    file.write_bytes(random.Random(0).randbytes(FILE))
    places = list(range(0, FILE, MIB))
    random.Random(1).shuffle(places)
    # One read after the other: of several at once, one may overtake another on its way to the drive.
    in_order, seconds = spent(drive, lambda: read(file, list(range(0, FILE, PHOTOGRAPH))))
    assert FILE <= in_order.bytes < FILE + MIB  # and extent maps
    assert in_order.seeks <= in_order.reads / 2
    assert in_order.disk_s <= seconds
    at_random, seconds = spent(drive, lambda: read(file, places))
    assert len(places) - 1 <= at_random.seeks <= len(places) + 4
    assert at_random.disk_s <= seconds
    assert at_random.seek_s > 10 * at_random.media_s


@emulated
def test_what_is_off_or_in_memory_is_not_counted(drive: RotationalDrive) -> None:
    file = drive.path / "file"
    file.write_bytes(bytes(FILE))
    drive.drop_caches()
    file.read_bytes()
    assert drive.stats() == DriveStats()
    drive.delay(True)
    file.read_bytes()
    assert drive.stats().bytes == 0
    drive.drop_caches()
    file.read_bytes()
    assert drive.stats().bytes >= FILE


@emulated
def test_writes_are_counted_apart(drive: RotationalDrive) -> None:
    data = random.Random(0).randbytes(FILE)
    drive.delay(True)
    (drive.path / "file").write_bytes(data)
    drive.drop_caches()
    assert drive.stats().written >= FILE
    assert (drive.path / "file").read_bytes() == data


@emulated
def test_an_unknown_command_changes_nothing(drive: RotationalDrive) -> None:
    with pytest.raises(DriveError, match="'faster': say on, off, cold or stats"):
        drive._ask("faster")
    assert drive.stats() == DriveStats()


def _gone(folder: Path) -> bool:
    mounts = Path("/proc/self/mounts").read_text()
    return str(folder) not in mounts and not any(str(folder) in file for file in _backing_files())


def _backing_files() -> Iterator[str]:
    """The files behind all loop devices of this machine; devices of other tests come and go."""
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            yield file.read_text()


def _await_gone(folder: Path) -> None:
    deadline = time.monotonic() + WAIT_TIMEOUT
    while not _gone(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _gone(folder)


@emulated
def test_nothing_is_left_even_where_a_file_stays_open(tmp_path: Path) -> None:
    with rotational_drive(tmp_path / "drive", size=SIZE) as drive:
        assert drive.path.is_mount()
        opened = (drive.path / "file").open("w")
    assert not drive.path.is_mount()
    opened.close()
    _await_gone(tmp_path)
    assert sorted(path.name for path in (tmp_path / "drive").iterdir() if path.suffix != ".log") == ["disk"]


@emulated
def test_a_parent_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from bench.rotational_drive import rotational_drive\n"
        "with rotational_drive(pathlib.Path(sys.argv[1]), size=1 << 29) as drive:\n"
        "    (drive.path / 'file').write_bytes(bytes(1 << 24))\n"
        "    print('made', flush=True)\n"
        "    time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "drive")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "made\n"
        assert not _gone(tmp_path)
        parent.kill()
    _await_gone(tmp_path)


@emulated
def test_a_holder_that_is_killed_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    with rotational_drive(folder, size=SIZE) as drive:
        [holder] = [
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if f"bench.rotational_drive\0{folder}".encode() in process.joinpath("cmdline").read_bytes()
        ]
        os.kill(holder, signal.SIGKILL)
        with pytest.raises(DriveError, match="has ended"):
            drive.stats()
    _await_gone(tmp_path)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "an emulated drive needs root: it mounts a file system"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("mkfs") else name)
    assert missing() == "`apt-get install e2fsprogs`, which an emulated drive needs"
    with pytest.raises(DriveError, match="apt-get install e2fsprogs"), rotational_drive(tmp_path, size=SIZE):
        pass
