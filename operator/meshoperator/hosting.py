"""Labels of Kubernetes nodes that say on which of them the daemons of a pool have their disks.

A directory of a node does not follow its daemon. Pods of a pool with such tiers prefer nodes with its label:
one that is replaced finds its disk again, and only fetches what it missed.

Law: a node has the label as long as a daemon of the pool is on it, or was last and is expected back; while
the mesh does not say who is, all are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshoperator.meshes import DISKS, mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster, Manifest
    from meshoperator.steering import Sight

Changes = dict[str, dict[str, str | None]]


async def tell(kube: Kube, cluster: Cluster, sight: Sight, nodes: Iterable[Manifest]) -> None:
    """Have Kubernetes nodes say so; nothing where they may not be read. `nodes`: MeshNodes."""
    wanted = homes(cluster, sight, nodes)
    there = {place.name: dict(place.labels) for place in cluster.places or ()}
    for name, labels in changes(cluster.mark, there, wanted).items():
        await kube.patch("Node", name, None, {"metadata": {"labels": labels}})


async def forget(kube: Kube, namespace: str, cluster: str) -> None:
    """Its data is to be no more."""
    every = await kube.list_all("Node")
    there = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in every}
    for name, labels in changes(mark(namespace, cluster), there, {}).items():
        await kube.patch("Node", name, None, {"metadata": {"labels": labels}})


def homes(cluster: Cluster, sight: Sight, nodes: Iterable[Manifest]) -> dict[str, set[str]]:
    """Label → Kubernetes nodes that are to have it."""
    at = {each["spec"]["nodeId"]: (each.get("status") or {}).get("node") or "" for each in nodes}
    at |= {pod.name: pod.node for pod in sight.pods if pod.node}
    expected = None if sight.map is None else {n.node_id for n in sight.map.nodes if n.state != "down"}
    running = {pod.name for pod in sight.pods if pod.node}
    found = {}
    for pool in cluster.spec.node_pools:
        if any(tier.host_path for tier in pool.tiers):
            head = f"{cluster.name}-{pool.name}"
            found[cluster.disks_label(pool.name)] = {
                place
                for name, place in at.items()
                if name.rpartition("-")[0] == head
                and (expected is None or name in running or name in expected)
            } - {""}
    return found


def changes(mark: str, there: dict[str, dict[str, str]], wanted: dict[str, set[str]]) -> Changes:
    """By Kubernetes node, labels that come and (None) go; those of other meshes are left alone."""
    found: Changes = {}
    for name, labels in there.items():
        own = {key for key in labels if key.startswith(DISKS) and key.endswith(f".{mark}")}
        come = {key for key, places in wanted.items() if name in places}
        change: dict[str, str | None] = dict.fromkeys(come - own, "true") | dict.fromkeys(own - come)
        if change:
            found[name] = change
    return found
