"""The daemon of the demonstration: `meshd serve` on a free port, in a directory of its own.

Invariant: when the context ends, also by Ctrl-C or an error, the daemon has stopped; it was told to drain
first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

START_S = 60.0
STOP_S = 20.0


class DaemonError(RuntimeError):
    """The daemon ended or was not ready in time; the message has the end of its output."""


@dataclass(slots=True)
class Daemon:
    """A running daemon: its endpoint and the keys it was given. `restart` keeps data and port, not its
    memory.
    """

    root: Path
    access_key: str = "demo"
    secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    endpoint: str = ""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """Everything the daemon prints."""
        return self.root / "meshd.log"

    def start(self) -> None:
        """Start and wait for the ready line; raises DaemonError."""
        listen = self.endpoint.removeprefix("http://") or "127.0.0.1:0"
        argv = [
            sys.executable,
            "-m",
            "meshd",
            "serve",
            "--data-dir",
            str(self.root / "data"),
            "--listen",
            listen,
        ]
        keys = {"MESHD_ROOT_ACCESS_KEY": self.access_key, "MESHD_ROOT_SECRET_KEY": self.secret_key}
        keys["MESHD_CONSOLE"] = "on"
        with self.log.open("wb") as out:
            # a session of its own: Ctrl-C reaches this program, which then stops the daemon in order
            self._process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **keys}, start_new_session=True
            )
        self.endpoint = self._wait_ready()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith("meshd ready"):
                    return next(word[9:] for word in line.split() if word.startswith("endpoint="))
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.05)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        raise DaemonError(f"`meshd serve` did not become ready:\n{tail}")

    def stop(self) -> None:
        """SIGTERM; after STOP_S, SIGKILL for it and its children."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)

    def restart(self) -> None:
        """Stop and start again at the same address: what was only in memory is gone."""
        self.stop()
        self.start()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over all labels, as /metrics shows it now."""
        with urllib.request.urlopen(f"{self.endpoint}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found = (line for line in lines if line.split("{")[0].split(" ")[0] == name)
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def environment(self) -> dict[str, str]:
        """Return the variables with which `meshsdk` and the AWS tools reach the daemon."""
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return {**os.environ, **keys, "MESH_ENDPOINT": self.endpoint, "AWS_REGION": "us-east-1"}

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
