"""Child processes: fork, a report pipe to the supervisor, and death together with it.

A child is forked from a single-threaded supervisor, keeps only the descriptors it was given, and is killed
by the kernel when the supervisor dies for any reason.
The first crash of a child is followed by an immediate restart, repeated ones by doubling delays, up to the
point where the supervisor gives up; a child that ran for a while starts from zero again.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from meshd.errors import OWN_FILES, MeshdError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Iterable


RESET_AFTER = 30.0
FIRST_DELAY = 0.1
MAX_DELAY = 5.0
MAX_START_ATTEMPTS = 3


class CrashHistory(msgspec.Struct, frozen=True):
    """The record of one child: deaths in a row, and whether it was ever ready."""

    in_a_row: int = 0
    was_ready: bool = False

    def after_ready(self) -> CrashHistory:
        """Return the history after the child became ready."""
        return CrashHistory(self.in_a_row, was_ready=True)

    def after_crash(self, lived: float) -> CrashHistory:
        """Return the history after the child died, `lived` seconds after its start."""
        return CrashHistory(1 if lived >= RESET_AFTER else self.in_a_row + 1, self.was_ready)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self.in_a_row <= 1:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** min(self.in_a_row - 2, 30), MAX_DELAY)

    @property
    def should_give_up(self) -> bool:
        """Whether the child never became ready in `MAX_START_ATTEMPTS` starts."""
        return not self.was_ready and self.in_a_row >= MAX_START_ATTEMPTS


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OOM: Final = Path("/proc/self/oom_score_adj")
_OOM_SCORE: Final = 100  # of 1000: as if it used 10 % more of the memory; transform processes set 500
_SIGNAL_HINTS: Final[dict[int, str]] = {
    signal.SIGBUS: " (a memory-mapped file could not be read: the index)",
    signal.SIGKILL: " (perhaps by the kernel, out of memory: see dmesg)",
}
_DATA_UNREADABLE: Final = " (a data file could not be read; its rows are read again one by one)"
_SNAPSHOT_UNREADABLE: Final = (
    " (a memory-mapped page of a snapshot could not be read: it is made again when it is next opened)"
)
_OWN_FRAME: Final = re.compile(r'  File "(?:.*/)?(meshd/(?:store|control|datasets|batches|core)|meshwire)/')
_INDEX_READERS: Final = ("meshd/store", "meshd/control")
_log = logging.getLogger("meshd.child")
_libc = ctypes.CDLL(None, use_errno=True)


class ChildReporter:
    """The child's end of the pipe to the supervisor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def report_ready(self) -> None:
        """Report that the child does its work from now on."""
        self._write({"state": "ready"})

    def report_alive(self) -> None:
        """Report that the event loop runs. Children with an event loop send this every few seconds."""
        self._write({"state": "alive"})

    def report_failure(self, reason: str) -> None:
        """Report why the child cannot do its work; it exits afterwards."""
        self._write({"state": "failed", "reason": reason[:2000]})

    def _write(self, report: dict[str, str]) -> None:
        with contextlib.suppress(OSError):  # when the supervisor dies, this process dies with it
            os.write(self._fd, json.dumps(report).encode() + b"\n")


ChildBody = Callable[[ChildReporter], None]


class ChildSpec(msgspec.Struct, frozen=True):
    """A child that the supervisor keeps alive. `name` is `role-number`; it inherits the descriptors `fds`."""

    name: str
    body: ChildBody
    fds: frozenset[int] = frozenset()
    longest_delay: float = MAX_DELAY
    """Maximum seconds between a death and the next start."""
    listen_fd: int | None = None
    """A listening socket: the child is started when a client connects, and exits (with code 0) when it is
    idle. None: it always runs."""

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


