"""Observed state of a MeshCluster, as planners take it, and what follows from it alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.resources.cluster import MeshClusterSpec
    from meshwire.cluster import ClusterMap

_WELL: Final = ("up", "draining", "down")
"""Node states that block nothing; once nothing moves, the data of a node that is down is on other nodes."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A daemon's pod. `template`: the digest it was created from. `overdue`: it should have ended a while
    ago. `trouble`: why it is not ready, according to Kubernetes. `machine`: the Kubernetes node that it is
    tied to."""

    name: str
    pool: str
    template: str
    ready: bool
    scheduled: bool = True
    node: str = ""
    leaving: bool = False
    overdue: bool = False
    uid: str = ""
    trouble: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a daemon. `why`: the reason it is out of service, or should be."""

    path: str
    serves: bool
    why: str = ""
    refuses_writes: bool = False


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The observed state. `replicas`: of existing StatefulSets; `wanted`, `templates`: by pool; `desired`:
    desiredState by node id; `cordoned`: Kubernetes nodes that accept no more pods; `hosts`: existing
    Kubernetes nodes and whether they are ready, None if they may not be read; `clear`: by node id, the
    newest map version under which a daemon had released everything that others own; `unmade`: by pool, why
    Kubernetes creates no more pods; `machines`: by node id, the Kubernetes node whose disks have the daemon's
    directory; `disks`: by node id, as the daemon last reported them."""

    cluster: str
    spec: MeshClusterSpec
    wanted: Mapping[str, int]
    templates: Mapping[str, str]
    replicas: Mapping[str, int]
    pods: tuple[Pod, ...]
    map: ClusterMap | None
    desired: Mapping[str, str] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()
    hosts: Mapping[str, bool] | None = None
    clear: Mapping[str, int] = field(default_factory=dict)
    unmade: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    disks: Mapping[str, tuple[Disk, ...]] = field(default_factory=dict)


def is_settled(sight: ClusterState) -> bool:
    """Return whether every node is healthy and no data is moving."""
    if sight.map is None:
        return False
    return not sight.map.is_rebalancing and all(node.state in _WELL for node in sight.map.nodes)


def stores_outside_map(sight: ClusterState) -> list[str]:
    """Return the daemons that should own data and are not in the map: they have not joined the mesh yet, or
    cannot."""
    stores = [pool.name for pool in sight.spec.node_pools if "store" in pool.roles]
    names = [
        f"{sight.cluster}-{pool}-{number}" for pool in stores for number in range(sight.wanted.get(pool, 0))
    ]
    return [name for name in names if sight.map is None or sight.map.node(name) is None]


def holds_no_data(sight: ClusterState, name: str) -> bool:
    """Return whether a node holds no needed data. The map says so only after every node that takes over has
    compared itself with the former owners and lacked nothing. A daemon that answers must also have released
    its last byte, which it does after it has seen that data on another node."""
    node = sight.map.node(name) if sight.map else None
    if sight.map is None or node is None or not node.stores:
        return True
    if any(share.node_id == name for share in sight.map.current_shares) or not (
        node.leaving or node.state == "down"
    ):
        return False
    answers = any(pod.name == name and pod.ready for pod in sight.pods)
    return node.state == "down" or not answers or sight.clear.get(name, 0) >= node.turned
