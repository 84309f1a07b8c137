"""An epoch of one or several loader processes, and what it asked of a drive.

Law: an epoch begins when all its processes have imported what they need, and ends with its last batch. The
drive is delayed, and counts, from then until the processes have ended.
"""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol

from bench import photo_dataset
from bench.loader_timing import TIMEOUT_S
from bench.timing import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.drive_model import DriveStats
    from bench.servers import Server


class Drive(Protocol):
    """What a row wants of the drive; `bench.rotational_drive.RotationalDrive` is one."""

    path: Path

    def delay(self, on: bool) -> None: ...

    def drop_caches(self) -> None: ...

    def stats(self) -> DriveStats: ...

    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Epoch:
    """What processes of one loader did together. `seconds`: until the last one's last batch; `drive_cpu_s`:
    processor time for the drive's emulation."""

    samples: int
    seconds: float
    waited_s: float
    drive: DriveStats
    drive_cpu_s: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Of a figure."""
        drive = self.drive
        return {
            "rate": self.samples / self.seconds,
            "first_wait": self.waited_s,
            "seeks_sample": drive.seeks / self.samples,
            "disk_s": drive.disk_s,
            "media_s": drive.media_s,
            "seek_s": drive.seek_s,
            "seeks": drive.seeks,
            "reads": drive.reads,
            "read_bytes": drive.bytes,
            "drive_cpu": self.drive_cpu_s,
        }


class EpochError(RuntimeError):
    """A process that did not begin, or ended with an error; the message has its last line."""


def run_epoch(
    drive: Drive,
    commands: Sequence[Sequence[str]],
    server: Server,
    *,
    cold: bool,
    beside: Sequence[Callable[[Event], None]] = (),
) -> Epoch:
    """Start the processes, let them import; then their epoch, from the drive if `cold`, else from memory.

    Each of `beside` runs in a thread of its own, from the beginning of the epoch until its event is set, at
    the end. Raises EpochError.
    """
    with ExitStack() as stack:
        jobs = [stack.enter_context(_started(argv, server)) for argv in commands]
        for job in jobs:
            stack.callback(job.kill)
            _await_ready(job)
        if cold:
            drive.drop_caches()
        drive.delay(True)
        stack.callback(drive.delay, False)
        stack.enter_context(_running(beside))
        before, cpu, began = drive.stats(), drive.cpu_s(), time.perf_counter()
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("go\n")
            job.stdin.flush()
        passes = [_pass_of(job) for job in jobs]
        ended = max(one.ended for one in passes)
        samples, waited = sum(one.samples for one in passes), max(one.first_s for one in passes)
        return Epoch(samples, ended - began, waited, drive.stats() - before, drive.cpu_s() - cpu)


@contextmanager
def _running(works: Sequence[Callable[[Event], None]]) -> Iterator[None]:
    """Threads while the context lasts; what one of them raises comes at its end."""
    done = Event()
    with ThreadPoolExecutor(max(1, len(works))) as pool:
        running = [pool.submit(work, done) for work in works]
        try:
            yield
        finally:
            done.set()
        for work in running:
            work.result()


def _started(argv: Sequence[str], server: Server) -> subprocess.Popen[str]:
    pipe, environment = subprocess.PIPE, photo_dataset.environment(server)
    return subprocess.Popen(
        [*argv, "--cold"],
        cwd=photo_dataset.ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def _await_ready(job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    if job.stdout.readline() != "ready\n":
        _, errors = job.communicate(timeout=TIMEOUT_S)
        raise EpochError(f"a job did not begin: {_last_line(errors)}")


def _pass_of(job: subprocess.Popen[str]) -> Pass:
    out, errors = job.communicate(timeout=TIMEOUT_S)
    lines = [json.loads(line[2:]) for line in out.splitlines() if line.startswith("@ ")]
    if job.returncode or not lines:
        raise EpochError(f"a job ended with {job.returncode}: {_last_line(errors)}")
    return Pass(**lines[0])


def _last_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
