"""Events that tell users why their pods did not get their datasets, and metrics of such pods.

Law: only pod metadata is read, a page at a time with pauses. An event is created once per pod and reason, for
few pods of a controller, and never faster than `_Budget` allows (decision 35).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshoperator import metrics
from meshoperator.cluster_model import CLUSTER_LABEL
from meshoperator.planners.pod_admission import LABEL
from meshoperator.planners.pod_checks import (
    AvailableDatasets,
    datasets_not_injected,
    explain_missing,
    find_misspellings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.controllers.base_controller import EventWriter
    from meshoperator.kube.client import Kube
    from meshoperator.planners.pod_checks import Notice
    from meshoperator.settings import OperatorSettings

PAGE: Final = 500
_REST: Final = 0.5
"""Seconds between pages."""
_PER_CONTROLLER: Final = 5
"""Events with one reason for the pods of one controller; its other pods have the same problem."""
_FRESH: Final = 5.0
"""Seconds for which the list of available datasets is reused."""
_OVER: Final = ("Succeeded", "Failed")
_CHOSEN: Final = {
    "labelSelector": f"!{CLUSTER_LABEL}",  # not our daemons
    "fieldSelector": ",".join(f"status.phase!={phase}" for phase in _OVER),
}
UNPLACED: Final = {
    "labelSelector": f"!{CLUSTER_LABEL},!{LABEL}",  # labelled pods have their own watch
    "fieldSelector": "spec.nodeName=",
}
"""The API server indexes pod watches by node name, so this watch costs it work only when a pod is created,
changes before it has a node, or is assigned one."""
_WATCH_SECONDS: Final = 240


@dataclass(slots=True)
class _Budget:
    """Token bucket for events: `burst` at once, then `rate` per second. `now` returns monotonic seconds."""

    now: Callable[[], float]
    burst: float = 50.0
    rate: float = 0.5
    left: float = 50.0
    asked: float = 0.0

    def try_spend(self) -> bool:
        """Take a token; return whether there was one."""
        now = self.now()
        self.left, self.asked = min(self.burst, self.left + (now - self.asked) * self.rate), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class _PodRecord:
    """A pod that had problems; `said`: by reason, whether its event was written; `reasons`: of its present
    problems."""

    controller: str
    said: dict[str, bool] = field(default_factory=dict)
    reasons: frozenset[str] = frozenset()


class PodEvents:
    """Checks pods and writes the events; one per operator. `now` returns monotonic seconds."""

    def __init__(
        self,
        kube: Kube,
        settings: OperatorSettings,
        recorder: EventWriter,
        now: Callable[[], float],
        rest: float = _REST,
    ) -> None:
        self._kube, self._settings, self._recorder, self._now = kube, settings, recorder, now
        self._rest, self._budget = rest, _Budget(now)
        self._known: dict[str, _PodRecord] = {}
        self._told: Counter[tuple[str, str]] = Counter()  # by controller and reason
        self._present: Counter[str] = Counter()  # pods by reason
        self._available: tuple[float, AvailableDatasets] | None = None

    def __repr__(self) -> str:
        return f"<PodEvents of {len(self._known)} pods>"

    async def check_all(self, page: int = PAGE) -> int:
        """Check all pods that have not ended; return how many there are. Raises ApiError,
        httpx2.HTTPError."""
        before, seen, count = set(self._known), set[str](), 0
        for namespace in self._settings.namespaces or (None,):
            async for pods in self._kube.pages_of_metadata("Pod", namespace, _CHOSEN, page):
                for pod in pods:
                    await self.check_pod(pod)
                    seen.add(pod["metadata"]["uid"])
                count += len(pods)
                await asyncio.sleep(self._rest)
        for uid in before - seen:
            self.forget_pod(uid)
        metrics.record_unserved(self._present)
        return count

    async def watch(self, namespace: str | None, leads: asyncio.Event) -> None:
        """Check new pods while this operator leads, until a watch fails. Raises ApiError,
        httpx2.HTTPError."""
        since = "0"
        while leads.is_set():
            changes = self._kube.watch_metadata("Pod", namespace, UNPLACED, since, _WATCH_SECONDS)
            async for what, pod in changes:
                since = pod["metadata"]["resourceVersion"]
                if what in ("ADDED", "MODIFIED"):
                    await self.check_pod(pod)
            await asyncio.sleep(self._rest)

    async def check_pod(self, pod: Manifest) -> None:
        """Count a pod's problems and write events about them; its metadata suffices. Raises ApiError,
        httpx2.HTTPError."""
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in _OVER:
            self.forget_pod(metadata["uid"])
            return
        notices, names = find_misspellings(metadata), datasets_not_injected(metadata)
        if names:
            notices += explain_missing(metadata, names, await self._offered_datasets())
        if not notices and metadata["uid"] not in self._known:
            return
        known = self._record(metadata, frozenset(notice.reason for notice in notices))
        for notice in notices:
            await self._tell(known, metadata, notice)

    def forget_pod(self, uid: str) -> None:
        """Forget a pod that has ended or was deleted."""
        if (known := self._known.pop(uid, None)) is None:
            return
        self._told.subtract((known.controller, reason) for reason, told in known.said.items() if told)
        self._told = +self._told
        self._present.subtract(known.reasons)
        metrics.record_unserved(self._present)

    def _record(self, metadata: Manifest, reasons: frozenset[str]) -> _PodRecord:
        """Count a pod's present problems, instead of those of its last check."""
        known = self._known.setdefault(metadata["uid"], _PodRecord(_controller(metadata)))
        self._present.subtract(known.reasons)
        self._present.update(reasons)
        known.reasons = reasons
        for reason in reasons - known.said.keys():
            metrics.unserved.labels(reason).inc()
            known.said[reason] = False
        metrics.record_unserved(self._present)
        return known

    async def _offered_datasets(self) -> AvailableDatasets:
        now = self._now()
        if self._available is None or now > self._available[0] + _FRESH:
            datasets: list[Manifest] = []
            clusters: set[tuple[str, str]] = set()
            for namespace in self._settings.namespaces or (None,):
                datasets += await self._kube.list_all("MeshDataset", namespace)
                for each in await self._kube.list_all("MeshCluster", namespace):
                    clusters.add((each["metadata"]["namespace"], each["metadata"]["name"]))
            shares, admits = not self._settings.namespaces, self._settings.webhook is not None
            self._available = now, AvailableDatasets(tuple(datasets), frozenset(clusters), shares, admits)
        return self._available[1]

    async def _tell(self, known: _PodRecord, metadata: Manifest, notice: Notice) -> None:
        if known.said[notice.reason]:
            return
        place = known.controller, notice.reason
        if self._told[place] >= _PER_CONTROLLER or not self._budget.try_spend():
            return
        known.said[notice.reason] = True
        self._told[place] += 1
        about = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        await self._recorder.record_event(about, notice.reason, notice.message, once=notice.reason)


def _controller(metadata: Manifest) -> str:
    """Return the uid of the pod's controller, or its own uid if it has none."""
    owners = metadata.get("ownerReferences") or ()
    return next((str(each["uid"]) for each in owners if each.get("controller")), str(metadata["uid"]))
