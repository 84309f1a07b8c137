"""Child processes of a benchmark: started with a log, waited for by their port, ended by their own id.

Invariant: whatever `Children` started is gone when its context ends, also after an exception or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GRACE_S = 15.0


class ChildError(RuntimeError):
    """A child ended, or did not open its port in time; the message carries the end of its log."""


@dataclass(slots=True)
class Child:
    """One started process with its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    grace: float = GRACE_S

    def tail(self, lines: int = 12) -> str:
        """The last lines of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_for_port(self, port: int, timeout: float = 60.0) -> None:
        """Return when 127.0.0.1:port accepts; raise ChildError when the child ends first or the time is
        over.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ChildError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.05)
        raise ChildError(f"{self.name} did not open port {port} within {timeout:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the process group after `grace` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True)
class Children:
    """A context that ends everything it started, last first."""

    log_dir: Path
    started: list[Child] = field(default_factory=list)

    def start(self, name: str, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Child:
        """Start argv in a process group of its own with stdout and stderr in `<log_dir>/<name>.log`."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(part) for part in argv],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.started.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        while self.started:
            self.started.pop().stop()


def free_ports(count: int) -> list[int]:
    """`count` different ports that were free on loopback a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def family(pid: int) -> list[psutil.Process]:
    """The process and all its living descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def memory_bytes(pid: int) -> int:
    """Anonymous and shared memory of the process and its living descendants, each page once."""
    total = 0
    for process in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("Pss_Anon", "Pss_Shmem"):
                    total += int(value.split()[0]) << 10
    return total


def cpu_seconds(pid: int) -> float:
    """User and system seconds so far of the process and its living descendants."""
    total = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
