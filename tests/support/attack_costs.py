"""What an attack costs a running node: time, CPU, memory and disk of all its processes, and what other
clients notice."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

BYSTANDER = "bystander"
_EVERY = 0.02  # seconds between two looks at the memory


@dataclass
class Cost:
    """`seconds` altogether and of `cpu`; `memory` and `disk`: MiB on top of what there was before, at the
    peak and at the end; `latencies` of a client that reads one small object again and again, in seconds."""

    seconds: float = 0.0
    cpu: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def slowest(self) -> float:
        """The longest that the other client waited."""
        return max(self.latencies, default=0.0)

    def __str__(self) -> str:
        waits = sorted(self.latencies) or [0.0]
        return (
            f"{self.seconds:.2f} s, {self.cpu:.2f} s CPU, {self.memory:.0f} MiB memory, "
            f"{self.disk:.0f} MiB disk, others {waits[len(waits) // 2] * 1000:.0f} ms "
            f"(slowest {self.slowest * 1000:.0f} ms)"
        )


@contextmanager
def costs(daemon: Daemon, name: str) -> Iterator[Cost]:
    """Measure the block. Prints the figures: `pytest -s` shows them."""
    with suppress(Exception):
        daemon.request("PUT", f"/{BYSTANDER}")
    daemon.request("PUT", f"/{BYSTANDER}/k", b"small")
    cost, stop = Cost(), threading.Event()
    cpu, memory, disk = _cpu(daemon), _memory(daemon), _disk(daemon)
    threads = [
        threading.Thread(target=_watch, args=(daemon, memory, cost, stop)),
        threading.Thread(target=_read, args=(daemon, cost, stop)),
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    try:
        yield cost
    finally:
        cost.seconds = time.monotonic() - began
        stop.set()
        for thread in threads:
            thread.join(60)
        cost.cpu = _cpu(daemon) - cpu
        cost.disk = (_disk(daemon) - disk) / (1 << 20)
        print(f"{name}: {cost}")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print how many seconds the block takes: `pytest -s` shows them."""
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.2f} s")


def _processes(daemon: Daemon) -> list[psutil.Process]:
    supervisor = psutil.Process(daemon.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def _cpu(daemon: Daemon) -> float:
    """Of all its processes, those that ended too."""
    total = 0.0
    for process in _processes(daemon):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def _memory(daemon: Daemon) -> int:
    total = 0
    for process in _processes(daemon):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _disk(daemon: Daemon) -> int:
    total = 0
    for path in daemon.data_dir.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def _watch(daemon: Daemon, before: int, cost: Cost, stop: threading.Event) -> None:
    while not stop.wait(_EVERY):
        with suppress(psutil.NoSuchProcess):
            cost.memory = max(cost.memory, (_memory(daemon) - before) / (1 << 20))


def _read(daemon: Daemon, cost: Cost, stop: threading.Event) -> None:
    while not stop.wait(_EVERY):
        began = time.monotonic()
        answer = daemon.request("GET", f"/{BYSTANDER}/k")
        assert answer.body == b"small", answer
        cost.latencies.append(time.monotonic() - began)
