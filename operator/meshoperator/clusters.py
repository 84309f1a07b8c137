"""The loop of a MeshCluster: look at everything, decide (`steering`), act, say how it is.

Law: each pass begins from what is there; whatever a pass leaves undone, the next one does.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from meshoperator.children import (
    CLUSTER_LABEL,
    POOL_LABEL,
    TEMPLATE_ANNOTATION,
    Cluster,
    Place,
    children,
    owned,
    root_keys,
)
from meshoperator.resources import GROUP, VERSION, MeshClusterSpec, parse
from meshoperator.statuses import cluster_status, node_status
from meshoperator.steering import Pod, Sight, applied, settled, steer
from meshwire.cluster import parse_map
from meshwire.cluster.transitions import TransitionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.children import Manifest
    from meshoperator.kube import Kube
    from meshoperator.settings import OperatorSettings
    from meshoperator.steering import MapChange, Steps
    from meshwire.cluster import ClusterMap

_log = logging.getLogger(__name__)
_TRIES: Final = 5
_STORE, _TOPIC = f"{GROUP}/store", f"{GROUP}/topic"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass found."""

    cluster: Cluster
    sight: Sight
    nodes: tuple[Manifest, ...]


class ClusterLoop:
    """`say(reason, message)` makes an event."""

    def __init__(self, kube: Kube, settings: OperatorSettings, now: Callable[[], str]) -> None:
        self._kube, self._settings, self._now = kube, settings, now

    def __repr__(self) -> str:
        return f"<ClusterLoop {self._kube!r}>"

    async def run(self, document: Manifest, say: Callable[[str, str], None]) -> dict[str, Any]:
        """One pass; the status as written. Raises ResourceError, ApiError."""
        cluster = await self._known(document)
        await self._prepare(cluster)
        seen = await self._look(cluster)
        steps = steer(seen.sight)
        await self._change_map(cluster, steps.changes, say)
        await self._make(seen, steps)
        for name, why in steps.delete:
            if await self._kube.delete("Pod", name, cluster.namespace):
                say("Restarting", f"{name}: {why}")
        return await self._tell(await self._look(cluster), steps, document)

    async def end(self, document: Manifest) -> None:
        """What goes with a MeshCluster besides what Kubernetes collects. Raises ResourceError, ApiError."""
        cluster = await self._known(document)
        if cluster.spec.deletion_policy == "Retain":
            return
        for claim in await self._kube.list_all(
            "PersistentVolumeClaim", cluster.namespace, {CLUSTER_LABEL: cluster.name}
        ):
            await self._kube.delete("PersistentVolumeClaim", claim["metadata"]["name"], cluster.namespace)
        if cluster.spec.auth.root_secret_ref is None:
            await self._kube.delete("Secret", cluster.root_secret, cluster.namespace)

    # --- looking ------------------------------------------------------------------------------------------

    async def _known(self, document: Manifest) -> Cluster:
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

    async def _look(self, cluster: Cluster) -> Seen:
        labels = {CLUSTER_LABEL: cluster.name}
        pods = [_pod(each) for each in await self._kube.list_all("Pod", cluster.namespace, labels)]
        sets = await self._kube.list_all("StatefulSet", cluster.namespace, labels)
        replicas = {
            each["metadata"]["labels"].get(POOL_LABEL, ""): int(each["spec"].get("replicas") or 0)
            for each in sets
        }
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
        found = await self._map(cluster)
        sight = Sight(
            cluster.name,
            cluster.spec,
            {pool.name: cluster.replicas(pool) for pool in cluster.spec.node_pools},
            templates,
            replicas,
            tuple(pods),
            found[1] if found else None,
            {each["spec"]["nodeId"]: each["spec"].get("desiredState", "Active") for each in nodes},
            frozenset(place.name for place in cluster.places or () if not place.schedulable),
        )
        return Seen(cluster, sight, tuple(nodes))

    async def _map(self, cluster: Cluster) -> tuple[Manifest, ClusterMap] | None:
        """The ConfigMap in which the daemons keep their map, and what it says; None before there is one."""
        labels = {_STORE: cluster.name, _TOPIC: "cluster"}
        for each in await self._kube.list_all("ConfigMap", cluster.namespace, labels):
            if (each["metadata"].get("annotations") or {}).get(f"{GROUP}/key") == "cluster/map":
                return each, parse_map(each["data"]["value"])
        return None

    # --- acting -------------------------------------------------------------------------------------------

    async def _prepare(self, cluster: Cluster) -> None:
        if cluster.spec.auth.root_secret_ref is None:
            there = await self._kube.get("Secret", cluster.root_secret, cluster.namespace)
            if there is None:
                keys = root_keys(
                    cluster, f"MESHROOT{secrets.token_hex(6).upper()}", secrets.token_urlsafe(30)
                )
                await self._kube.create(keys)
        if self._settings.daemon_role:
            await self._kube.apply(
                owned(
                    cluster,
                    "v1",
                    "ServiceAccount",
                    cluster.account,
                    cluster.labels(),
                    automountServiceAccountToken=False,
                )
                | _shared(cluster, "ServiceAccount")
            )
            await self._kube.apply(_binding(cluster, self._settings.daemon_role))

    async def _make(self, seen: Seen, steps: Steps) -> None:
        cluster = seen.cluster
        for manifest in children(
            cluster, settled=steps.settled, service_monitors=self._settings.service_monitors
        ):
            if manifest["kind"] == "StatefulSet":
                pool = manifest["metadata"]["labels"][POOL_LABEL]
                manifest["spec"]["replicas"] = steps.scale[pool]
            await self._kube.apply(manifest)
        there = {each["metadata"]["name"] for each in seen.nodes}
        pods = {pod.name: pod for pod in seen.sight.pods}
        for name in sorted(pods.keys() - there):
            await self._kube.apply(_node(cluster, pods[name]))
        gone = [
            name
            for name in sorted(there - pods.keys())
            if seen.sight.map and seen.sight.map.node(name) is None
        ]
        for name in gone:
            await self._kube.delete("MeshNode", name, cluster.namespace)

    async def _change_map(
        self, cluster: Cluster, changes: tuple[MapChange, ...], say: Callable[[str, str], None]
    ) -> None:
        for change in changes:
            for _ in range(_TRIES):
                found = await self._map(cluster)
                if found is None:
                    return
                document, present = found
                try:
                    wanted = applied(present, change)
                except TransitionError as error:
                    _log.info("%s of %s: %s", *change, error)
                    break
                if wanted == present:
                    break
                document["data"] = {"value": wanted.to_json().decode()}
                if await self._kube.replace(document):
                    say({"drain": "Draining", "stay": "Staying", "leave": "Left"}[change[0]], change[1])
                    break

    async def _tell(self, seen: Seen, steps: Steps, document: Manifest) -> dict[str, Any]:
        cluster = seen.cluster
        status = cluster_status(cluster, replace_settled(seen, steps), document, self._now())
        await self._kube.set_status("MeshCluster", cluster.name, cluster.namespace, status)
        pods = {pod.name: pod for pod in seen.sight.pods}
        for each in seen.nodes:
            written = node_status(each, pods.get(each["metadata"]["name"]), seen.sight.map, self._now())
            if written != (each.get("status") or {}):
                await self._kube.set_status("MeshNode", each["metadata"]["name"], cluster.namespace, written)
        return status


