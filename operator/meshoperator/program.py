"""The operator, put together: what is watched, what is done about it, in which order it starts and stops.

Law: the only place that knows all parts. A kind that is looked after is one line of `_passes`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError, AsyncClient

from meshoperator import gauges
from meshoperator.clusters import ClusterLoop
from meshoperator.dataprogram import DataProgram
from meshoperator.definitions import Definitions
from meshoperator.kube import Kube
from meshoperator.leading import Leading
from meshoperator.looking import is_ready
from meshoperator.looping import Loops
from meshoperator.meshes import CLUSTER_LABEL
from meshoperator.recording import Recorder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from lightkube import KubeConfig

    from meshoperator.meshes import Manifest
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)
_WATCH_SECONDS: Final = 240
_PAUSE: Final = 1.0
LEASE: Final = "shardmesh-operator"


def stamp() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Program:
    """One a process. Make it within the loop it is to run in."""

    def __init__(
        self, settings: OperatorSettings, config: KubeConfig, holder: str, end: Callable[[], None]
    ) -> None:
        """`end`: ends the process, in order."""
        self._settings, self._end = settings, end
        self._client = AsyncClient(config=config.get(), timeout=httpx2.Timeout(30))
        self.kube = Kube(self._client)
        self.definitions = Definitions(self.kube, end)
        self.recorder = Recorder(self.kube, stamp)
        namespace = settings.lease_namespace or self._client.namespace
        self.leading = Leading(self.kube, namespace, LEASE, holder, stamp=stamp, monotonic=time.monotonic)
        self.data = DataProgram(self.kube, settings, self.recorder, self.leading.leads, time.time)
        self.loops = Loops(self._passes(), self.leading.leads)
        self._tasks: list[asyncio.Task[None]] = []
        self._hosts: dict[str, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        return f"<Program {self.leading!r} {self.loops!r}>"

    def _passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        clusters = ClusterLoop(self.kube, self._settings, self.recorder, stamp)
        return {"MeshCluster": clusters.run, **self.data.passes()}

    async def start(self) -> None:
        """Begin to watch, and to act once it leads."""
        if self._settings.metrics is not None:
            gauges.serve(*self._settings.metrics)
        await self.definitions.read()
        self._spawn(self.definitions.keep())
        self._spawn(self.leading.keep())
        for work in self.data.work():
            self._spawn(work)
        for namespace in self._settings.namespaces or (None,):
            self._spawn(watch(self.kube, self.loops, "Pod", namespace, CLUSTER_LABEL))

    async def stop(self) -> None:
        """End everything, and let another operator begin at once."""
        await self.loops.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(ApiError, httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(5):
                await self.leading.release()
        await self.data.aclose()
        await self._client.aclose()

    def seen(self, document: Manifest) -> None:
        """Something happened to a resource of ours."""
        metadata, kind = document["metadata"], document["kind"]
        name = document["spec"]["clusterRef"] if kind == "MeshNode" else metadata["name"]
        self.loops.look("MeshCluster" if kind == "MeshNode" else kind, metadata["namespace"], name)
        phase = (document.get("status") or {}).get("phase")
        if kind == "MeshLoad" and phase in ("Succeeded", "Failed"):  # more of its dataset is there, or less
            self.loops.look("MeshDataset", metadata["namespace"], document["spec"]["datasetRef"])
        if kind == "MeshCluster" and phase == "Running":
            self.loops.look_at_all("MeshDataset")

    def seen_host(self, document: Manifest, *, gone: bool) -> None:
        """Something happened to a Kubernetes node; mostly it only says that it lives."""
        metadata, spec = document["metadata"], document.get("spec") or {}
        now = (spec.get("unschedulable"), is_ready(document), repr(metadata.get("labels")))
        name = metadata["name"]
        if gone:
            self._hosts.pop(name, None)
        elif self._hosts.get(name) == now:
            return
        else:
            self._hosts[name] = now
        self.loops.look_at_all("MeshCluster")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An operator that lacks a part is none: it begins anew."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a part of the operator failed; it begins anew", exc_info=error)
            self._end()


async def watch(
    kube: Kube, loops: Loops, kind: str, namespace: str | None, label: str, pause: float = _PAUSE
) -> None:
    """For ever: have clusters looked at when something of theirs changes. After a watch that broke off
    everything is looked at."""
    while True:
        try:
            async for each in kube.watch(kind, namespace, label, _WATCH_SECONDS):
                metadata = each["metadata"]
                loops.look("MeshCluster", metadata["namespace"], metadata["labels"][label])
        except (ApiError, httpx2.HTTPError) as error:
            _log.warning("the watch of %s broke off: %s", kind, error)
        loops.look_at_all("MeshCluster")
        await asyncio.sleep(pause)


def holder() -> str:
    """Who this process is among operators: its pod's name."""
    return os.environ.get("HOSTNAME") or f"operator-{os.getpid()}"
