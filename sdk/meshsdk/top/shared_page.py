"""Statistics page: a small memory-mapped file in which a loader publishes its numbers for `mesh top`.

Law: an update costs two microseconds and no system call; a reader never waits for the writer, and
retries on a checksum mismatch.
Invariant: a page is removed with its loader; the same user's next loader removes pages of killed
processes.
"""

from __future__ import annotations

import contextlib
import json
import math
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
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.meters import Meter, Step

VARIABLE: Final = "MESH_RUNTIME_DIR"
SIZE: Final = 4096
_MAGIC: Final = b"MESHTOP1"
_HEAD: Final = struct.Struct("<8sI")  # magic, bytes of the description
_PLACE: Final = 3072
_FIGURES: Final = struct.Struct("<16d")
_SUM: Final = struct.Struct("<I")
_ATTEMPTS: Final = 50
_PREFIX: Final = "loader-"


@dataclass(frozen=True, slots=True)
class Job:
    """What a loader says of itself once."""

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
    """And again and again. Times are monotonic seconds of this machine; `waiting`: since when, 0 while the
    step computes; `running`: since when, 0 between loops; `seconds`, `waited`, …: of loops that are over and
    steps that were taken."""

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
    """Where this user's pages are: MESH_RUNTIME_DIR, else below XDG_RUNTIME_DIR, else below the temporary
    directory."""
    env = dict(os.environ) if env is None else env
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    if env.get("XDG_RUNTIME_DIR") and os.access(env["XDG_RUNTIME_DIR"], os.W_OK):
        return Path(env["XDG_RUNTIME_DIR"]) / "shardmesh"
    return Path(tempfile.gettempdir()) / f"shardmesh-{os.getuid()}"


class StatsPage:
    """An observer of a loop. Where the directory cannot be used (it is somebody else's, or full) there is no
    page, and nothing else is different."""

    def __init__(self, place: Path, job: Job, steps: int) -> None:
        self.pid = os.getpid()
        self._steps = steps
        self._running = self._waiting = 0.0
        self._epoch = self._step = self._bytes = 0
        self.path = place / f"{_PREFIX}{self.pid}-{id(self):x}"
        self._pages = _mapped(self.path)
        description = job.to_json()
        if len(description) > _PLACE - _HEAD.size:
            description = b"{}"
        self._pages[_HEAD.size : _HEAD.size + len(description)] = description
        _HEAD.pack_into(self._pages, 0, _MAGIC, len(description))
        self._seal()
        # The mapping goes with this object: at the end of the interpreter a loop may end after its page.
        self._finalizer = weakref.finalize(self, _remove, self.path, self.pid)
        ends = sys.modules.get("multiprocessing.util")
        if ends is not None:  # a child of multiprocessing ends without the interpreter's own finalizers
            ends.Finalize(None, self._finalizer, exitpriority=10)

    def __repr__(self) -> str:
        return f"<Page {self.path}>"

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
        if self._finalizer.alive:  # at the end of the interpreter nothing is left to write with
            self._write(now, meter)

    def close(self) -> None:
        self._finalizer()

    def _write(self, now: float, meter: Meter) -> None:
        running = now - self._running if self._running else 0.0
        steady, steady_waited = meter.steady_seconds(now)
        _FIGURES.pack_into(
            self._pages, _PLACE, now, self._running, self._waiting, self._epoch, self._step, self._steps,
            meter.samples, meter.batches, self._bytes, meter.seconds + running, meter.waited,
            meter.preprocessing, meter.fetch, meter.retries, steady, steady_waited,
        )  # fmt: skip
        self._seal()

    def _set(self, number: int, value: float) -> None:
        struct.pack_into("<d", self._pages, _PLACE + 8 * number, value)

    def _seal(self) -> None:
        figures = self._pages[_PLACE : _PLACE + _FIGURES.size]
        _SUM.pack_into(self._pages, _PLACE + _FIGURES.size, crc32(figures))


def open_page(job: Job, steps: int) -> StatsPage | None:
    """This process's page for a loader; None where there is no place for it."""
    with contextlib.suppress(OSError):
        place = directory()
        _own(place)
        _remove_stale_pages(place)
        return StatsPage(place, job, steps)
    return None


def describe(rank: int, world: int, source: str, plan: str, batch: int, name: str) -> Job:
    """What is told of a loader of this process."""
    host = socket.gethostname()
    return Job(os.getpid(), rank, world, source, plan, batch, name, host, round(time.time(), 3))


def _own(place: Path) -> None:
    """The directory, ours alone. Raises OSError: in a shared place somebody may have been there first."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{place} is not this user's alone")


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)  # a full disk is an error now, not a signal later
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
    """Removes what processes that are gone left behind."""
    for path in place.glob(f"{_PREFIX}*"):
        pid = _pid(path)
        if pid is None or not _lives(pid):
            with contextlib.suppress(OSError):
                path.unlink()


def _pid(path: Path) -> int | None:
    number = path.name.removeprefix(_PREFIX).partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 12 else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def read_pages(places: list[Path] | None = None) -> Iterator[tuple[Job, Figures]]:
    """Of every loader of a process that lives: of this user's, and of others' as far as they can be read."""
    for place in _places() if places is None else places:
        with contextlib.suppress(OSError):
            for path in sorted(place.glob(f"{_PREFIX}*"))[:4096]:
                pid = _pid(path)
                found = read_page(path) if pid is not None and _lives(pid) else None
                if found is not None:
                    yield found


def _places() -> list[Path]:
    own = directory()
    shared = [*Path(tempfile.gettempdir()).glob("shardmesh-*"), *Path("/run/user").glob("*/shardmesh")]
    return list(dict.fromkeys([own, *shared]))


def read_page(path: Path) -> tuple[Job, Figures] | None:
    """A page as it is now; None when it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for _ in range(_ATTEMPTS):
            data = os.pread(descriptor, SIZE, 0)
            if len(data) != SIZE or not data.startswith(_MAGIC):
                return None
            figures = data[_PLACE : _PLACE + _FIGURES.size]
            (sum_,) = _SUM.unpack_from(data, _PLACE + _FIGURES.size)
            if sum_ == crc32(figures):
                values = _FIGURES.unpack(figures)
                return _described(data, Figures(*values)) if all(map(math.isfinite, values)) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _described(data: bytes, figures: Figures) -> tuple[Job, Figures] | None:
    _, length = _HEAD.unpack_from(data)
    try:
        told: Any = json.loads(data[_HEAD.size : _HEAD.size + min(length, _PLACE - _HEAD.size)])
        pid, rank, world, batch = (int(told[name]) for name in ("pid", "rank", "world", "batch"))
        source, plan, name, host = (_plain(told[key]) for key in ("source", "plan", "name", "host"))
        job = Job(pid, rank, world, source, plan, batch, name, host, float(told["started"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return job, figures


def _plain(text: Any) -> str:
    """Without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:300])
