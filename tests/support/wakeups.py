"""What the processes of a daemon use while nobody asks them anything."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.daemons import Daemon

_WINDOW: Final = 2.0
_WINDOWS: Final = 15


class Spent(NamedTuple):
    """What a process has used: seconds of CPU, and how often its threads have waited for something."""

    cpu: float
    waits: int


def spent_by(pid: int) -> Spent:
    """What all threads of a process have used that still run."""
    cpu, waits = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            used, status = (task / "schedstat").read_text(), (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since the threads were listed
            continue
        cpu += int(used.split()[0])
        found = dict(line.split(":") for line in status.splitlines() if "ctxt" in line)
        waits += int(found["voluntary_ctxt_switches"])
    return Spent(cpu / 1e9, waits)


def spent_by_daemon(daemon: Daemon) -> dict[str, Spent]:
    """The same for each process of a daemon, by name."""
    return {name: spent_by(pid) for name, pid in {"supervisor": daemon.pid, **daemon.children()}.items()}


def _threads(daemon: Daemon) -> Iterator[int]:
    for pid in (daemon.pid, *daemon.children().values()):
        with suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _schedule(daemon: Daemon, policy: int, priority: int, processors: set[int]) -> None:
    for thread in _threads(daemon):
        # It has ended, or this may not be done: then others' work adds to the count.
        with suppress(OSError):
            os.sched_setaffinity(thread, processors)
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


@contextmanager
def undisturbed(daemon: Daemon) -> Iterator[None]:
    """Meanwhile its threads run one after the other, and before everything else on the machine.

    Otherwise a thread that is woken while another holds the interpreter waits for that, again every 5 ms:
    with a second processor free, or where the holder is put aside for others, these waits are half of all.
    """
    processors = os.sched_getaffinity(daemon.pid)
    _schedule(daemon, os.SCHED_FIFO, 1, {max(processors)})
    try:
        yield
    finally:
        _schedule(daemon, os.SCHED_OTHER, 0, processors)


def restless(daemon: Daemon, limits: Mapping[str, float]) -> dict[str, float]:
    """The processes that wake up more often than so many times a second in every window of two seconds, with
    how often. A busy machine makes no process restless: it is `undisturbed`."""
    fewest = dict.fromkeys(limits, float("inf"))
    with undisturbed(daemon):
        for _ in range(_WINDOWS):
            before = spent_by_daemon(daemon)
            threading.Event().wait(_WINDOW)
            after = spent_by_daemon(daemon)
            for name in limits:
                fewest[name] = min(fewest[name], (after[name].waits - before[name].waits) / _WINDOW)
            if all(fewest[name] <= limit for name, limit in limits.items()):
                break
    return {name: often for name, often in fewest.items() if often > limits[name]}
