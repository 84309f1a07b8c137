"""Statistics page: a small memory-mapped file in which a loader publishes its numbers for `mesh top`.

Law: an update costs two microseconds and no system call; a reader never waits for the writer, and
retries on a checksum mismatch.
Invariant: a page is removed with its loader; the same user's next loader removes the pages of killed
processes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import stat
import struct
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from meshsdk.loader_stats import Meter, Step

VARIABLE: Final = "MESH_RUNTIME_DIR"
SIZE: Final = 4096
MAGIC: Final = b"MESHTOP1"
HEAD: Final = struct.Struct("<8sI")  # magic, length of the description in bytes
FIGURES_OFFSET: Final = 3072
FIGURES: Final = struct.Struct("<16d")
CHECKSUM: Final = struct.Struct("<I")  # follows the figures and covers them
PREFIX: Final = "loader-"


@dataclass(frozen=True, slots=True)
class Job:
    """The description of a loader, written once."""

    pid: int
    rank: int
    world: int
    source: str
    plan: str
    batch: int
    name: str
    host: str
    started: float

    def to_json(self) -> bytes:
        document = {name: getattr(self, name) for name in self.__slots__}
        document |= {name: str(document[name])[:300] for name in ("source", "name", "host")}
        return json.dumps(document).encode()


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a loader, updated at every wait and every batch. Times are monotonic seconds of this
    machine. `waiting`: when the present wait began, 0 while the step computes; `running`: when the present
    loop began, 0 between loops; `seconds`, `waited`, …: totals over finished loops and completed steps."""

    now: float
    running: float
    waiting: float
    epoch: float
    step: float
    steps: float
    samples: float
    batches: float
    bytes: float
    seconds: float
    waited: float
    preprocessing: float
    fetch: float
    retries: float
    steady: float
    steady_waited: float


def directory(env: dict[str, str] | None = None) -> Path:
    """Returns the directory of this user's pages: MESH_RUNTIME_DIR, else a folder in XDG_RUNTIME_DIR, else
    one in the temporary directory."""
    env = dict(os.environ) if env is None else env
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    if env.get("XDG_RUNTIME_DIR") and os.access(env["XDG_RUNTIME_DIR"], os.W_OK):
        return Path(env["XDG_RUNTIME_DIR"]) / "shardmesh"
    return Path(tempfile.gettempdir()) / f"shardmesh-{os.getuid()}"


class StatsPage:
    """The observer that writes the page of one loader."""

    def __init__(self, place: Path, job: Job, steps: int) -> None:
        self.pid = os.getpid()
        self._steps = steps
        self._running = self._waiting = 0.0
        self._epoch = self._step = self._bytes = 0
        self.path = place / f"{PREFIX}{self.pid}-{id(self):x}"
        self._pages = _map_file(self.path)
        description = job.to_json()
        if len(description) > FIGURES_OFFSET - HEAD.size:
            description = b"{}"
        self._pages[HEAD.size : HEAD.size + len(description)] = description
        HEAD.pack_into(self._pages, 0, MAGIC, len(description))
        self._seal()
        # The mapping lives as long as this object: at interpreter exit a loop may end after its page is gone.
        self._finalizer = weakref.finalize(self, _remove, self.path, self.pid)
        ends = sys.modules.get("multiprocessing.util")
        if ends is not None:  # a child of multiprocessing exits without running weakref finalizers
            # Of this object, with which multiprocessing forgets it; of None, it would be kept for ever.
            ends.Finalize(self, self._finalizer, exitpriority=10)

    def __repr__(self) -> str:
        return f"<StatsPage {self.path}>"

    def on_wait(self, now: float) -> None:
        self._waiting = now
        self._running = self._running or now
        self._set(0, now)
        self._set(1, self._running)
        self._set(2, now)
        self._seal()

    def on_batch(self, step: Step, meter: Meter) -> None:
        self._waiting = 0.0
        self._epoch, self._step = step.epoch, step.step
        self._bytes += step.bytes
        self._write(step.until, meter)

    def on_end(self, now: float, meter: Meter) -> None:
        self._waiting = self._running = 0.0
        if self._finalizer.alive:  # at interpreter exit the modules that a write needs are gone
            self._write(now, meter)

    def close(self) -> None:
        self._finalizer()

    def _write(self, now: float, meter: Meter) -> None:
        running = now - self._running if self._running else 0.0
        steady, steady_waited = meter.steady_seconds(now)
        FIGURES.pack_into(
            self._pages, FIGURES_OFFSET, now, self._running, self._waiting, self._epoch, self._step,
            self._steps, meter.samples, meter.batches, self._bytes, meter.seconds + running, meter.waited,
            meter.preprocessing, meter.fetch, meter.retries, steady, steady_waited,
        )  # fmt: skip
        self._seal()

    def _set(self, number: int, value: float) -> None:
        struct.pack_into("<d", self._pages, FIGURES_OFFSET + 8 * number, value)

    def _seal(self) -> None:
        figures = self._pages[FIGURES_OFFSET : FIGURES_OFFSET + FIGURES.size]
        CHECKSUM.pack_into(self._pages, FIGURES_OFFSET + FIGURES.size, crc32(figures))


def open_page(job: Job, steps: int) -> StatsPage | None:
    """Opens the page of a loader of this process. Returns None if the directory belongs to another user, is
    writable by others, or is on a full disk; the loader then works without a page."""
    with contextlib.suppress(OSError):
        place = directory()
        _own(place)
        _remove_stale_pages(place)
        return StatsPage(place, job, steps)
    return None


def describe(rank: int, world: int, source: str, plan: str, batch: int, name: str) -> Job:
    """Returns the description of a loader of this process."""
    host = socket.gethostname()
    return Job(os.getpid(), rank, world, source, plan, batch, name, host, round(time.time(), 3))


def _own(place: Path) -> None:
    """Creates the directory if needed. Raises OSError if another user owns it or may write to it: in a shared
    temporary directory somebody else may have created it first."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{place} must belong to this user and be writable by no other")


def _map_file(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a full disk is an error here, not a SIGBUS later
        return mmap.mmap(descriptor, SIZE)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_stale_pages(place: Path) -> None:
    """Removes the pages of processes that no longer run."""
    for path in place.glob(f"{PREFIX}*"):
        pid = pid_of_page(path)
        if pid is None or not is_running(pid):
            with contextlib.suppress(OSError):
                path.unlink()


def pid_of_page(path: Path) -> int | None:
    """Returns the process id in a page's file name; None if it has none."""
    number = path.name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 12 else None


def is_running(pid: int) -> bool:
    """Returns whether the process exists, whichever user it belongs to."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True
