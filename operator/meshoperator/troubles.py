"""Why pods are not made, or do not start: what Kubernetes itself says of it, in their statuses and in events.

Law: only told, never acted upon; asked for a few at a time, and only of those that are not as they should be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from meshoperator.meshes import POOL_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster, Manifest
    from meshoperator.steering import Pod

_LONGEST: Final = 300
_ASKED: Final = 3
_FRESH: Final = timedelta(minutes=20)
"""Between two attempts of a StatefulSet to make a pod that is refused there are up to 16 minutes."""
_TELLING: Final = {
    "StatefulSet": {"FailedCreate"},
    "PersistentVolumeClaim": {"FailedBinding", "ProvisioningFailed"},
    "Pod": {
        "Failed",
        "FailedAttachVolume",
        "FailedCreatePodSandBox",
        "FailedMapVolume",
        "FailedMount",
        "NetworkNotReady",
    },
}
"""Reasons of events that say more than the status does."""


class Troubles:
    """`now`: the time as Kubernetes writes it."""

    def __init__(self, kube: Kube, now: Callable[[], str]) -> None:
        self._kube, self._now = kube, now

    def __repr__(self) -> str:
        return f"<Troubles of {self._kube!r}>"

    async def of_pods(self, cluster: Cluster, pods: list[Pod]) -> list[Pod]:
        """With what events say of those that are not ready and whose status does not say why."""
        asked = [pod for pod in pods if not pod.ready and not pod.leaving]
        found = {pod.name: said for pod in asked[:_ASKED] if (said := await self._why(cluster, pod))}
        return [replace(pod, trouble=found.get(pod.name, pod.trouble)) for pod in pods]

    async def of_sets(
        self, cluster: Cluster, sets: Iterable[Manifest], pods: Iterable[Pod]
    ) -> dict[str, str]:
        """By pool, why fewer pods are made than its StatefulSet asks for."""
        there, found = Counter(pod.pool for pod in pods), dict[str, str]()
        for each in sets:
            pool, name = each["metadata"]["labels"].get(POOL_LABEL, ""), each["metadata"]["name"]
            if there[pool] < int(each["spec"].get("replicas") or 0):
                said = await self._last("StatefulSet", name, cluster.namespace, each["metadata"]["uid"])
                found |= {pool: said} if said else {}
        return found

    async def _why(self, cluster: Cluster, pod: Pod) -> str:
        if not pod.scheduled and "PersistentVolumeClaim" in pod.trouble:
            pools = [each for each in cluster.spec.node_pools if each.name == pod.pool]
            for tier in (tier for each in pools for tier in each.tiers):
                claim = f"{tier.name}-{pod.name}"
                if tier.volume_claim and (
                    said := await self._last("PersistentVolumeClaim", claim, cluster.namespace)
                ):
                    return f"has no place: its volume {claim}: {said}"
        if pod.scheduled and pod.trouble.partition(":")[0] in ("", "ContainerCreating"):
            return await self._last("Pod", pod.name, cluster.namespace, pod.uid)
        return ""

    async def _last(self, kind: str, name: str, namespace: str, uid: str = "") -> str:
        """What was said last and not too long ago."""
        since = datetime.fromisoformat(self._now()) - _FRESH
        telling = [
            (when, each)
            for each in await self._kube.list_events(kind, name, namespace)
            if each.get("reason") in _TELLING[kind]
            and uid in ("", each["involvedObject"].get("uid"))
            and (when := datetime.fromisoformat(_when(each))) > since
        ]
        if not telling:
            return ""
        _, each = max(telling, key=lambda found: found[0])
        return f"{each['reason']}: {each.get('message') or ''}"[:_LONGEST]


def _when(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def trouble(status: Manifest) -> str:
    """Why a pod is not ready, as far as Kubernetes says; empty: it does not."""
    for each in status.get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f"has no place: {each.get('message') or each.get('reason') or 'nobody says why'}"[
                :_LONGEST
            ]
    if status.get("phase") == "Failed" and status.get("reason"):  # the kubelet's own word, as Evicted
        return f"{status['reason']}: {status.get('message') or ''}".strip().rstrip(":")[:_LONGEST]
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, last = each.get("state") or {}, each.get("lastState") or {}
        waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
        if not waiting and not state.get("terminated"):
            continue
        said = (
            [f"{waiting['reason']}: {waiting.get('message', '')}"]
            if waiting and waiting.get("reason")
            else []
        )
        said += [_ended(ended)] if ended and (ended.get("exitCode") or waiting) else []
        if said:
            return "; ".join(text.strip().rstrip(":") for text in said)[:_LONGEST]
    return ""


def _ended(state: Manifest) -> str:
    """With its reason where that is more than that it ended."""
    reason = f" ({state['reason']})" if state.get("reason") not in (None, "Error", "Completed") else ""
    return f"it ended with {state.get('exitCode')}{reason}: {state.get('message') or ''}"
