"""Observed state of a MeshCluster: spec, pods, StatefulSets, MeshNodes, map, and why pods do not start.

Law: read-only; it changes and decides nothing. Events are read for a few objects at a time, and only for
objects that have a problem.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from meshoperator.cluster_model import (
    CLUSTER_LABEL,
    POOL_LABEL,
    STORE_LABEL,
    TEMPLATE_ANNOTATION,
    TOPIC_LABEL,
    Cluster,
    HostNode,
)
from meshoperator.planners.cluster_state import ClusterState, Disk, Pod
from meshoperator.planners.disk_affinity import MACHINE, MACHINES_TOPIC, recorded_machine, usable_machines
from meshoperator.planners.exit_message import exit_message
from meshoperator.planners.manifests import cluster_manifests
from meshoperator.resources import GROUP, MeshClusterSpec, parse
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshoperator.cluster_model import Manifest
    from meshoperator.kube.client import Kube
    from meshoperator.settings import OperatorSettings
    from meshwire.cluster import ClusterMap


_LONGEST: Final = 300
_SHORT: Final = 160
"""Characters of what a container waits for: what it said when it ended matters more."""
_ASKED: Final = 3
_FRESH: Final = timedelta(minutes=20)
"""A StatefulSet waits up to 16 minutes between attempts to create a pod that is rejected."""
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
"""Event reasons that carry more detail than the status."""


class PodProblems:
    """`now` returns the time as Kubernetes writes it."""

    def __init__(self, kube: Kube, now: Callable[[], str]) -> None:
        self._kube, self._now = kube, now

    def __repr__(self) -> str:
        return f"<PodProblems of {self._kube!r}>"

    async def explain_pods(self, cluster: Cluster, pods: list[Pod]) -> list[Pod]:
        """Return the pods, with the reason from events where a pod is not ready and its status does not say
        why."""
        asked = [pod for pod in pods if not pod.ready and not pod.leaving]
        found = {pod.name: said for pod in asked[:_ASKED] if (said := await self._why(cluster, pod))}
        return [replace(pod, trouble=found.get(pod.name, pod.trouble)) for pod in pods]

    async def explain_sets(
        self, cluster: Cluster, sets: Iterable[Manifest], pods: Iterable[Pod]
    ) -> dict[str, str]:
        """Return, by pool, why its StatefulSet creates fewer pods than it should."""
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
                    return f"is unschedulable: its volume {claim}: {said}"
        if pod.scheduled and pod.trouble.partition(":")[0] in ("", "ContainerCreating"):
            return await self._last("Pod", pod.name, cluster.namespace, pod.uid)
        return ""

    async def _last(self, kind: str, name: str, namespace: str, uid: str = "") -> str:
        """Return the message of the latest recent event."""
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


def pod_problem(status: Manifest) -> str:
    """Return why a pod is not ready according to its status; empty if the status does not say."""
    for each in status.get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f"is unschedulable: {each.get('message') or each.get('reason') or 'no reason given'}"[
                :_LONGEST
            ]
    if status.get("phase") == "Failed" and status.get("reason"):  # the kubelet's own reason, e.g. Evicted
        return f"{status['reason']}: {status.get('message') or ''}".strip().rstrip(":")[:_LONGEST]
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, last = each.get("state") or {}, each.get("lastState") or {}
        waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
        if not waiting and not state.get("terminated"):
            continue
        said = [_waits(waiting)] if waiting and waiting.get("reason") else []
        said += [_describe_end(ended)] if ended and (ended.get("exitCode") or waiting) else []
        if said:
            return "; ".join(text.strip().rstrip(":") for text in said)
    return ""


def _waits(state: Manifest) -> str:
    return f"{state['reason']}: {state.get('message') or ''}"[:_SHORT]


def _describe_end(state: Manifest) -> str:
    """Describe a terminated container, with its reason if that says more than that it ended."""
    reason = f" ({state['reason']})" if state.get("reason") not in (None, "Error", "Completed") else ""
    return f"exited with {state.get('exitCode')}{reason}: {exit_message(state.get('message') or '')}"


_OVERDUE: Final = timedelta(seconds=30)
_KEY: Final = f"{GROUP}/key"


@dataclass(frozen=True, slots=True)
class ObservedState:
    """What a pass found. `sets`: StatefulSets; `nodes`: MeshNodes; `work`: rebalance progress, by node id."""

    cluster: Cluster
    state: ClusterState
    sets: tuple[Manifest, ...]
    nodes: tuple[Manifest, ...]
    work: Mapping[str, Mapping[str, Any]]


class Observer:
    """`now` returns the time as Kubernetes writes it."""

    def __init__(self, kube: Kube, settings: OperatorSettings, now: Callable[[], str]) -> None:
        self._kube, self._settings, self._now = kube, settings, now
        self._troubles = PodProblems(kube, now)

    def __repr__(self) -> str:
        return f"<Observer of {self._kube!r}>"

    async def load_cluster(self, document: Manifest) -> Cluster:
        metadata = document["metadata"]
        spec = parse(MeshClusterSpec, document["spec"])
        places = None
        if self._settings.reads_nodes:
            found = await self._kube.list_all("Node")
            places = tuple(
                HostNode(
                    each["metadata"]["name"],
                    each["metadata"].get("labels") or {},
                    not (each.get("spec") or {}).get("unschedulable"),
                    ready=is_ready(each),
                )
                for each in found
            )
        return Cluster(
            metadata["name"],
            metadata["namespace"],
            metadata["uid"],
            spec,
            places,
            self._settings.daemon_account,
            self._settings.lease_namespace if self._settings.pod_name else "",
            self._settings.pod_labels,
            self._settings.cluster_ipv6,
        )

    async def observe(self, cluster: Cluster) -> ObservedState:
        labels = {CLUSTER_LABEL: cluster.name}
        now = self._now()
        pods = [_pod(each, now) for each in await self._kube.list_all("Pod", cluster.namespace, labels)]
        pods = await self._troubles.explain_pods(cluster, pods)
        sets = await self._kube.list_all("StatefulSet", cluster.namespace, labels)
        replicas = {_pool_of(each): int(each["spec"].get("replicas") or 0) for each in sets}
        wanted = {pool.name: cluster.replicas(pool) for pool in cluster.spec.node_pools}
        for pool in wanted.keys() - replicas.keys():  # its StatefulSet is being recreated: keep its size
            ordinals = [pod.name.rpartition("-")[2] for pod in pods if pod.pool == pool]
            replicas |= {pool: max(map(int, ordinals)) + 1} if ordinals else {}
        templates = {
            each["metadata"]["labels"][POOL_LABEL]: each["spec"]["template"]["metadata"]["annotations"][
                TEMPLATE_ANNOTATION
            ]
            for each in cluster_manifests(cluster, settled=True)
            if each["kind"] == "StatefulSet"
        }
        nodes = [
            each
            for each in await self._kube.list_all("MeshNode", cluster.namespace)
            if each["spec"]["clusterRef"] == cluster.name
        ]
        found = await load_map(self._kube, cluster.namespace, cluster.name)
        work = await self._work(cluster)
        sight = ClusterState(
            cluster.name,
            cluster.spec,
            {name: replicas.get(name, 0) if count is None else count for name, count in wanted.items()},
            templates,
            replicas,
            tuple(pods),
            found[1] if found else None,
            {each["spec"]["nodeId"]: each["spec"].get("desiredState", "Active") for each in nodes},
            frozenset(place.name for place in cluster.places or () if not place.schedulable),
            None if cluster.places is None else {place.name: place.ready for place in cluster.places},
            {name: int(each.get("clear") or 0) for name, each in work.items()},
            await self._troubles.explain_sets(cluster, sets, pods),
            usable_machines(cluster, await load_machines(self._kube, cluster.namespace, cluster.name)),
            await self._disks(cluster),
        )
        return ObservedState(cluster, sight, tuple(sets), tuple(nodes), work)

    async def _work(self, cluster: Cluster) -> dict[str, dict[str, Any]]:
        found = await load_documents(self._kube, cluster.namespace, cluster.name, "moves")
        return {name: json.loads(each["data"]["value"]) for name, each in found.items()}

    async def _disks(self, cluster: Cluster) -> dict[str, tuple[Disk, ...]]:
        found = await load_documents(self._kube, cluster.namespace, cluster.name, "scrubs")
        return {
            name: tuple(
                Disk(each["path"], each["serves"], each.get("why", ""), each.get("refuses_writes", False))
                for each in json.loads(document["data"]["value"]).get("disks") or ()
            )
            for name, document in found.items()
        }


async def load_documents(kube: Kube, namespace: str, cluster: str, topic: str) -> dict[str, Manifest]:
    """Return the documents of a topic of the control store by the rest of their keys."""
    found = await kube.list_all("ConfigMap", namespace, {STORE_LABEL: cluster, TOPIC_LABEL: topic})
    keys = [((each["metadata"].get("annotations") or {}).get(_KEY, ""), each) for each in found]
    head = f"{topic}/"
    return {key.removeprefix(head): each for key, each in keys if key.startswith(head)}


async def load_map(kube: Kube, namespace: str, cluster: str) -> tuple[Manifest, ClusterMap] | None:
    """Return the ConfigMap that holds the cluster map, and the parsed map; None before it exists."""
    found = (await load_documents(kube, namespace, cluster, "cluster")).get("map")
    return None if found is None else (found, parse_map(found["data"]["value"]))


async def load_machines(kube: Kube, namespace: str, cluster: str) -> dict[str, str]:
    """Return the Kubernetes nodes on whose disks daemons have recorded their directories, by node id."""
    found = await load_documents(kube, namespace, cluster, MACHINES_TOPIC)
    return {name: recorded_machine(each["data"]["value"]) for name, each in found.items()}


def _pool_of(document: Manifest) -> str:
    return str(document["metadata"]["labels"].get(POOL_LABEL, ""))


def is_ready(node: Manifest) -> bool:
    """Return whether a Kubernetes node is ready; a node without that condition counts as ready."""
    found = (node.get("status") or {}).get("conditions") or ()
    return all(each["status"] == "True" for each in found if each["type"] == "Ready")


def _pod(document: Manifest, now: str) -> Pod:
    metadata, status = document["metadata"], document.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    node = (document.get("spec") or {}).get("nodeName") or ""
    machine = "" if node else (metadata.get("annotations") or {}).get(MACHINE, "")
    waits = f"waits for Kubernetes node {machine}, which has its directory; it " if machine else ""
    return Pod(
        metadata["name"],
        metadata["labels"].get(POOL_LABEL, ""),
        (metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION, ""),
        conditions.get("Ready") == "True",
        bool(node),
        node,
        bool(metadata.get("deletionTimestamp")),
        bool(
            metadata.get("deletionTimestamp")
            and datetime.fromisoformat(now) > datetime.fromisoformat(metadata["deletionTimestamp"]) + _OVERDUE
        ),
        metadata.get("uid", ""),
        waits + problem if (problem := pod_problem(status)) else "",
        machine,
    )