class Child(msgspec.Struct):
    """The supervisor's state of one child. `pid` is 0 while it is not running. `due` is when to start it
    (again); infinite while an on-demand child waits for a connection."""

    spec: ChildSpec
    pid: int = 0
    pipe: int = -1
    started: float = 0.0
    due: float = 0.0
    reason: str = ""
    crashes: CrashHistory = msgspec.field(default_factory=CrashHistory)
    last_heard: float = 0.0
    """When it last reported that its loop runs; 0 for a child that never does."""
    killed: float = 0.0
    """When the supervisor killed it; 0 if it did not."""
    unkillable: bool = False
    """Whether it has not ended long after that."""
    unread: bytearray = msgspec.field(default_factory=bytearray)
    trace: list[str] = msgspec.field(default_factory=list)
    """Where it was when a fault ended it: lines of `faulthandler`, innermost frame first."""

    @property
    def dying(self) -> bool:
        """Whether it was killed and should end at any moment."""
        return self.killed > 0.0 and not self.unkillable

    def read_reports(self) -> list[dict[str, str]]:
        """Return the child's reports since the last call; empty if there are none."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 65536):
                self.unread += chunk
        *lines, rest = self.unread.split(b"\n")
        self.unread = bytearray(rest)
        self.trace += [line.decode(errors="replace") for line in lines if not line.startswith(b"{")]
        return [json.loads(line) for line in lines if line.startswith(b"{")]


def fork_child(spec: ChildSpec, close: Iterable[int]) -> tuple[int, int]:
    """Start `spec.body` in a child that closes `close` first. Returns (pid, non-blocking end of its pipe).

    Raises OSError if there is no room for a process, its memory or its pipe; nothing is left open then.
    """
    mine, theirs = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(mine)
        os.close(theirs)
        raise
    if pid == 0:
        _become(spec, theirs, parent, [mine, *(fd for fd in close if fd not in spec.fds)])
    os.close(theirs)
    os.set_blocking(mine, False)
    return pid, mine


def _become(spec: ChildSpec, pipe: int, parent: int, close: Iterable[int]) -> NoReturn:
    """Run a child from fork to exit; nothing of the supervisor's stack runs after it."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # A terminal sends these to all processes, and the supervisor decides; SIGUSR1 works once logging is
        # set up.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(parent)
        prefer_oom_kill()
        _libc.prctl(_PR_SET_NAME, spec.name[:15].encode(), 0, 0, 0)
        for fd in close:
            os.close(fd)
        faulthandler.disable()  # if it is on in the parent, its handlers may have been replaced since
        faulthandler.enable(pipe, all_threads=False)
        code = _run(spec, ChildReporter(pipe))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run(spec: ChildSpec, reporter: ChildReporter) -> int:
    try:
        spec.body(reporter)
    except Exception as error:
        message = open_files_message(error) or _forbidden_file(error)
        message = message or (str(error) if isinstance(error, MeshdError) else "")
        if not message:
            _log.exception("%s failed", spec.name)
        reporter.report_failure(message or f"{type(error).__name__}: {error}")
    else:
        return 0
    return 1


def _forbidden_file(error: Exception) -> str:
    """Return what to do about a file that belongs to another user, as after one start as root."""
    if not isinstance(error, PermissionError) or not error.filename:
        return ""
    return f"{error.filename}: {error.strerror}; {OWN_FILES}"


def prefer_oom_kill() -> None:
    """Make the kernel, when memory runs out, kill this process rather than the supervisor, whose death would
    end all others without anyone to restart them. The death of the coordinator also frees finished batches,
    whose memory is otherwise attributed to no process."""
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or forbidden
        if int(_OOM.read_text()) < _OOM_SCORE:
            _OOM.write_text(str(_OOM_SCORE))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call took effect
        os._exit(1)


def exit_signal(status: int) -> int:
    """Return the signal that ended a process, from its wait status; 0 if none did."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def was_in_snapshot(trace: Iterable[str]) -> bool:
    """Return whether a process that a fault ended was reading what is mapped of a snapshot, and not the
    index; `trace`: lines of `faulthandler`, innermost frame first."""
    places = (found[1] for line in trace if (found := _OWN_FRAME.match(line)))
    return next(places, _INDEX_READERS[0]) not in _INDEX_READERS


def describe_exit(status: int, role: str = "", trace: Iterable[str] = ()) -> str:
    """Describe in words how a process ended, from its wait status; `role`: what it did, if that is known;
    `trace`: see `was_in_snapshot`."""
    number = exit_signal(status)
    if number == signal.SIGBUS and role == "transform":  # which maps no index
        return f"killed by SIGBUS{_DATA_UNREADABLE}"
    if number == signal.SIGBUS and was_in_snapshot(trace):
        return f"killed by SIGBUS{_SNAPSHOT_UNREADABLE}"
    if number:
        return f"killed by {signal.Signals(number).name}{_SIGNAL_HINTS.get(number, '')}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