def replace_settled(seen: Seen, steps: Steps) -> tuple[Sight, Steps]:
    """What is told: the latest sight, with the steps whose effects it may show."""
    return seen.sight, replace(steps, settled=settled(seen.sight))


def _pod(document: Manifest) -> Pod:
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
    )


def _node(cluster: Cluster, pod: Pod) -> Manifest:
    """Of a pod; `desiredState` is people's, and not applied."""
    spec = {"clusterRef": cluster.name, "pool": pod.pool, "nodeId": pod.name}
    return owned(cluster, f"{GROUP}/{VERSION}", "MeshNode", pod.name, cluster.labels(pod.pool), spec=spec)


def _shared(cluster: Cluster, kind: str) -> Manifest:
    """Of a namespace, for all its meshes: it goes with none of them."""
    metadata = {
        "name": cluster.account,
        "namespace": cluster.namespace,
        "labels": {"app.kubernetes.io/part-of": "shardmesh"},
    }
    return {
        "apiVersion": "v1" if kind == "ServiceAccount" else "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
    }


def _binding(cluster: Cluster, role: str) -> Manifest:
    subject = {"kind": "ServiceAccount", "name": cluster.account, "namespace": cluster.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    return _shared(cluster, "RoleBinding") | {"roleRef": reference, "subjects": [subject]}
