"""Manager: builds all controllers, starts and stops them, and wires watches and the webhook.

Law: the only module that knows all parts; a new kind is one line of `_passes`. The webhook answers on
every replica; everything that writes waits for leadership.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError, AsyncClient

from meshoperator import metrics
from meshoperator.cluster_model import CLUSTER_LABEL
from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.controllers.dataset_controller import DatasetController
from meshoperator.controllers.load_controller import LoadController
from meshoperator.controllers.observed_state import is_ready
from meshoperator.controllers.placement_controller import PlacementController
from meshoperator.controllers.pod_credentials import DatasetCatalog, PodCredentials
from meshoperator.controllers.pod_events import PodEvents
from meshoperator.controllers.usage_status import UsageUpdater
from meshoperator.controllers.view_controller import ViewController
from meshoperator.controllers.work_queue import WorkQueue
from meshoperator.daemon_client import DaemonClient, DaemonError, UnreachableError
from meshoperator.kube.client import Kube
from meshoperator.kube.crd_discovery import CrdDiscovery
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.kube.leader_election import LeaderElection
from meshoperator.planners.admission import LABEL
from meshoperator.planners.placement_inputs import PlacementBoard
from meshoperator.resources import ResourceError
from meshoperator.webhook import Webhook

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from lightkube import KubeConfig

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.controllers.data_controller import EventWriter
    from meshoperator.settings import OperatorSettings


_log = logging.getLogger(__name__)
_POD_WATCH_SECONDS: Final = 240
_RENEW: Final = 600.0
"""Seconds from one look at all training pods to the next: keys are renewed long before they end."""
_LOOK: Final = 2.0
_RETRY_PAUSE: Final = 1.0
_FAILURES: Final = (ApiError, httpx2.HTTPError, DaemonError, UnreachableError, ResourceError)


class DataManager:
    """One a process. `leads` is set while this operator is the one that acts; `now`: seconds since 1970."""

    def __init__(
        self,
        kube: Kube,
        settings: OperatorSettings,
        recorder: EventWriter,
        leads: asyncio.Event,
        now: Callable[[], float],
    ) -> None:
        self._kube, self._settings, self._leads = kube, settings, leads
        self.board = PlacementBoard()
        self.daemons = DaemonClient(kube, now, self._endpoint)
        self._catalogue = DatasetCatalog(kube, settings)
        self._keys = PodCredentials(kube, self.daemons, self._catalogue, now)
        self._notices = PodEvents(kube, settings, recorder, time.monotonic)
        self._placement = PlacementController(kube, settings, self.board)
        self._figures = UsageUpdater(kube, self.daemons)
        self._loops = (
            DatasetController(kube, self.daemons, recorder, now, self.board),
            LoadController(kube, self.daemons, recorder, now),
            ViewController(kube, self.daemons, recorder, now),
        )

    def __repr__(self) -> str:
        return f"<DataProgram {self.board.version}>"

    def passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        """By kind."""
        return {loop.kind: loop.reconcile for loop in self._loops}

    def work(self) -> list[Coroutine[None, None, None]]:
        """What goes on until it is cancelled."""
        found = []
        for namespace in self._settings.namespaces or (None,):
            found += [self._watch_pods(namespace), self._watch_new_pods(namespace)]
        found += [self._renew(), self._place(), self._measure(), self._notice()]
        return [*found, self._serve()] if self._settings.webhook is not None else found

    async def aclose(self) -> None:
        """Close what is open."""
        await self.daemons.aclose()

    def _endpoint(self, cluster: Cluster) -> str:
        said = self._settings.endpoint
        return said.format(name=cluster.name, namespace=cluster.namespace) if said else cluster.endpoint

    async def _serve(self) -> None:
        assert self._settings.webhook is not None
        folder = Path(self._settings.webhook_certificates)
        while True:
            try:
                async with Webhook(self._catalogue, folder, *self._settings.webhook) as hook:
                    _log.info("the webhook listens on port %d", hook.port)
                    await asyncio.Event().wait()
            except OSError as error:  # ssl.SSLError is one
                _log.error("the webhook cannot serve, pods go as they are: %s", error)
            await asyncio.sleep(5 * _RETRY_PAUSE)

    async def _watch_pods(self, namespace: str | None) -> None:
        """Keys for training pods as they come."""
        while True:
            await self._leads.wait()
            try:
                async for pod in self._kube.watch("Pod", namespace, LABEL, _POD_WATCH_SECONDS):
                    try:
                        await self._keys.renew_pod(pod)
                        await self._notices.check_pod(pod)
                    except _FAILURES as error:
                        _log.warning("not all is done for %s yet: %s", pod["metadata"]["name"], error)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of training pods broke off: %s", error)
            await asyncio.sleep(_RETRY_PAUSE)

    async def _watch_new_pods(self, namespace: str | None) -> None:
        """Those with a misspelt label are in no other watch."""
        while True:
            await self._leads.wait()
            try:
                await self._notices.watch(namespace, self._leads)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of new pods broke off: %s", error)
            await asyncio.sleep(_RETRY_PAUSE)

    async def _renew(self) -> None:
        """All training pods, now and then; soon again while one could not be served."""
        while True:
            await self._leads.wait()
            failed = 0
            try:
                for namespace in self._settings.namespaces or (None,):
                    failed += await self._keys.renew_all(namespace)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("training pods cannot be looked at: %s", error)
                failed = 1
            await asyncio.sleep(5 * _RETRY_PAUSE if failed else _RENEW)

    async def _notice(self) -> None:
        """All pods, now and then: those that were not seen when they were made."""
        while True:
            await self._leads.wait()
            try:
                await self._notices.check_all()
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("pods cannot be looked at for misspelt keys: %s", error)
            await asyncio.sleep(self._settings.pods_seconds)

    async def _measure(self) -> None:
        """What daemons hold, and how full their disks are, now and then."""
        while True:
            await self._leads.wait()
            try:
                await self._figures.update_statuses(self._settings.namespaces)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("no figures: %s", error)
            await asyncio.sleep(self._settings.figures_seconds)

    async def _place(self) -> None:
        """A plan now and then, and when data has come somewhere or gone."""
        version, rest = -1, 0.0
        while True:
            await self._leads.wait()
            if version != self.board.version or rest <= 0:
                version, rest = self.board.version, self._settings.plan_seconds
                try:
                    await self._placement.plan_and_label()
                except (ApiError, httpx2.HTTPError) as error:
                    _log.warning("no plan could be made: %s", error)
                    rest = 5 * _RETRY_PAUSE
            await asyncio.sleep(_LOOK)
            rest -= _LOOK


_WATCH_SECONDS: Final = 240
_PAUSE: Final = 1.0
LEASE: Final = "shardmesh-operator"


def now_stamp() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Manager:
    """One a process. Make it within the loop it is to run in."""

    def __init__(
        self, settings: OperatorSettings, config: KubeConfig, holder: str, end: Callable[[], None]
    ) -> None:
        """`end`: ends the process, in order."""
        self._settings, self._end = settings, end
        self._client = AsyncClient(config=config.get(), timeout=httpx2.Timeout(30))
        self.kube = Kube(self._client)
        self.crd_discovery = CrdDiscovery(self.kube, end)
        self.recorder = EventRecorder(self.kube, now_stamp)
        namespace = settings.lease_namespace or self._client.namespace
        self.leading = LeaderElection(
            self.kube, namespace, LEASE, holder, stamp=now_stamp, monotonic=time.monotonic
        )
        self.data = DataManager(self.kube, settings, self.recorder, self.leading.leads, time.time)
        self.loops = WorkQueue(self._passes(), self.leading.leads)
        self._tasks: list[asyncio.Task[None]] = []
        self._hosts: dict[str, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        return f"<Program {self.leading!r} {self.loops!r}>"

    def _passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        clusters = ClusterController(self.kube, self._settings, self.recorder, now_stamp)
        return {"MeshCluster": clusters.reconcile, **self.data.passes()}

    async def start(self) -> None:
        """Begin to watch, and to act once it leads."""
        if self._settings.metrics is not None:
            metrics.serve(*self._settings.metrics)
        await self.crd_discovery.load_served()
        self._spawn(self.crd_discovery.wait_for_new())
        self._spawn(self.leading.run_election())
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

    def on_resource_event(self, document: Manifest) -> None:
        """Something happened to a resource of ours."""
        metadata, kind = document["metadata"], document["kind"]
        name = document["spec"]["clusterRef"] if kind == "MeshNode" else metadata["name"]
        self.loops.enqueue("MeshCluster" if kind == "MeshNode" else kind, metadata["namespace"], name)
        phase = (document.get("status") or {}).get("phase")
        if kind == "MeshLoad" and phase in ("Succeeded", "Failed"):  # more of its dataset is there, or less
            self.loops.enqueue("MeshDataset", metadata["namespace"], document["spec"]["datasetRef"])
        if kind == "MeshCluster" and phase == "Running":
            self.loops.enqueue_all("MeshDataset")

    def on_node_event(self, document: Manifest, *, gone: bool) -> None:
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
        self.loops.enqueue_all("MeshCluster")

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
    kube: Kube, loops: WorkQueue, kind: str, namespace: str | None, label: str, pause: float = _PAUSE
) -> None:
    """For ever: have clusters looked at when something of theirs changes. After a watch that broke off
    everything is looked at."""
    while True:
        try:
            async for each in kube.watch(kind, namespace, label, _WATCH_SECONDS):
                metadata = each["metadata"]
                loops.enqueue("MeshCluster", metadata["namespace"], metadata["labels"][label])
        except (ApiError, httpx2.HTTPError) as error:
            _log.warning("the watch of %s broke off: %s", kind, error)
        loops.enqueue_all("MeshCluster")
        await asyncio.sleep(pause)


def holder() -> str:
    """Who this process is among operators: its pod's name."""
    return os.environ.get("HOSTNAME") or f"operator-{os.getpid()}"
