"""An emulated 7200-rpm drive with a file system: ext4 on a loop device, over a file of FUSE
(`bench.rotational_device`).

    with rotational_drive(folder, size=8 << 30) as drive:
        fill(drive.path)
        drive.drop_caches()
        drive.delay(True)
        before = drive.stats()
        read(drive.path)
        print((drive.stats() - before).seeks)

`python -m bench.rotational_drive FOLDER GIB` holds such a drive for a person, who types `on`, `off`, `cold`
or `stats`; the end of its input takes the drive away. The context manager is the parent of that process: the
drive goes when its parent ends, also when it is killed.

Law: needs root, loop devices, /dev/fuse and the packages in `PACKAGES`; `missing()` says what is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from bench.drive_model import DriveStats
from bench.page_cache import drop_metadata, drop_pages
from bench.processes import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = {"mkfs.ext4": "e2fsprogs", "losetup": "mount"}
"""Program → the Debian package that has it."""
READ_AHEAD_KIB: Final = 1024
"""Of the loop device: what a server with rotational drives is set to, and kinder to streams than 128."""
START_S, UNMOUNT_S, STOP_S = 15.0, 3.0, 60.0


class DriveError(RuntimeError):
    """The drive could not be made, or has gone; the message says which step failed."""


def missing() -> str:
    """What to install or change before a drive can be made here; empty when nothing."""
    if os.geteuid() != 0:
        return "an emulated drive needs root: it mounts a file system"
    packages = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if packages:
        return f"`apt-get install {' '.join(packages)}`, which an emulated drive needs"
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not Path(device).exists():
            return f"an emulated drive needs {device}, which this machine lacks"
    return ""


class RotationalDrive:
    """A drive that exists. `path`: the directory on it. Used by one thread."""

    def __init__(self, path: Path, commands: IO[str], answers: IO[str], pid: int) -> None:
        self.path, self._pid = path, pid
        self._commands, self._answers = commands, answers

    def __repr__(self) -> str:
        return f"<RotationalDrive {self.path}>"

    def delay(self, on: bool) -> None:
        """Whether requests take a drive's time, and are counted, from now on. A new drive is off."""
        self._ask("on" if on else "off")

    def drop_caches(self) -> None:
        """Write back the drive's files and drop them from memory, with inodes and extent maps.

        Files elsewhere stay in memory, among them the image, so that no other disk's time counts.
        """
        self._ask("cold")

    def stats(self) -> DriveStats:
        """Everything that was asked of the drive so far while it was on."""
        return self._ask("stats")

    def cpu_s(self) -> float:
        """Seconds of the processors that its emulation has taken so far; a real drive takes none."""
        return cpu_seconds(self._pid)

    def _ask(self, command: str) -> DriveStats:
        try:
            self._commands.write(command + "\n")
            self._commands.flush()
        except OSError as error:
            raise DriveError("the process that holds the emulated drive has ended") from error
        line = self._answers.readline()
        if not line:
            raise DriveError("the process that holds the emulated drive has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise DriveError(answer["error"])
        return DriveStats(**answer["stats"])


@contextmanager
def rotational_drive(folder: Path, *, size: int) -> Iterator[RotationalDrive]:
    """Make a drive of `size` bytes (a sparse file in `folder`) in a process of its own; raises DriveError.

    At the end nothing is left of it, whatever still had files open.
    """
    if reason := missing():
        raise DriveError(reason)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "bench.rotational_drive", str(folder), str(size / (1 << 30))]
    pipe = subprocess.PIPE
    with (folder / "holder.log").open("w") as log:
        holder = subprocess.Popen(
            argv, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
        )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if not holder.stdout.readline():
            raise DriveError(
                (folder / "holder.log").read_text().strip() or "the emulated drive did not start"
            )
        yield RotationalDrive(folder / "disk", holder.stdin, holder.stdout, holder.pid)
    finally:
        with suppress(OSError):
            holder.stdin.close()
        try:
            holder.wait(STOP_S)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()
        remove(folder)


