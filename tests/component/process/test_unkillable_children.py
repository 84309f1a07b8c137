"""A child that SIGKILL does not end, as one that waits for a disk in the kernel: nothing waits for it."""

from __future__ import annotations

import subprocess
import sys

_SUPERVISOR = """
import logging, os, signal, sys, threading
from meshd.process import supervisor
from meshd.process.process_status import ProcessStatus
from meshd.process.child_process import ChildSpec
from meshd.process.log_level import LogLevelWatcher
from meshd.telemetry import logs
from meshd.util.clock import SystemClock

logging.basicConfig(format="%(message)s", stream=sys.stdout)
kill = os.kill
os.kill = lambda pid, number: None if number == signal.SIGKILL else kill(pid, number)
supervisor._KILL_PATIENCE = 0.2

def stuck(reporter):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reporter.report_ready()
    reporter.report_alive()
    signal.pause()

def obedient(reporter):
    reporter.report_ready()
    signal.pause()

def say(text):
    print(text, flush=True)

names = ["worker-0", "worker-1", "coordinator-0"]
board = ProcessStatus(names)
clock = SystemClock()
watched = supervisor.Supervisor(
    [ChildSpec(name, stuck if name == "worker-0" else obedient) for name in names],
    [supervisor.Stage(frozenset({"worker"}), 0.2), supervisor.Stage(frozenset({"coordinator"}), 5.0)],
    board=board,
    clock=clock,
    level=LogLevelWatcher("info", logs.runtime_level, clock),
    hooks=supervisor.Hooks(ready=lambda: say("ready"), draining=lambda: None, hangup=lambda: None),
    held=lambda: (),
    hang_timeout=float(sys.argv[1]),
)
watched.run()
for name in names:
    say(f"{name} {board[name].name}")
"""


def _supervised(hang_timeout: float, stop_after: str) -> str:
    """What a supervisor says that is stopped once it has said `stop_after`."""
    said = []
    with subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(hang_timeout)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if stop_after in line:
                    break
            process.terminate()
            said.append(process.communicate(timeout=30)[0])
        finally:
            process.kill()
    assert process.returncode == 0
    return "".join(said)


def test_it_does_not_hold_up_the_stop_of_the_others() -> None:
    said = _supervised(60.0, "ready")
    assert "worker-0 did not end in time; killing it" in said
    assert "worker-0 cannot be killed" in said
    assert "coordinator-0 DOWN" in said  # the stage after its own
    assert "coordinator-0 did not end" not in said


def test_it_is_named_while_the_node_runs() -> None:
    said = _supervised(0.2, "cannot be killed")
    assert said.count("worker-0 cannot be killed") == 1
    assert "worker-1 DOWN" in said


def test_a_last_checkpoint_on_a_disk_that_does_not_answer_ends() -> None:
    script = """
import signal
from meshd.process import serve
serve._in_child("checkpoint", lambda _: signal.pause(), 0.1)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "StartupError: checkpoint did not end within 0 seconds: a disk may not answer" in ended.stderr
