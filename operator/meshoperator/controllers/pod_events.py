"""Events that tell pods why they did not get their datasets, and a counter of such pods.

Law: only pod metadata is read, a page at a time with pauses. An event is written once per pod and
reason, to few pods of one controller, and never faster than `_Budget` allows (decision 35).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshoperator import metrics
from meshoperator.cluster_model import CLUSTER_LABEL
from meshoperator.planners.admission import LABEL
from meshoperator.planners.pod_checks import (
    AvailableDatasets,
    datasets_not_injected,
    explain_missing,
    find_misspellings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.controllers.data_controller import EventWriter
    from meshoperator.kube.client import Kube
    from meshoperator.planners.pod_checks import Notice
    from meshoperator.settings import OperatorSettings

PAGE: Final = 500
_REST: Final = 0.5
"""Seconds from one page to the next."""
_PER_CONTROLLER: Final = 5
"""Pods of one controller that are told the same: its others are no better, and its user sees one of them."""
_FRESH: Final = 5.0
"""Seconds for which what there is to be asked for is not looked at again."""
_OVER: Final = ("Succeeded", "Failed")
_CHOSEN: Final = {
    "labelSelector": f"!{CLUSTER_LABEL}",  # not our daemons
    "fieldSelector": ",".join(f"status.phase!={phase}" for phase in _OVER),
}
UNPLACED: Final = {
    "labelSelector": f"!{CLUSTER_LABEL},!{LABEL}",  # those with the label have a watch of their own
    "fieldSelector": "spec.nodeName=",
}
"""The API server keeps watches apart by the node they ask for: of this one it thinks when a pod is made,
changes before it has a node, or gets one, and never again."""
_WATCH_SECONDS: Final = 240


@dataclass(slots=True)
class _Budget:
    """Events that may be written: so many at once, then so many a second. `now`: seconds, monotonic."""

    now: Callable[[], float]
    burst: float = 50.0
    rate: float = 0.5
    left: float = 50.0
    asked: float = 0.0

    def try_spend(self) -> bool:
        """Whether one more may be written now."""
        now = self.now()
        self.left, self.asked = min(self.burst, self.left + (now - self.asked) * self.rate), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class _PodRecord:
    """A pod with mistakes; by reason whether an event was written."""

    controller: str
    said: dict[str, bool] = field(default_factory=dict)


class PodEvents:
    """One an operator. `now`: seconds, monotonic."""

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
        self._shelf: tuple[float, AvailableDatasets] | None = None

    def __repr__(self) -> str:
        return f"<PodNotices about {len(self._known)} pods>"

    async def check_all(self, page: int = PAGE) -> int:
        """Look at all pods that are not over; how many there are. Raises ApiError, httpx2.HTTPError."""
        before, seen, count = set(self._known), set[str](), 0
        for namespace in self._settings.namespaces or (None,):
            async for pods in self._kube.pages_of_metadata("Pod", namespace, _CHOSEN, page):
                for pod in pods:
                    await self.check_pod(pod)
                    seen.add(pod["metadata"]["uid"])
                count += len(pods)
                await asyncio.sleep(self._rest)
        self._forget(before - seen)
        return count

    async def watch(self, namespace: str | None, leads: asyncio.Event) -> None:
        """Look at pods as they are made, until a watch breaks off; while this operator leads. Raises
        ApiError, httpx2.HTTPError."""
        since = "0"
        while leads.is_set():
            changes = self._kube.watch_metadata("Pod", namespace, UNPLACED, since, _WATCH_SECONDS)
            async for what, pod in changes:
                since = pod["metadata"]["resourceVersion"]
                if what in ("ADDED", "MODIFIED"):
                    await self.check_pod(pod)
            await asyncio.sleep(self._rest)

    async def check_pod(self, pod: Manifest) -> None:
        """Tell a pod what it should know; `pod`: its metadata suffice. Raises ApiError, httpx2.HTTPError."""
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in _OVER:
            return
        notices, names = find_misspellings(metadata), datasets_not_injected(metadata)
        if names:
            notices += explain_missing(metadata, names, await self._offered())
        for notice in notices:
            await self._tell(metadata, notice)

    async def _offered(self) -> AvailableDatasets:
        now = self._now()
        if self._shelf is None or now > self._shelf[0] + _FRESH:
            datasets: list[Manifest] = []
            clusters: set[tuple[str, str]] = set()
            for namespace in self._settings.namespaces or (None,):
                datasets += await self._kube.list_all("MeshDataset", namespace)
                for each in await self._kube.list_all("MeshCluster", namespace):
                    clusters.add((each["metadata"]["namespace"], each["metadata"]["name"]))
            shares, admits = not self._settings.namespaces, self._settings.webhook is not None
            self._shelf = now, AvailableDatasets(tuple(datasets), frozenset(clusters), shares, admits)
        return self._shelf[1]

    async def _tell(self, metadata: Manifest, notice: Notice) -> None:
        known = self._known.setdefault(metadata["uid"], _PodRecord(_controller(metadata)))
        if notice.reason not in known.said:
            metrics.unserved.labels(notice.reason).inc()
        if known.said.setdefault(notice.reason, False):
            return
        place = known.controller, notice.reason
        if self._told[place] >= _PER_CONTROLLER or not self._budget.try_spend():
            return
        known.said[notice.reason] = True
        self._told[place] += 1
        about = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        await self._recorder.record_event(about, notice.reason, notice.message, once=notice.reason)

    def _forget(self, gone: set[str]) -> None:
        for uid in gone:
            known = self._known.pop(uid)
            self._told.subtract((known.controller, reason) for reason, told in known.said.items() if told)
        self._told = +self._told


def _controller(metadata: Manifest) -> str:
    """Uid of what made it; its own where nothing did."""
    owners = metadata.get("ownerReferences") or ()
    return next((str(each["uid"]) for each in owners if each.get("controller")), str(metadata["uid"]))
