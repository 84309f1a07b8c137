"""CPU seconds of each test and of its processes: a plugin of pytest for whoever wants a faster suite.

    python -m pytest -n 4 --dist loadfile --cpu-report FILE
    python -m tests.support.cpu_report FILE [ROWS]     # files, then tests, that used most

Law: what tests start is counted where it was started: nodes with the process that asks for them, an
interpreter that is forked for a test by itself at its end. What a whole module or session shares counts for
the test that first wanted it, and afterwards for whoever uses it.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLACE: Final = "MESH_TEST_CPU_REPORT"
"""Names the report's file to the programs that tests run."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def processes_below(pid: int) -> Iterable[int]:
    """This process and all that it started, and they started, which have not been reaped."""
    waiting = [pid]
    while waiting:
        yield (each := waiting.pop())
        try:
            for task in os.listdir(f"/proc/{each}/task"):
                waiting += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
        except OSError:  # it ends meanwhile
            continue


def cpu_below(pid: int) -> float:
    """CPU seconds of these processes, and of those that they have reaped."""
    ticks = 0
    for each in processes_below(pid):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def write(file: str, test: str, seconds: float) -> None:
    with open(file, "a") as report:
        report.write(f"{seconds:.3f} {test}\n")


def write_own() -> None:
    """At the end of an interpreter that was forked for a test."""
    file, test = os.environ.get(PLACE), os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if file and test:
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        write(file, test, sum(each.ru_utime + each.ru_stime for each in used))


class CpuReport:
    """The plugin, in each process that runs tests. `others`: what it uses and is no process below it."""

    def __init__(self, file: str, others: Callable[[], Iterable[int]]) -> None:
        self._file, self._others = file, others
        self._used = dict[int, float]()
        self._before = self._now()
        write(file, "(collection)", self._before)

    def __repr__(self) -> str:
        return f"<CpuReport {self._file}>"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        result = yield
        now = self._now()
        write(self._file, item.nodeid, now - self._before)
        self._before = now
        return result

    def pytest_sessionfinish(self) -> None:
        write(self._file, "(end)", self._now() - self._before)

    def _now(self) -> float:
        """Of one that has ended, what it had used before."""
        for pid in (os.getpid(), *self._others()):
            if used := cpu_below(pid):
                self._used[pid] = used
        return sum(self._used.values())


def switch_on(config: pytest.Config, others: Callable[[], Iterable[int]]) -> None:
    """If the option was given: where tests are run, and in the environment of what they run."""
    file = config.getoption("cpu_report")
    if not file:
        return
    os.environ[PLACE] = file = str(Path(file).resolve())
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(CpuReport(file, others))


def main(file: str, rows: str = "40") -> None:
    tests, files = Counter[str](), Counter[str]()
    for line in Path(file).read_text().splitlines():
        seconds, _, test = line.partition(" ")
        tests[test] += float(seconds)  # type: ignore[assignment]
        files[test.partition("::")[0]] += float(seconds)  # type: ignore[assignment]
    print(f"{sum(tests.values()):10.1f} all")
    for counted in (files, tests):
        print()
        for name, used in counted.most_common(int(rows)):
            print(f"{used:10.2f} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
