"""Supervisor: keeps the child processes alive until it is stopped, then stops them in order.

It is single-threaded and has no event loop and no store. It waits for pipes and signals and does little
else, so that it outlives everything. All children of one stage end before those of the next are stopped.
When children repeatedly die of SIGBUS as they read the index (memory mapped from its device), the node stops.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING

import msgspec

from meshd.errors import IndexLostError, StartupError
from meshd.process.child_process import Child, describe_exit, exit_signal, fork_child, was_in_snapshot
from meshd.process.process_status import Phase
from meshd.telemetry import metric_registry, metrics
from meshd.util import shared_counters
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshd.process.child_process import ChildSpec
    from meshd.process.log_level import LogLevelWatcher
    from meshd.process.process_status import ProcessStatus
    from meshd.util.clock import Clock


_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_log = logging.getLogger("meshd.supervisor")
_INDEX_ROLES = frozenset({"worker", "coordinator"})  # roles that map the index into memory
_MAX_INDEX_DEATHS = 3  # deaths of such processes within
_DEATH_WINDOW = 600.0  # seconds
_FORK_RETRY = 1.0  # seconds
_KILL_PATIENCE = 10.0  # seconds that a killed child gets to end: one with much memory takes a while
_STANDSTILL = 1.0  # seconds by which the supervisor wakes up late if the whole node was stopped


class Hooks(msgspec.Struct, frozen=True):
    """Callbacks of the composition root. All run in the supervisor and must be quick."""

    ready: Callable[[], None]
    """Called when every child has reported ready for the first time."""
    draining: Callable[[], None]
    """Called before the first child is stopped, to close the listening sockets."""
    hangup: Callable[[], None]
    """Called on SIGHUP."""


class Stage(msgspec.Struct, frozen=True):
    """Roles that end together, and the seconds they get before they are killed."""

    roles: frozenset[str]
    grace: float


class Supervisor:
    """Runs children until SIGTERM or SIGINT. `held`: descriptors that only the children that name them
    inherit. `hang_timeout`: seconds of silence after which a child that sends heartbeats is killed.
    `shutdown_delay`: seconds after SIGTERM during which the node serves as before, but is not ready."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        stages: Sequence[Stage],
        *,
        board: ProcessStatus,
        clock: Clock,
        level: LogLevelWatcher,
        hooks: Hooks,
        held: Callable[[], Iterable[int]],
        hang_timeout: float = 60.0,
        shutdown_delay: float = 0.0,
    ) -> None:
        self._children = [Child(spec) for spec in specs]
        self._stages = list(stages)
        self._board, self._clock, self._hooks, self._held = board, clock, hooks, held
        self._hang_timeout, self._level = hang_timeout, level
        self._shutdown_delay, self._drain_at = shutdown_delay, math.inf
        self._selector = selectors.DefaultSelector()
        self._deadline = 0.0
        self._wake_by = math.inf
        self._draining = False
        self._failure: StartupError | None = None
        self._unreadable: list[float] = []

    def __repr__(self) -> str:
        return f"<Supervisor {self._board!r}>"

    def run(self) -> None:
        """Run until every child has ended. Raises StartupError when a child could not be started at all,
        IndexLostError when children could not read the index."""
        with _wakeups() as wakeups:
            self._wakeups = wakeups
            self._selector.register(wakeups, selectors.EVENT_READ)
            for child in self._children:
                if child.spec.listen_fd is not None:
                    self._watch_socket(child.spec.listen_fd, child)
            while not self._run_once():
                pass
        self._selector.close()
        if self._failure is not None:
            raise self._failure

    def _run_once(self) -> bool:
        """Check everything once and wait for the next event. Returns True when all children have been
        stopped."""
        self._reap()
        if self._clock.monotonic() >= self._drain_at:
            self._drain()
        self._advance()
        if self._draining and not self._stages:
            return True
        self._start_due()
        self._announce()
        patience = self._seconds_until_due()
        self._wake_by = math.inf if patience is None else self._clock.monotonic() + patience
        for key, _ in self._selector.select(patience):
            if isinstance(key.data, Child) and not self._draining:
                self._start_on_demand(key.data)
        for child in self._running():
            self._read_reports(child)
        self._end_hung()
        self._report_unkillable()
        for number in self._signals():
            self._on_signal(number)
        self._propagate_log_level()
        return False

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.pid]

    def _seconds_until_due(self) -> float | None:
        """Return the seconds until something is due; None if only events matter."""
        now = self._clock.monotonic()
        if self._draining:
            return max(self._deadline - now, 0.0)
        due = [child.due for child in self._children if not child.pid and child.due < math.inf]
        due += [over] if (over := self._level.next_check()) is not None else []
        due += [self._drain_at] if self._drain_at < math.inf else []
        due += [child.last_heard + self._hang_timeout for child in self._running() if child.last_heard]
        due += [child.killed + _KILL_PATIENCE for child in self._running() if child.dying]
        return max(min(due) - now, 0.0) if due else None

    # starting and dying

    def _start_due(self) -> None:
        now = self._clock.monotonic()
        for child in self._children:
            if not self._draining and not child.pid and child.due <= now:
                self._start(child, now)

    def _start(self, child: Child, now: float) -> None:
        pipes = [other.pipe for other in self._running()]
        close = [*pipes, *self._held(), self._wakeups.fileno(), self._selector.fileno()]
        child.reason, child.started, child.last_heard = "", now, 0.0
        child.unread, child.trace = bytearray(), []
        child.killed, child.unkillable = 0.0, False
        try:
            child.pid, child.pipe = fork_child(child.spec, close)
        except OSError as error:  # the limit of processes or descriptors, or no memory: not a reason to end
            child.due = now + _FORK_RETRY
            why = open_files_message(error) or str(error)
            _log.error("%s cannot be started", child.spec.name, extra={"why": why, "retry_in": _FORK_RETRY})
            return
        self._board[child.spec.name] = Phase.STARTING
        self._selector.register(child.pipe, selectors.EVENT_READ)

    def _read_reports(self, child: Child) -> None:
        for report in child.read_reports():
            if report["state"] == "alive":
                child.last_heard = self._clock.monotonic()
            elif report["state"] == "ready":
                child.crashes = child.crashes.after_ready()
                self._board[child.spec.name] = Phase.READY
                self._count(child.spec.role)
            else:
                child.reason = report["reason"]

    def _watch_socket(self, listen_socket: int, child: Child) -> None:
        """Start the child when a client connects."""
        child.due = math.inf
        self._selector.register(listen_socket, selectors.EVENT_READ, child)

    def _start_on_demand(self, child: Child) -> None:
        """Start the child: a client has connected to its socket."""
        child.due = self._clock.monotonic()
        assert child.spec.listen_fd is not None
        self._selector.unregister(child.spec.listen_fd)

    def _end_hung(self) -> None:
        """Kill a child whose event loop has stood still for too long; it is then replaced. Time in which this
        process was stopped, too (`docker pause`, a frozen cgroup), says nothing about its children: they get
        another `hang_timeout`."""
        now = self._clock.monotonic()
        if now - self._wake_by > _STANDSTILL:
            _log.warning("all processes of this node stood still", extra={"seconds": now - self._wake_by})
            for child in self._running():
                child.last_heard = now if child.last_heard else 0.0
            return
        for child in self._running():
            if child.last_heard and now - child.last_heard >= self._hang_timeout:
                _log.error("%s hangs; killing it", child.spec.name, extra={"silent": now - child.last_heard})
                child.last_heard, child.reason = 0.0, "its event loop hung"
                self._kill(child)

    def _kill(self, child: Child) -> None:
        child.killed = self._clock.monotonic()
        os.kill(child.pid, signal.SIGKILL)

    def _report_unkillable(self) -> None:
        """Log which killed children have not ended. Nothing waits for them; a child that ends later is
        replaced then."""
        for child in self._running():
            if child.dying and self._clock.monotonic() - child.killed >= _KILL_PATIENCE:
                child.unkillable = True
                self._board[child.spec.name] = Phase.DOWN
                self._count(child.spec.role)
                _log.error(
                    "%s cannot be killed: the kernel keeps it, as while a disk does not answer",
                    child.spec.name,
                    extra={"pid": child.pid, "seconds": _KILL_PATIENCE},
                )

    def _reap(self) -> None:
        for child in self._running():
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._read_reports(child)
                self._record_exit(child, status)
        with contextlib.suppress(ChildProcessError):
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                if not self._reap_unknown():
                    break

    def _reap_unknown(self) -> bool:
        """Reap a short-lived child that a hook started."""
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or any(child.pid == found.si_pid for child in self._children):
            return False
        os.waitpid(found.si_pid, 0)
        return True

    def _record_exit(self, child: Child, status: int) -> None:
        now, name = self._clock.monotonic(), child.spec.name
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        if not self._draining:  # soon nobody can ask any more
            metric_registry.drop_dead_processes()
        pid, child.pid, child.pipe = child.pid, 0, -1
        self._board[name] = Phase.DOWN
        self._count(child.spec.role)
        if self._draining:
            return
        if child.spec.listen_fd is not None and not status:
            self._watch_socket(child.spec.listen_fd, child)
            return
        child.crashes = child.crashes.after_crash(now - child.started)
        delay = min(child.crashes.delay, child.spec.longest_delay)
        child.due = now + delay
        metrics.process_restarts.labels(child.spec.role).inc()
        if child.spec.role in _INDEX_ROLES:
            shared_counters.record_death()
        why = child.reason or describe_exit(status, child.spec.role, child.trace)
        _log.warning("%s ended", name, extra={"pid": pid, "why": why, "restart_in": delay})
        of_index = child.spec.role in _INDEX_ROLES and not was_in_snapshot(child.trace)
        if of_index and exit_signal(status) == signal.SIGBUS:
            self._unreadable = [then for then in self._unreadable if now - then < _DEATH_WINDOW] + [now]
        if len(self._unreadable) >= _MAX_INDEX_DEATHS:
            self._fail(
                IndexLostError(
                    f"{_MAX_INDEX_DEATHS} processes were {describe_exit(status)} "
                    f"within {_DEATH_WINDOW / 60:.0f} minutes"
                )
            )
        elif child.crashes.should_give_up and child.spec.listen_fd is None:
            self._fail(StartupError(f"{name} cannot start: {why}"))

    def _fail(self, failure: StartupError) -> None:
        self._failure = failure
        self._drain()

    def _count(self, role: str) -> None:
        up = sum(self._board[name] is Phase.READY for name in self._board.names_of_role(role))
        metrics.processes_up.labels(role).set(up)
        metrics.process_restarts.labels(role)  # 0 from the start, since an increase needs a value before it

    def _announce(self) -> None:
        if self._board.node_phase is not Phase.STARTING or self._draining:
            return
        needed = [child.spec.name for child in self._children if child.spec.listen_fd is None]
        if all(self._board[name] is Phase.READY for name in needed):
            self._board.node_phase = Phase.READY
            self._hooks.ready()

    # signals and stopping

    def _signals(self) -> set[int]:
        with contextlib.suppress(BlockingIOError):
            return set(self._wakeups.recv(4096))
        return set()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._hooks.hangup()
            for child in self._running():
                os.kill(child.pid, signal.SIGHUP)  # ignored by those that do not use it
        elif number == signal.SIGUSR2:
            self._level.toggle_debug()
        elif number in (signal.SIGTERM, signal.SIGINT) and not self._draining:
            self._stop(number)
        elif number in (signal.SIGTERM, signal.SIGINT):
            _log.warning("second stop signal: killing the remaining processes")
            self._deadline = 0.0

    def _stop(self, number: int) -> None:
        """Stop after the delay, during which those who send clients here learn of it; a node that had none
        yet, or is asked again or at a terminal, stops at once."""
        delay = self._shutdown_delay if number == signal.SIGTERM else 0.0
        if self._board.node_phase is not Phase.READY or self._drain_at < math.inf:
            delay = 0.0
        _log.info("stopping", extra={"signal": signal.Signals(number).name, "delay": delay})
        self._drain_at = self._clock.monotonic() + delay
        self._board.node_phase = Phase.DRAINING

    def _propagate_log_level(self) -> None:
        """Tell all children to read the log level, if it has changed."""
        if self._level.check_change():
            for child in self._running():
                os.kill(child.pid, signal.SIGUSR1)

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        self._board.node_phase = Phase.DRAINING
        shared_counters.announce_end()
        for child in self._children:
            if child.spec.listen_fd is not None and child.due == math.inf and not child.pid:
                self._selector.unregister(child.spec.listen_fd)
        self._hooks.draining()
        self._terminate_stage()

    def _terminate_stage(self) -> None:
        """Ask the children of the current stage to end."""
        if self._stages:
            self._deadline = self._clock.monotonic() + self._stages[0].grace
            for child in self._of_stage():
                self._board[child.spec.name] = Phase.DRAINING
                os.kill(child.pid, signal.SIGTERM)

    def _of_stage(self) -> list[Child]:
        roles = self._stages[0].roles
        return [child for child in self._running() if child.spec.role in roles and not child.unkillable]

    def _advance(self) -> None:
        """While draining: kill children that are late, and move on once only unkillable ones are left of the
        stage."""
        if not self._draining:
            return
        if self._stages and self._clock.monotonic() >= self._deadline:
            for child in self._of_stage():
                if not child.killed:
                    _log.warning("%s did not end in time; killing it", child.spec.name)
                    self._kill(child)
            self._deadline = self._clock.monotonic() + _KILL_PATIENCE
        while self._stages and not self._of_stage():
            self._stages.pop(0)
            self._terminate_stage()


@contextlib.contextmanager
def _wakeups() -> Iterator[socket.socket]:
    """Yield a socket that receives the numbers of arriving signals. Afterwards SIGTERM and SIGINT are
    ignored, because the process is about to end anyway."""
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        end.setblocking(False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield mine
    finally:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mine.close()
        theirs.close()
