"""A pod as the tests' kubelet has it: its process, and whether it answers."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fork_server import Process


@dataclass
class Running:
    """A pod's process. `ready`: as the API was told last."""

    document: dict[str, Any]
    address: str
    place: Path
    process: Process | None = None
    ready: bool | None = None
    asked_to_end: float = 0.0
    restarts: int = 0
    again: float = 0.0
    mounts: dict[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the pod."""
        return str(self.document["metadata"]["name"])

    def output(self) -> str:
        """What it printed, in all its lives."""
        log = self.place / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def kill(self) -> None:
        """With all processes below it."""
        if self.signal(signal.SIGKILL) and self.process is not None:
            self.process.wait(60)

    def signal(self, number: int) -> bool:
        """To its process, if that runs, and to all below it. Returns whether it runs."""
        process = self.process
        if process is None or process.poll() is not None:
            return False
        for pid in (process.pid, *_children(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    def answers(self) -> bool:
        """As the readiness probe of its only container says."""
        (container,) = self.document["spec"]["containers"]
        probe = (container.get("readinessProbe") or {}).get("httpGet")
        if probe is None:
            return True
        port = probe["port"]
        if isinstance(port, str):
            port = next(each["containerPort"] for each in container["ports"] if each["name"] == port)
        connection = http.client.HTTPConnection(self.address, port, timeout=5)
        if probe.get("scheme") == "HTTPS":  # probes verify nothing
            whoever = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            whoever.check_hostname, whoever.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(self.address, port, timeout=5, context=whoever)
        try:
            connection.request("GET", probe["path"])
            return connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _children(pid: int) -> Iterator[int]:
    """All processes below one."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))
    except OSError:
        return
