"""What a pass over a MeshCluster sees: its spec, pods, StatefulSets, MeshNodes, map and movers, read afresh.

Law: nothing is changed or decided here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from meshoperator.children import children
from meshoperator.meshes import CLUSTER_LABEL, POOL_LABEL, TEMPLATE_ANNOTATION, Cluster, Place
from meshoperator.resources import GROUP, MeshClusterSpec, parse
from meshoperator.steering import Pod, Sight
from meshoperator.troubles import Troubles, trouble
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshoperator.kube import Kube
    from meshoperator.meshes import Manifest
    from meshoperator.settings import OperatorSettings
    from meshwire.cluster import ClusterMap

_OVERDUE: Final = timedelta(seconds=30)
_STORE, _TOPIC, _KEY = f"{GROUP}/store", f"{GROUP}/topic", f"{GROUP}/key"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass found. `sets`: StatefulSets; `nodes`: MeshNodes; `work`: what movers say, by node id."""

    cluster: Cluster
    sight: Sight
    sets: tuple[Manifest, ...]
    nodes: tuple[Manifest, ...]
    work: Mapping[str, Mapping[str, Any]]


class Looking:
    """`now`: the time as Kubernetes writes it."""

    def __init__(self, kube: Kube, settings: OperatorSettings, now: Callable[[], str]) -> None:
        self._kube, self._settings, self._now = kube, settings, now
        self._troubles = Troubles(kube, now)

    def __repr__(self) -> str:
        return f"<Looking by {self._kube!r}>"

    async def known(self, document: Manifest) -> Cluster:
        metadata = document["metadata"]
        spec = parse(MeshClusterSpec, document["spec"])
        places = None
        if self._settings.reads_nodes:
            found = await self._kube.list_all("Node")
            places = tuple(
                Place(
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
        )

    async def look(self, cluster: Cluster) -> Seen:
        labels = {CLUSTER_LABEL: cluster.name}
        now = self._now()
        pods = [_pod(each, now) for each in await self._kube.list_all("Pod", cluster.namespace, labels)]
        pods = await self._troubles.of_pods(cluster, pods)
        sets = await self._kube.list_all("StatefulSet", cluster.namespace, labels)
        replicas = {_pool_of(each): int(each["spec"].get("replicas") or 0) for each in sets}
        wanted = {pool.name: cluster.replicas(pool) for pool in cluster.spec.node_pools}
        for pool in wanted.keys() - replicas.keys():  # its StatefulSet is being made anew: as many as it had
            ordinals = [pod.name.rpartition("-")[2] for pod in pods if pod.pool == pool]
            replicas |= {pool: max(map(int, ordinals)) + 1} if ordinals else {}
        templates = {
            each["metadata"]["labels"][POOL_LABEL]: each["spec"]["template"]["metadata"]["annotations"][
                TEMPLATE_ANNOTATION
            ]
            for each in children(cluster, settled=True)
            if each["kind"] == "StatefulSet"
        }
        nodes = [
            each
            for each in await self._kube.list_all("MeshNode", cluster.namespace)
            if each["spec"]["clusterRef"] == cluster.name
        ]
        found, work = await self.map(cluster), await self._work(cluster)
        sight = Sight(
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
            await self._troubles.of_sets(cluster, sets, pods),
        )
        return Seen(cluster, sight, tuple(sets), tuple(nodes), work)

    async def _work(self, cluster: Cluster) -> dict[str, dict[str, Any]]:
        found = await self._kube.list_all(
            "ConfigMap", cluster.namespace, {_STORE: cluster.name, _TOPIC: "moves"}
        )
        keys = [((each["metadata"].get("annotations") or {}).get(_KEY, ""), each) for each in found]
        return {
            key.removeprefix("moves/"): json.loads(each["data"]["value"])
            for key, each in keys
            if key.startswith("moves/")
        }

    async def map(self, cluster: Cluster) -> tuple[Manifest, ClusterMap] | None:
        """The ConfigMap in which the daemons keep their map, and what it says; None before there is one."""
        labels = {_STORE: cluster.name, _TOPIC: "cluster"}
        for each in await self._kube.list_all("ConfigMap", cluster.namespace, labels):
            if (each["metadata"].get("annotations") or {}).get(_KEY) == "cluster/map":
                return each, parse_map(each["data"]["value"])
        return None


def _pool_of(document: Manifest) -> str:
    return str(document["metadata"]["labels"].get(POOL_LABEL, ""))


def is_ready(node: Manifest) -> bool:
    """Whether a Kubernetes node says so, or says nothing."""
    found = (node.get("status") or {}).get("conditions") or ()
    return all(each["status"] == "True" for each in found if each["type"] == "Ready")


def _pod(document: Manifest, now: str) -> Pod:
    metadata, status = document["metadata"], document.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    node = (document.get("spec") or {}).get("nodeName") or ""
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
        trouble(status),
    )
