"""Chrome trace of a loop's steps and requests, for Perfetto and chrome://tracing.

Law: every event is complete, with begin and duration; events of one row nest or follow each other.
Invariant: the file never exceeds its limit, and it can be opened however its writer ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from meshsdk.errors import ConfigurationError
from meshsdk.loader.loader_setup import TRACE_LIMIT as LIMIT

if TYPE_CHECKING:
    from pathlib import Path

    from meshsdk.loader_stats import Meter, Step

LEAST: Final = 4096  # bytes
_BUFFER: Final = 64 << 10
_END: Final = 256  # bytes reserved for the last event and the closing bracket
_LOOP: Final = 1  # the row of the training loop; the rows of requests follow


class TakenError(ConfigurationError):
    """Another loader, of this process or another, is writing the file."""


def open_trace(path: Path, *, rank: int, world: int, name: str, limit: int, next_free: bool) -> ChromeTrace:
    """Opens the trace of a loader (entry point `trace`). With `next_free`, a loader that finds the file taken
    writes `NAME.2.json`, and so on; otherwise that raises TakenError. Raises ConfigurationError if the file
    cannot be written."""
    number, own = 1, path
    while True:
        try:
            return ChromeTrace(own, rank=rank, world=world, name=name, limit=limit)
        except TakenError:
            if not next_free:
                raise
            number += 1
            own = path.with_name(f"{path.stem}.{number}{path.suffix}")


class ChromeTrace:
    """A trace file, written by the thread that runs the loop. `rank` and `name` tell processes apart in one
    view."""

    def __init__(self, path: Path, *, rank: int, world: int, name: str, limit: int = LIMIT) -> None:
        if limit < LEAST:
            raise ConfigurationError(f"a trace of {limit} bytes holds nothing: set limit to at least {LEAST}")
        self.pid = os.getpid()
        self._rank, self._limit = rank, limit
        self._file = _open_locked(path)
        self._finalizer = weakref.finalize(self, _complete, self._file, self.pid)
        self._path, self._written, self._full = path, 0, False
        self._taken: float | None = None
        self._lanes: list[float] = []
        self._put(b"[\n")
        title = f"rank {rank} of {world}: {name} ({socket.gethostname()}, {self.pid})"
        self._event("M", "process_name", {"args": {"name": title}}, first=True)
        self._event("M", "process_sort_index", {"args": {"sort_index": rank}})
        self._name_row(_LOOP, "training loop")

    def __repr__(self) -> str:
        return f"<ChromeTrace {self._path}, {self._written} bytes{', full' if self._full else ''}>"

    def on_wait(self, now: float) -> None:
        if self._taken is not None:
            self._slice(_LOOP, "compute", self._taken, now)
            self._taken = None

    def on_batch(self, step: Step, meter: Meter) -> None:
        del meter
        stall = step.stall
        args = {"epoch": step.epoch, "step": step.step, "rows": step.rows, "bytes": step.bytes}
        waited = {name: round(1000 * getattr(stall, name), 3) for name in stall.__slots__}
        self._slice(_LOOP, "wait", step.since, step.until, args | {"waited_ms": waited})
        if step.arrival is not None:
            self._request(step)
        self._taken = step.until

    def _request(self, step: Step) -> None:
        """Writes the stages of a request: sent, fetched and preprocessed by the node, received."""
        arrival = step.arrival
        assert arrival is not None
        row = self._lane(arrival.asked, arrival.done)
        args = {"epoch": step.epoch, "step": step.step, "frame": step.origin}
        self._slice(row, f"batch {step.step}", arrival.asked, arrival.done, args)
        server = arrival.server
        began = max(arrival.began - server.total, arrival.asked)
        fetched = min(began + server.fetch, arrival.began)
        if server.fetch > 0:
            self._slice(row, "fetch", began, fetched)
        if server.preprocessing > 0:
            self._slice(row, "preprocessing", fetched, arrival.began)
        self._slice(row, "receive", arrival.began, arrival.done)

    def _lane(self, asked: float, done: float) -> int:
        """Returns a row on which no other request was in flight at that time."""
        for number, until in enumerate(self._lanes):
            if until <= asked:
                self._lanes[number] = done
                return _LOOP + 1 + number
        self._lanes.append(done)
        row = _LOOP + len(self._lanes)
        self._name_row(row, f"requests {len(self._lanes)}")
        return row

    def on_end(self, now: float, meter: Meter) -> None:
        del meter
        self.on_wait(now)
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Completes the file. Idempotent; in a forked child the file stays as it is."""
        self._finalizer()

    # --- events -----------------------------------------------------------------------------------

    def _name_row(self, row: int, name: str) -> None:
        self._event("M", "thread_name", {"tid": row, "args": {"name": name}})
        self._event("M", "thread_sort_index", {"tid": row, "args": {"sort_index": row}})

    def _slice(
        self, row: int, name: str, since: float, until: float, args: dict[str, Any] | None = None
    ) -> None:
        began, ended = round(1e6 * since), round(1e6 * until)
        event: dict[str, Any] = {"tid": row, "ts": began, "dur": max(ended - began, 0), "cat": "mesh"}
        self._event("X", name, event | ({"args": args} if args else {}))

    def _event(self, phase: str, name: str, more: dict[str, Any], *, first: bool = False) -> None:
        if self._full or self._file.closed:
            return
        event = {"ph": phase, "name": name, "pid": self._rank, **more}
        line = json.dumps(event, separators=(",", ":")).encode()
        if self._written + len(line) + 2 > self._limit - _END:
            self._full = True
            last = {
                "ph": "i",
                "s": "g",
                "name": f"the trace is full ({self._limit} bytes)",
                "pid": self._rank,
            }
            line = json.dumps(last | {"tid": _LOOP, "ts": more.get("ts", 0)}).encode()
        self._put(line if first else b",\n" + line)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._written += len(data)


def _open_locked(path: Path) -> BinaryIO:
    """Opens the file, locked and empty. Raises ConfigurationError, and TakenError if it is locked already."""
    try:
        file = path.open("ab", buffering=_BUFFER)
    except OSError as error:
        raise ConfigurationError(f"the trace {path} cannot be written: {error.strerror}") from error
    try:
        with suppress(OSError):  # the file system has no locks
            _lock(file, path)
        with suppress(OSError):  # a pipe
            file.truncate(0)
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TakenError(f"another loader writes its trace to {path}: give each loader a file") from error


def _complete(file: BinaryIO, pid: int) -> None:
    if pid == os.getpid():
        file.write(b"\n]\n")
        file.close()
