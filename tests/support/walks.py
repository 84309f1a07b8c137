"""Which files of ours a request executes, in every process of real nodes, and what the documentation says.

    with WalkRecorder() as recorder, Daemon.start(env=recorder.env) as node:
        files = recorder.record(lambda: client.get_object(…))

Law: the profiler sees every call of Python in every process and thread while a request is recorded. A walk is
what several requests of a kind have in common, so periodic tasks are not in it.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT: Final = Path(__file__).parents[2]
PLACE: Final = "SHARDMESH_TEST_WALKS"
_PACKAGES: Final = tuple(f"{ROOT}/{name}/" for name in ("meshd", "sdk/meshsdk", "sdk/meshwire"))
_BACKGROUND: Final = tuple(
    f"{ROOT}/meshd/{name}"
    for name in (
        "process/",
        "control/etcd/",
        "cluster/failure_detector.py",
        "cluster/membership.py",
        "cluster/repair/",
        "jobs/",
        "store/disks/",
        "store/engine/checkpointer.py",
        "util/",
    )
)
"""Where tasks that no request waits for begin."""
_QUIET: Final = 0.03  # seconds without a new call after which a request has ended
_PATIENCE: Final = 5
_Files = dict[str, set[str]]  # of each file, the other files that it has called


class _Recording:
    """Writes down which file calls which one in this process, each pair once, while the number in the file
    `turn` is odd."""

    def __init__(self, place: Path) -> None:
        self._calls, self._turn = place / "calls", 0
        self._seen = set[tuple[str, str]]()
        with (place / "turn").open("r+b") as file:
            self._now = mmap.mmap(file.fileno(), 1)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        turn = self._now[0]
        if not turn % 2 or event != "call":
            return
        name, back = frame.f_code.co_filename, frame.f_back
        if not name.startswith(_PACKAGES):
            return
        caller = name if back is None else back.f_code.co_filename
        if turn != self._turn:
            self._turn, self._seen = turn, set()
        if (caller, name) not in self._seen and not _beginning(frame).startswith(_BACKGROUND):
            self._seen.add((caller, name))
            line = f"{turn} {os.getpid()} {caller} {name}\n".encode()
            file = os.open(self._calls, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(file, line)
            os.close(file)


def _beginning(frame: Any) -> str:
    """The file of ours in which the task, callback or thread of this call began."""
    found = frame.f_code.co_filename
    while frame is not None and not frame.f_code.co_filename.endswith("/asyncio/runners.py"):
        if frame.f_code.co_filename.startswith(_PACKAGES):
            found = frame.f_code.co_filename
        frame = frame.f_back
    return str(found)


def record_this_process(place: str) -> None:
    """Record the calls of all threads of this process that begin later, and of this one."""
    recording = _Recording(Path(place))
    threading.setprofile(recording)
    sys.setprofile(recording)


def record_children() -> None:
    """Record the calls of the processes that this one forks, if its environment says where: a supervisor
    loads its modules at full speed."""
    if place := os.environ.get(PLACE, ""):
        os.register_at_fork(after_in_child=lambda: record_this_process(place))


class WalkRecorder:
    """Records one request after the other. `env`: of the nodes."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="walks-")
        self.place = Path(self._scratch.name)
        self._turn = 0
        (self.place / "turn").write_bytes(b"\0")
        (self.place / "calls").touch()
        self.env = {PLACE: str(self.place), "PYTHONPATH": f"{ROOT}/tests/support/walk_site:{ROOT}:{ROOT}/sdk"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def _next(self) -> None:
        self._turn += 1
        with (self.place / "turn").open("r+b") as file:
            file.write(bytes([self._turn]))

    def record(self, request: Callable[[], object]) -> dict[int, _Files]:
        """What each process executed while `request` ran and until nothing new was called, by its id."""
        turn = self._turn + 1
        self._next()
        request()
        calls, size = self.place / "calls", -1
        for _ in range(_PATIENCE):
            if size == (size := calls.stat().st_size):
                break
            threading.Event().wait(_QUIET)
        self._next()
        found: dict[int, _Files] = {}
        for line in calls.read_text().splitlines():
            number, pid, caller, name = line.split()
            if int(number) == turn:
                files = found.setdefault(int(pid), {})
                files.setdefault(name, set())
                if caller != name and caller.startswith(_PACKAGES):
                    files.setdefault(caller, set()).add(name)
        return found


def common(recorded: list[dict[int, _Files]], groups: Iterable[set[int]]) -> _Files:
    """What was executed in every request, with what it called, as paths of the docs; processes of one group
    stand for each other, such as the workers of a node."""
    walk: _Files = {}
    for group in groups:
        turns = []
        for turn in recorded:
            turns.append(files := _Files())
            for pid in group & turn.keys():
                for name, called in turn[pid].items():
                    files.setdefault(name, set()).update(called)
        every = set.intersection(*map(set, turns))
        for name in every:
            called = set.intersection(*[files[name] for files in turns])
            walk.setdefault(_documented(name), set()).update(map(_documented, called & every))
    return walk


def _documented(name: str) -> str:
    return name.removeprefix(f"{ROOT}/").removeprefix("sdk/")


def documented_walk(page: str, beginning: str, skip: str = "\n") -> tuple[int, int, list[str]]:
    """The two numbers of a paragraph of the page (files in order, with all helpers) and the files that the
    table after it names; but for those of rows with `skip` in their text."""
    text = page[page.index(beginning) :]
    numbers = re.search(r"(\d+)\s+files\s+in\s+order,\s+(\d+)\s+with\s+all\s+helpers", text)
    assert numbers is not None, beginning
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, beginning
    named: list[str] = []
    for row in table.group().splitlines()[2:]:
        cell, folder = row.rstrip("| ").rpartition("| ")[2], ""
        for name in re.findall(r"`([\w/]+\.py)`", cell):
            folder = name.rpartition("/")[0] or folder
            path = f"{folder}/{name.rpartition('/')[2]}"
            if path not in named and skip not in row:
                named.append(path)
    return int(numbers[1]), int(numbers[2]), named
