"""Where a suite runs: a daemon, an environment of its own, a checkout, an empty folder.

Law: the only place that starts programs of suites. Invariant: each has a limit, ends with all that it
started, and sees nothing of the developer's AWS settings.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.daemons import Daemon

REGION = "us-east-1"
HOUR = 3600.0


class ProgramError(RuntimeError):
    """A program of a suite failed or took too long; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True)
class Result:
    """`notes` are numbers for the page, as the run printed them."""

    outcomes: Mapping[str, str]
    version: str
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """`home` has the suite's packages; `checkout` is its repository, of those that need one."""

    daemon: Daemon
    home: Path
    scratch: Path
    checkout: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(self.home / "bin" / "python")

    @property
    def repository(self) -> Path:
        """The checkout, of a suite that has one."""
        assert self.checkout is not None, "this suite needs a checkout"
        return self.checkout

    @property
    def host(self) -> str:
        return urlsplit(self.daemon.endpoint).netloc

    def settings(self) -> dict[str, str]:
        """The environment of its programs."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.scratch),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ACCESS_KEY_ID": self.daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": self.daemon.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "MESHD_ENDPOINT": self.daemon.endpoint,
            **self.environment,
        }

    def start(
        self, command: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a program in a session of its own; also the file that its output goes to."""
        log = self.scratch / f"{len(list(self.scratch.glob('*.log'))):03}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=cwd or self.scratch,
                env=self.settings() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, log

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        limit: float = HOUR,
        codes: Sequence[int] = (0,),
    ) -> str:
        """Run a program to its end; its output. Raises ProgramError when it ends with another code."""
        process, log = self.start(command, cwd=cwd, environment=environment)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"{command[0]} took longer than {limit:.0f} s\n{_end(log)}") from None
        finally:
            end(process)
        if code not in codes:
            raise ProgramError(f"{' '.join(command)[:200]} ended with {code}\n{_end(log)}")
        return log.read_text(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it started, if any of them runs, and wait."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