def remove(folder: Path) -> None:
    """Take away what a drive in the folder has left behind; nothing is not an error."""
    for mounted in (folder / "disk", folder / "device"):
        if _is_mounted(mounted):
            _unmount(mounted)
    for name in ("image", "device", "control"):
        (folder / name).unlink(missing_ok=True)


def _hold(folder: Path, size: int) -> None:
    """Make the drive, carry out the lines of standard input, and take it away at their end."""
    remove(folder)
    os.chdir(folder)  # names of sockets are short
    with suppress(OSError):
        # What it starts is hardware to others: their load must not change the order of requests.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with ExitStack() as stack:
        stack.callback(remove, folder)
        with open("image", "wb") as file:
            file.truncate(size)
        layout = ("-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard")
        _run("mkfs.ext4", "-q", "-F", *layout, "image")
        Path("device").touch()
        served = _start("device", "image", "device", "control")
        stack.callback(_end, served)
        stack.callback(_unmount, folder / "device")
        _await(served, lambda: Path("control").exists() and Path("device").stat().st_size == size)
        device = _mount(stack, folder)
        control = stack.enter_context(socket.socket(socket.AF_UNIX))
        control.connect("control")
        platter = stack.enter_context(control.makefile("rw"))
        stack.callback(_ask_platter, platter, "off")  # what is left to write is not waited for
        _say({"disk": str(folder / "disk")})
        for line in sys.stdin:
            _obey(platter, device, line.strip())


def _mount(stack: ExitStack, folder: Path) -> Path:
    """Mount the file system at `folder/disk`; the loop device."""
    (folder / "disk").mkdir(exist_ok=True)
    device = Path(_run("losetup", "--direct-io=on", "--find", "--show", "device")[1])
    try:
        queue = Path("/sys/block", device.name, "queue")
        (queue / "rotational").write_text("1")
        (queue / "read_ahead_kb").write_text(str(READ_AHEAD_KIB))
        _run("mount", "-o", "noatime", str(device), str(folder / "disk"))
        stack.callback(_unmount, folder / "disk")
    finally:
        # In use, it is detached by the kernel when it is unmounted, also when this process has been killed.
        _run("losetup", "--detach", str(device))
    return device


def _obey(platter: IO[str], device: Path, command: str) -> None:
    """Carry out one line and answer it."""
    if command == "cold":
        drop_pages(Path("disk"))
        drop_metadata(device)
    elif command not in ("on", "off", "stats"):
        _say({"error": f"{command!r}: say on, off, cold or stats"})
        return
    _say({"stats": asdict(_ask_platter(platter, command if command != "cold" else "stats"))})


def _ask_platter(platter: IO[str], command: str) -> DriveStats:
    platter.write(command + "\n")
    platter.flush()
    return DriveStats(**json.loads(platter.readline()))


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def _start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "bench.rotational_device", *arguments]
    with open(f"{name}.log", "wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def _await(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise DriveError(f"the device did not start: {Path('device.log').read_text().strip()}")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(UNMOUNT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_mounted(place: Path) -> bool:
    """Also where the process behind the mount has ended, so that a stat of it fails."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(place.absolute()) for line in mounts)


def _unmount(place: Path) -> None:
    """Unmount; from below those who still have files open when they do not close them in time."""
    deadline = time.monotonic() + UNMOUNT_S
    while _is_mounted(place):
        code, _ = _run("umount", str(place), check=False)
        if code and time.monotonic() > deadline:
            _run("umount", "--lazy", str(place), check=False)
            return
        if code:
            time.sleep(0.1)


def _run(*argv: str, check: bool = True) -> tuple[int, str]:
    """Exit status and standard output of a program; DriveError when `check` and it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise DriveError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.returncode, done.stdout.strip()


def main() -> None:
    """`python -m bench.rotational_drive FOLDER GIB`."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m bench.rotational_drive FOLDER GIB")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder, size = Path(sys.argv[1]).resolve(), int(float(sys.argv[2]) * (1 << 30))
    if reason := missing():
        raise SystemExit(reason)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _hold(folder, size)
    except DriveError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
