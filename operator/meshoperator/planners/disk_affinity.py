"""Disk affinity: ties a daemon with directories on a Kubernetes node's disks to that node. Pure.

Law: daemons record where their directory is; nothing else moves that record, except that a node which no
longer exists is forgotten. A pod is tied, or moved back, only while the mesh needs what is in the directory;
a daemon that the mesh has given up, or that is drained, may start on any node.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshoperator.cluster_model import Cluster
    from meshoperator.planners.cluster_state import ClusterState, Pod
    from meshwire.cluster import ClusterMap

MACHINES_TOPIC: Final = "machines"
"""Topic of the control store in which each daemon records the Kubernetes node of its directory."""
MACHINE: Final = f"{GROUP}/machine"
"""Annotation of a daemon's pod: the Kubernetes node that it is tied to."""
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def recorded_machine(value: str) -> str:
    """Return the Kubernetes node in a daemon's record; empty if it has none, or is not understood."""
    try:
        found = json.loads(value)["machine"]
    except (ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""


def needs_directory(cluster: ClusterMap | None, name: str) -> bool:
    """Return whether the mesh relies on what a daemon has in its directory."""
    node = cluster.node(name) if cluster else None
    if cluster is None or node is None or not node.stores or node.state in ("down", "joining"):
        return False
    return not node.leaving or any(share.node_id == name for share in cluster.current_shares)


def usable_machines(cluster: Cluster, recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded Kubernetes nodes without those that the daemon's pool does not use, or no longer
    does: its tiers are on volumes, or its `nodeSelector` changed."""
    labels = {place.name: place.labels for place in cluster.places or ()}
    pools = {f"{cluster.name}-{pool.name}": pool for pool in cluster.spec.node_pools}
    found = {}
    for name, machine in recorded.items():
        pool = pools.get(name.rpartition("-")[0])
        if pool is not None and any(tier.host_path for tier in pool.tiers):
            unfit = machine in labels and not pool.node_selector.items() <= labels[machine].items()
            found[name] = "" if unfit else machine
    return found


def on_hosts_disks(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has directories on the disks of its Kubernetes node."""
    return any("hostPath" in volume for volume in (pod.get("spec") or {}).get("volumes") or ())


def machine_patch(pod: Mapping[str, Any], machine: str) -> tuple[dict[str, Any], ...]:
    """Return the JSON patch that ties a new pod to a Kubernetes node; empty if it is tied already."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if MACHINE in annotations:
        return ()
    affinity: Mapping[str, Any] = (pod.get("spec") or {}).get("affinity") or {}
    node = dict(affinity.get("nodeAffinity") or {})
    here = {"key": "metadata.name", "operator": "In", "values": [machine]}
    terms = (node.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]  # ORed, so ours go into every one
    node[_REQUIRED] = {
        "nodeSelectorTerms": [
            {**term, "matchFields": [*(term.get("matchFields") or []), here]} for term in terms
        ]
    }
    return (
        {"op": "add", "path": "/metadata/annotations", "value": {**annotations, MACHINE: machine}},
        {"op": "add", "path": "/spec/affinity", "value": {**affinity, "nodeAffinity": node}},
    )


def misplaced_pods(sight: ClusterState) -> Iterator[tuple[str, str]]:
    """Yield (pod, reason) for pods to be created again, on another Kubernetes node: those that came up where
    their directory is not, and those that wait for a node that they no longer depend on.

    Those that have each other's places are created again together: one alone would find only the same wrong
    place free, and so for ever.
    """
    for pod in sight.pods:
        home = sight.machines.get(pod.name, "")
        if pod.ready or pod.leaving:
            continue
        needed = bool(home) and needs_directory(sight.map, pod.name)
        if not pod.node and pod.machine and not (needed and pod.machine == home and _exists(sight, home)):
            yield pod.name, f"it need not wait for Kubernetes node {pod.machine} any more"
        elif not (pod.node and needed and pod.node != home and _takes_pods(sight, home)):
            continue
        elif not _waits_for_owner(sight, pod):
            yield pod.name, f"its directory is on Kubernetes node {home}, not on {pod.node}"


def _waits_for_owner(sight: ClusterState, pod: Pod) -> bool:
    """Return whether the owner of the pod's Kubernetes node, or of the one that this owner is on, and so on,
    is about to start. While one of a circle is, the others stay: it would come back to where it was, and
    each of them after it.
    """
    seen, left = {pod.name}, _owners(sight, pod.node)
    while left:
        other = left.pop()
        if other.name in seen:
            continue
        if _starts_soon(other):
            return True
        seen.add(other.name)
        left += _owners(sight, other.node) if other.node else []
    return False


def _owners(sight: ClusterState, machine: str) -> list[Pod]:
    """Return the pods whose directories are on a Kubernetes node, and that are not there."""
    return [pod for pod in sight.pods if sight.machines.get(pod.name) == machine and pod.node != machine]


def _starts_soon(pod: Pod) -> bool:
    """Return whether a pod is about to be created again, or to get a Kubernetes node that it may choose."""
    if pod.leaving:
        return not pod.overdue
    return not pod.node and not pod.machine and "unschedulable" not in pod.trouble


def lost_machines(sight: ClusterState) -> dict[str, str]:
    """Return, by node id, the recorded Kubernetes nodes that no longer exist."""
    if sight.hosts is None:
        return {}
    return {name: home for name, home in sight.machines.items() if home and home not in sight.hosts}


def _exists(sight: ClusterState, machine: str) -> bool:
    return sight.hosts is None or machine in sight.hosts


def _takes_pods(sight: ClusterState, machine: str) -> bool:
    """Return whether a pod that belongs on a Kubernetes node could start there now: the node is there, and
    no other daemon of the mesh belongs there, too."""
    ready = sight.hosts is None or sight.hosts.get(machine, False)
    settled = [
        pod
        for pod in sight.pods
        if pod.node == machine and (pod.ready or sight.machines.get(pod.name, machine) == machine)
    ]
    return ready and machine not in sight.cordoned and not settled
