"""Manager: builds all controllers, and runs watches, leader election and the webhook until it is stopped.

Law: the only module that knows all parts; a new kind is one line of `_passes`. The webhook answers on
every replica; everything that writes waits for leadership. Watches decide nothing: they enqueue objects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2
from lightkube import ApiError, AsyncClient

from meshoperator import metrics
from meshoperator.cluster_model import CLUSTER_LABEL, STORE_LABEL, TOPIC_LABEL
from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.controllers.daemon_machines import DaemonMachines
from meshoperator.controllers.dataset_controller import DatasetController
from meshoperator.controllers.issuer_registration import IssuerRegistration
from meshoperator.controllers.load_controller import LoadController
from meshoperator.controllers.observed_state import is_ready
from meshoperator.controllers.placement_controller import PlacementController
from meshoperator.controllers.pod_credentials import DatasetCatalog, PodCredentials
from meshoperator.controllers.pod_events import PodEvents
from meshoperator.controllers.usage_status import UsageUpdater
from meshoperator.controllers.view_controller import ViewController
from meshoperator.controllers.work_queue import WorkQueue
from meshoperator.daemon_client import DaemonClient, DaemonError, UnreachableError
from meshoperator.kube.client import Kube, is_expired, is_missing
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.kube.leader_election import LeaderElection
from meshoperator.planners.placement_inputs import PlacementBoard
from meshoperator.planners.pod_admission import LABEL
from meshoperator.resources import KINDS, ResourceError
from meshoperator.webhook import Webhook

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from lightkube import KubeConfig

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.controllers.base_controller import EventWriter
    from meshoperator.settings import OperatorSettings


_log = logging.getLogger(__name__)
LEASE: Final = "shardmesh-operator"
_WATCH_SECONDS: Final = 240
_RENEW_SECONDS: Final = 600.0
_ISSUER_SECONDS: Final = 60.0
"""Between checks of all training pods: keys are renewed long before they expire."""
_PLAN_CHECK: Final = 2.0
_PAUSE: Final = 1.0
_RETRY: Final = 5.0
_INSTALL: Final = "kubectl apply --server-side -f helm/shardmesh/crds/"
_MAPS: Final = {"labelSelector": f"{TOPIC_LABEL}=cluster"}
_FAILURES: Final = (ApiError, httpx2.HTTPError, DaemonError, UnreachableError, ResourceError)


class DataManager:
    """Everything about datasets and training pods; one per process. `leads` is set while this operator is the
    leader; `now` returns seconds since 1970."""

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
        self._catalogue, self._machines = DatasetCatalog(kube, settings), DaemonMachines(kube, settings)
        self._keys = PodCredentials(kube, self.daemons, self._catalogue, now)
        self._issuers = IssuerRegistration(kube, self.daemons)
        self._notices = PodEvents(kube, settings, recorder, time.monotonic)
        self._placement = PlacementController(kube, settings, self.board)
        self._figures = UsageUpdater(kube, self.daemons)
        self._controllers = (
            DatasetController(kube, self.daemons, recorder, now, self.board),
            LoadController(kube, self.daemons, recorder, now),
            ViewController(kube, self.daemons, recorder, now),
        )

    def __repr__(self) -> str:
        return f"<DataManager, placement {self.board.version}>"

    def passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        """Return the reconcile functions by kind."""
        return {each.kind: each.reconcile for each in self._controllers}

    def work(self) -> list[Coroutine[None, None, None]]:
        """Return the tasks that run until they are cancelled."""
        settings = self._settings
        found: list[Coroutine[None, None, None]] = []
        for namespace in settings.namespaces or (None,):
            found += [self._watch_training_pods(namespace), self._watch_new_pods(namespace)]
        found += [
            self._repeat("renewing the keys of training pods", self._renew, _RENEW_SECONDS, _RETRY),
            self._repeat("registering the issuer of tokens", self._register, _ISSUER_SECONDS, _RETRY),
            self._repeat("the check of pods for misspelt keys", self._check_pods, settings.pods_seconds),
            self._repeat("the update of usage in statuses", self._measure, settings.figures_seconds),
            self._place(),
        ]
        return [*found, self._serve()] if settings.webhook is not None else found

    async def aclose(self) -> None:
        """Close connections to daemons."""
        await self.daemons.aclose()

    def _endpoint(self, cluster: Cluster) -> str:
        template = self._settings.endpoint
        if not template:
            return cluster.endpoint
        return template.format(name=cluster.name, namespace=cluster.namespace)

    async def _serve(self) -> None:
        assert self._settings.webhook is not None
        folder = Path(self._settings.webhook_certificates)
        while True:
            try:
                async with Webhook(self._catalogue, self._machines, folder, *self._settings.webhook) as hook:
                    _log.info("the webhook listens on port %d", hook.port)
                    await asyncio.Event().wait()
            except OSError as error:  # ssl.SSLError is one
                _log.error("the webhook cannot serve; pods are admitted unchanged until it does: %s", error)
            await asyncio.sleep(_RETRY)

    async def _watch_training_pods(self, namespace: str | None) -> None:
        """Make keys for training pods as they appear."""
        while True:
            await self._leads.wait()
            try:
                async for what, pod in self._kube.watch("Pod", namespace, _WATCH_SECONDS, LABEL):
                    if what == "DELETED":
                        self._notices.forget_pod(pod["metadata"]["uid"])
                        continue
                    try:
                        await self._keys.renew_pod(pod)
                        await self._notices.check_pod(pod)
                    except _FAILURES as error:
                        name = pod["metadata"]["name"]
                        _log.warning("pod %s is not served yet; it is retried: %s", name, error)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of training pods failed and restarts: %s", error)
            await asyncio.sleep(_PAUSE)

    async def _watch_new_pods(self, namespace: str | None) -> None:
        """Check new pods for misspelt labels; no other watch includes those."""
        while True:
            await self._leads.wait()
            try:
                await self._notices.watch(namespace, self._leads)
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("the watch of new pods failed and restarts: %s", error)
            await asyncio.sleep(_PAUSE)

    async def _repeat(
        self, what: str, work: Callable[[], Awaitable[bool]], pause: float, retry: float = 0
    ) -> None:
        """Run `work` every `pause` seconds while this operator leads; `retry` seconds later, if that is given
        and the work failed or returned False."""
        while True:
            await self._leads.wait()
            try:
                done = await work()
            except (ApiError, httpx2.HTTPError) as error:
                _log.warning("%s failed; it is retried: %s", what, error)
                done = False
            await asyncio.sleep(pause if done or not retry else retry)

    async def _renew(self) -> bool:
        """Renew the keys of all training pods; return whether none failed."""
        failed = 0
        for namespace in self._settings.namespaces or (None,):
            failed += await self._keys.renew_all(namespace)
        return not failed

    async def _register(self) -> bool:
        """Register the cluster's issuer with the meshes that ask for it; return whether none failed."""
        return not await self._issuers.register_all(self._settings.namespaces)

    async def _check_pods(self) -> bool:
        """Check all pods, to find those that no watch reported."""
        await self._notices.check_all()
        return True

    async def _measure(self) -> bool:
        """Write what daemons hold, and how full their disks are, to statuses."""
        await self._figures.update_statuses(self._settings.namespaces)
        return True

    async def _place(self) -> None:
        """Plan placement every `plan_seconds`, and at once when data appeared or disappeared."""
        version, rest = -1, 0.0
        while True:
            await self._leads.wait()
            if version != self.board.version or rest <= 0:
                version, rest = self.board.version, self._settings.plan_seconds
                try:
                    await self._placement.plan_and_label()
                except (ApiError, httpx2.HTTPError) as error:
                    _log.warning("placement planning failed; it is retried: %s", error)
                    rest = _RETRY
            await asyncio.sleep(_PLAN_CHECK)
            rest -= _PLAN_CHECK


