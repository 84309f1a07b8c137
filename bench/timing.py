"""One way to time any loader: samples/s, time to the first batch, CPU of the client process and its children.

Law: standard library only, so that it runs in the peers' environment too. A loader's packages are imported
under a clock of their own, torch before it. A pass' clock starts before the loader is made and stops after
its last batch; children are waited for before their CPU time is read. Every clock starts with a collected
and frozen heap: to look through what torch has left, 0.1 s each time, is not a loader's work, and would fall
on whichever pass comes then, and on the end of each.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the data. `first_s`: from the start to the first batch; `cpu_s`: process and ended
    children; `ended`: when, by a clock that all processes of the machine share.
    """

    name: str
    samples: int
    seconds: float
    first_s: float
    cpu_s: float
    ended: float = 0.0


def cpu_seconds() -> float:
    """User and system time of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def reap(deadline_s: float = 5.0) -> None:
    """Collect ended loaders and wait for their workers, so that their CPU time is counted."""
    gc.collect()
    deadline = time.monotonic() + deadline_s
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)


def time_pass(name: str, make: Callable[[], Iterable[Any]], size_of: Callable[[Any], int]) -> Pass:
    """Run one pass; `size_of(batch)` is its number of samples and may check it."""
    gc.collect()
    gc.freeze()
    cpu, start, first, samples = cpu_seconds(), time.perf_counter(), 0.0, 0
    for batch in make():
        first = first or time.perf_counter() - start
        samples += size_of(batch)
    ended = time.perf_counter()
    del batch
    reap()
    used = cpu_seconds() - cpu
    gc.unfreeze()
    return Pass(name, samples, ended - start, first, used, ended)


def time_import(packages: Iterable[str]) -> Pass:
    """What it takes to import a loader's packages: a pass named `import`, without samples."""
    gc.collect()
    cpu, start = cpu_seconds(), time.perf_counter()
    for name in packages:
        import_module(name)
    ended = time.perf_counter()
    return Pass("import", 0, ended - start, 0.0, cpu_seconds() - cpu, ended)


def await_others() -> None:
    """Say that everything is imported; go on when the process that started this one says so."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def answer_rounds(measure: Callable[[], Mapping[str, float]]) -> None:
    """Say that everything is warm, then measure a round for each line of the standard input."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in iter(sys.stdin.readline, ""):
        sys.stdout.write(json.dumps(measure()) + "\n")
        sys.stdout.flush()


def say(timed: Pass) -> None:
    """One line of JSON for the process that started this one."""
    sys.stdout.write("@ " + json.dumps(asdict(timed)) + "\n")
    sys.stdout.flush()
