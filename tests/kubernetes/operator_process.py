"""An operator as a process of its own, outside the cluster, that a test may kill at any moment."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from tests.kubernetes.write_proxy import WriteProxy
from tests.support.interpreters import launch_python

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from tests.support.fork_server import Process


class OperatorProcess:
    """Watches one namespace through proxies in front of the API server of `kubeconfig` and of `service`,
    where its mesh answers. `settings`: MESH_OPERATOR_ variables without that prefix.

    After `kill_after(n)` the operator gets SIGKILL when its nth write to either has been carried out, before
    it hears so, and another one starts at once, as a kubelet does with a container: with the same name, so
    that the Lease is its own.
    """

    def __init__(self, kubeconfig: Path, place: Path, namespace: str, service: str, **settings: str) -> None:
        self._place, self._namespace, self._settings = place, namespace, settings
        self.service = service
        self._document: dict[str, Any] = json.loads(kubeconfig.read_text())
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._at, self.writes, self.kills = 0, list[str](), 0
        cluster, user = self._document["clusters"][0]["cluster"], self._document["users"][0]["user"]
        self._api = WriteProxy(cluster["server"], self._wrote, str(user["token"]))
        self._mesh = WriteProxy(service, self._wrote)

    def __enter__(self) -> Self:
        self._api.__enter__()
        self._mesh.__enter__()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._at = 0
            self._kill()
        self._mesh.__exit__()
        self._api.__exit__()

    def kill_after(self, write: int) -> None:
        """Count writes from 1 again; 0: no kill."""
        with self._lock:
            self.writes, self.kills, self._at = [], 0, write

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        with self._lock:
            return self._process is not None and self._process.poll() is not None

    def output(self) -> str:
        """The last that it printed, in all its lives."""
        return (self._place / "operator.log").read_text(errors="replace")[-6000:]

    def _wrote(self, what: str) -> bool:
        with self._lock:
            self.writes.append(what)
            if len(self.writes) != self._at:
                return self._process is None
            self._kill()
            self.kills += 1
            self._start()
            return True

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)

    def _start(self) -> None:
        document = json.loads(json.dumps(self._document))
        document["clusters"][0]["cluster"] = {"server": self._api.endpoint}
        document["contexts"][0]["context"]["namespace"] = self._namespace
        config = self._place / "operator.kubeconfig"
        config.write_text(json.dumps(document))
        settings = {"NAMESPACES": self._namespace, "ENDPOINT": self._mesh.endpoint, **self._settings}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESH")}
        environment = inherited | {"KUBECONFIG": str(config), "HOSTNAME": "operator"}
        environment |= {f"MESH_OPERATOR_{name}": value for name, value in settings.items()}
        if place := os.environ.get("MESH_TEST_INTERPRETERS"):
            environment["MESH_TEST_INTERPRETERS"] = place
        with (self._place / "operator.log").open("ab") as log:
            self._process = launch_python(["-m", "meshoperator"], environment, log, self._place)