def now_stamp() -> str:
    """Return the current time as Kubernetes writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Manager:
    """The whole operator; one per process, created in the event loop it runs in."""

    def __init__(
        self, settings: OperatorSettings, config: KubeConfig, holder: str, end: Callable[[], None]
    ) -> None:
        """`end` is called when a part fails; the process should then stop the manager and exit."""
        self._end = end
        self._client = AsyncClient(config=config.get(), timeout=httpx2.Timeout(30))
        self._client._client._client.event_hooks["response"].append(_ensure_content_type)
        self.kube = Kube(self._client)
        self.recorder = EventRecorder(self.kube, now_stamp)
        namespace = settings.lease_namespace or self._client.namespace
        self.settings = settings = replace(settings, lease_namespace=namespace)
        self.leading = LeaderElection(
            *(self.kube, namespace, LEASE, holder),
            stamp=now_stamp,
            monotonic=time.monotonic,
            pod=settings.pod,
        )
        self.data = DataManager(self.kube, settings, self.recorder, self.leading.leads, time.time)
        self.queue = WorkQueue(self._passes(), self.leading.leads)
        self.failed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._nodes: dict[str, tuple[object, ...]] = {}

    def __repr__(self) -> str:
        return f"<Manager {self.leading!r} {self.queue!r}>"

    def _passes(self) -> dict[str, Callable[[str, str], Awaitable[float | None]]]:
        clusters = ClusterController(self.kube, self.settings, self.recorder, now_stamp)
        return {"MeshCluster": clusters.reconcile, **self.data.passes()}

    def start(self) -> None:
        """Start watching, and acting once this operator leads."""
        if self.settings.metrics is not None:
            metrics.serve(*self.settings.metrics)
        self._spawn(self.leading.run_election())
        for work in self.data.work():
            self._spawn(work)
        for namespace in self.settings.namespaces or (None,):
            self._spawn(watch_daemons(self.kube, self.queue, namespace))
            self._spawn(watch_maps(self.kube, self.queue, namespace))
            for kind in KINDS:
                self._spawn(watch(self.kube, kind.name, namespace, self.on_resource_event))
        if self.settings.reads_nodes:
            self._spawn(watch(self.kube, "Node", None, self.on_node_event))

    async def stop(self) -> None:
        """Stop all work, and release the Lease so that another operator can lead at once."""
        await self.queue.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(ApiError, httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(5):
                await self.leading.release()
        await self.data.aclose()
        await self._client.aclose()

    def on_resource_event(self, _: str, document: Manifest) -> None:
        """Enqueue one of our resources, and what depends on it."""
        metadata, kind = document["metadata"], document["kind"]
        name = document["spec"]["clusterRef"] if kind == "MeshNode" else metadata["name"]
        self.queue.enqueue("MeshCluster" if kind == "MeshNode" else kind, metadata["namespace"], name)
        phase = (document.get("status") or {}).get("phase")
        if kind == "MeshLoad" and phase in (
            "Succeeded",
            "Failed",
        ):  # it changed how much of its dataset is here
            self.queue.enqueue("MeshDataset", metadata["namespace"], document["spec"]["datasetRef"])
        if kind == "MeshCluster" and phase == "Running":
            self.queue.enqueue_all("MeshDataset")

    def on_node_event(self, what: str, document: Manifest) -> None:
        """Enqueue all MeshClusters if a Kubernetes node changed in a way that matters; most events are
        heartbeats."""
        metadata, spec = document["metadata"], document.get("spec") or {}
        seen = (spec.get("unschedulable"), is_ready(document), repr(metadata.get("labels")))
        name = metadata["name"]
        if what == "DELETED":
            self._nodes.pop(name, None)
        elif self._nodes.get(name) == seen:
            return
        else:
            self._nodes[name] = seen
        self.queue.enqueue_all("MeshCluster")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """End the process if a task failed: an operator without one of its parts must not go on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the operator failed; the process exits to be restarted", exc_info=error)
            self.failed = True
            self._end()


async def _ensure_content_type(response: httpx2.Response) -> None:
    """Add the header if it is missing, as in an error of a proxy: lightkube 1.0 fails without it."""
    response.headers.setdefault("content-type", "")


async def watch(
    kube: Kube,
    kind: str,
    namespace: str | None,
    on_event: Callable[[str, Manifest], None],
    pause: float = _PAUSE,
    retry: float = _RETRY,
) -> None:
    """Report every object of a kind, and each change, until cancelled. After a failed watch all objects are
    reported again. A kind that the API server does not serve is looked for every `retry` seconds."""
    served = True
    while True:
        try:
            async for what, document in kube.watch(kind, namespace, _WATCH_SECONDS):
                if not served:
                    _log.warning("the API server serves %s again", kind)
                served = True
                on_event(what, document)
        except (ApiError, httpx2.HTTPError) as error:
            if is_missing(error):
                if served:
                    _log.error("the API server does not serve %s; install its CRD: %s", kind, _INSTALL)
                served = False
            else:
                level = logging.DEBUG if is_expired(error) else logging.WARNING
                _log.log(level, "the watch of %s failed and restarts: %s", kind, error)
        await asyncio.sleep(pause if served else retry)


async def watch_daemons(kube: Kube, queue: WorkQueue, namespace: str | None, pause: float = _PAUSE) -> None:
    """Enqueue the MeshCluster of each daemon pod that changes, until cancelled; all MeshClusters after a
    failed watch."""
    while True:
        try:
            async for _, pod in kube.watch("Pod", namespace, _WATCH_SECONDS, CLUSTER_LABEL):
                metadata = pod["metadata"]
                queue.enqueue("MeshCluster", metadata["namespace"], metadata["labels"][CLUSTER_LABEL])
        except (ApiError, httpx2.HTTPError) as error:
            _log.warning("the watch of daemon pods failed and restarts: %s", error)
        queue.enqueue_all("MeshCluster")
        await asyncio.sleep(pause)


async def watch_maps(kube: Kube, queue: WorkQueue, namespace: str | None, pause: float = _PAUSE) -> None:
    """Enqueue the MeshCluster of each cluster map that changes, until cancelled. Daemons record there that a
    node is away after its lease of seconds; its pod and its Kubernetes node say so 40 s later."""
    while True:
        since = "0"
        try:
            while True:
                changes = kube.watch_metadata("ConfigMap", namespace, _MAPS, since, _WATCH_SECONDS)
                async for what, entry in changes:
                    metadata = entry["metadata"]
                    since = metadata["resourceVersion"]
                    if what != "BOOKMARK":
                        queue.enqueue("MeshCluster", metadata["namespace"], metadata["labels"][STORE_LABEL])
                await asyncio.sleep(pause)
        except (ApiError, httpx2.HTTPError) as error:
            level = logging.DEBUG if is_expired(error) else logging.WARNING
            _log.log(level, "the watch of cluster maps failed and restarts: %s", error)
        await asyncio.sleep(pause)


def holder() -> str:
    """Return this process's identity in the Lease: its pod's name."""
    return os.environ.get("HOSTNAME") or f"operator-{os.getpid()}"
