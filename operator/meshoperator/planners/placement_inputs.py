"""Placement inputs: from cluster state to the planner's inventory, and from data to node labels.

Law: pure except for `PlacementBoard`, which remembers what the passes of this process observed. The labels of
a Kubernetes node follow the data it holds, never a plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from meshoperator.planners.placement_model import Dataset, Demand, FreeGpus, Inventory, StorageNode
from meshoperator.planners.pod_admission import LABEL, LEVELS, label, requested_datasets
from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from meshoperator.cluster_model import HostNode, Manifest
    from meshoperator.planners.placement_model import Placement
    from meshoperator.resources import MeshClusterSpec, MeshDatasetSpec
    from meshoperator.resources.cluster import Topology

GPU: Final = "nvidia.com/gpu"
_KEEPING: Final = ("up", "joining", "away", "returning")
"""Node states in which copies stay for now, so that a restart moves nothing."""
_SPEED: Final = ("mem", "nvme", "ssd", "hdd")
_OVER: Final = ("Succeeded", "Failed")
_HALF: Final = 0.5
_LABEL_VALUES: Final = {f"{level}.{GROUP}": "copy" if level == "host" else "near" for level, _ in LEVELS}
"""Values of the labels of Kubernetes nodes that have, or are near, a copy."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a daemon reports about a dataset and its space. `node`: its id in the map. `hits` and `misses`:
    pieces recently read from its cache or fetched; `idle`: seconds since the last of them."""

    node: str
    objects: int
    bytes: int
    capacity: int = 0
    used: int = 0
    hits: int = 0
    misses: int = 0
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyLocation:
    """A daemon that has a copy of a dataset, or should have one."""

    node: str
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class DatasetHomes:
    """A dataset's homes, those that stay only until others have all of it, its source's bytes, and the
    generation of its spec."""

    homes: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    source: int | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class MeshGround:
    """A mesh's topology labels, and each pool's roles and fastest disks."""

    topology: Topology
    pools: Mapping[str, tuple[tuple[str, ...], str]]

    @classmethod
    def from_spec(cls, spec: MeshClusterSpec) -> MeshGround:
        """Build it from a MeshCluster."""
        return cls(
            spec.topology,
            {
                pool.name: (
                    pool.roles,
                    min(
                        (tier.class_ for tier in pool.tiers if tier.content == "Data"),
                        key=_SPEED.index,
                        default="",
                    ),
                )
                for pool in spec.node_pools
            },
        )


@dataclass(slots=True)
class PlacementBoard:
    """State that passes over datasets share. It is lost with the process and rebuilt by the next passes.
    `plans`: whether placement is planned at all; `looked`: the version of the last plan. `loaded`: for which
    homes a load was started."""

    holdings: dict[tuple[str, str], tuple[Holding, ...]] = field(default_factory=dict)
    kept: dict[tuple[str, str], DatasetHomes] = field(default_factory=dict)
    loaded: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    plans: bool = False
    looked: int = -1
    planned: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    unplaced: dict[tuple[str, str], str] = field(default_factory=dict)
    version: int = 0
    """Changes when the location of a dataset changes."""

    def record_holdings(
        self, namespace: str, name: str, holdings: Iterable[Holding], kept: DatasetHomes = DatasetHomes()
    ) -> None:
        """Record what daemons hold of a dataset."""
        key, now = (namespace, name), tuple(holdings)
        before = self.kept.get(key, DatasetHomes())
        if (
            key not in self.holdings
            or holders(self.holdings[key]) != holders(now)
            or replace(before, source=None) != replace(kept, source=None)
        ):
            self.version += 1
        self.holdings[key], self.kept[key] = now, kept

    def forget(self, namespace: str, name: str) -> None:
        """Forget a deleted dataset."""
        self.version += 1
        for known in (self.holdings, self.planned, self.unplaced, self.kept, self.loaded):
            known.pop((namespace, name), None)

    def retain_datasets(self, datasets: Iterable[tuple[str, str]]) -> None:
        """Forget all datasets but these."""
        for key in self.planned.keys() - set(datasets):
            self.forget(*key)

    def record_plan(self, placement: Placement, names: Mapping[str, tuple[str, str]]) -> None:
        """Record the planner's result. `names`: the (namespace, name) of its datasets."""
        self.planned |= {key: {} for key in names.values()}
        for each in placement.assignments:
            self.planned[names[each.dataset]][each.node] = each.reason
        for name, key in names.items():
            self.unplaced[key] = placement.unplaced.get(name, "")

    def copy_locations(self, namespace: str, name: str) -> list[CopyLocation]:
        """Return where the dataset should be, and where else it is."""
        held = {each.node: each.bytes for each in self.holdings.get((namespace, name), ())}
        planned = self.planned.get((namespace, name), {})
        found = [CopyLocation(node, held.get(node, 0), reason) for node, reason in sorted(planned.items())]
        kept = self.kept.get((namespace, name), DatasetHomes())
        found += [
            CopyLocation(node, size, _unplanned_reason(node, kept))
            for node, size in sorted(held.items())
            if size and node not in planned
        ]
        return found

    def unplaced_reason(self, namespace: str, name: str) -> str:
        """Return why a copy has no place; empty if all have one."""
        return self.unplaced.get((namespace, name), "")


def _unplanned_reason(node: str, kept: DatasetHomes) -> str:
    if node in kept.leaving:
        return "its copy is removed once the planned copies are complete"
    if kept.homes and node not in kept.homes:
        return "the rest of an earlier copy; it is removed"
    return "holds a share: objects are spread over all storing daemons"


def holders(holdings: Iterable[Holding]) -> set[str]:
    """Return the daemons that hold a dataset: those with at least half as much as the one with most."""
    known = list(holdings)
    most = max((each.bytes for each in known), default=0)
    return {each.node for each in known if most and each.bytes >= _HALF * most}


def inventory_of(
    datasets: Mapping[tuple[str, str], MeshDatasetSpec],
    board: PlacementBoard,
    mesh_nodes: Sequence[Manifest],
    places: Mapping[str, HostNode],
    pods: Sequence[Manifest],
    ground: MeshGround,
) -> tuple[Inventory, dict[str, tuple[str, str]]]:
    """Return the planner's inventory, and the datasets behind its names."""
    topology = ground.topology
    names = {f"{namespace}/{name}": (namespace, name) for namespace, name in datasets}
    room: dict[str, Holding] = {}
    for key in datasets:  # of this mesh: daemons of another mesh may have the same names
        room |= {each.node: each for each in board.holdings.get(key, ())}
    nodes = tuple(_storage(each, room, places, ground) for each in mesh_nodes)
    wanted_datasets = tuple(
        _dataset(name, datasets[key], board.holdings.get(key, ()), board.kept.get(key, DatasetHomes()))
        for name, key in names.items()
    )
    current = {
        name: board.kept.get(key, DatasetHomes()).homes or tuple(sorted(holders(board.holdings.get(key, ()))))
        for name, key in names.items()
    }
    demand, free = _gpus(pods, places, topology, datasets)
    moving = frozenset(name for name, key in names.items() if board.kept.get(key, DatasetHomes()).leaving)
    return Inventory(nodes, wanted_datasets, demand, current, free, moving), names


def _storage(
    node: Manifest, room: Mapping[str, Holding], places: Mapping[str, HostNode], ground: MeshGround
) -> StorageNode:
    spec, status, topology = node["spec"], node.get("status") or {}, ground.topology
    host = status.get("node") or ""
    labels = dict(places[host].labels) if host in places else {}
    held = room.get(spec["nodeId"])
    roles, tier = ground.pools.get(spec["pool"], ((), ""))
    desired, state = spec.get("desiredState", "Active"), status.get("state")
    able = "store" in roles or "cache" in roles
    cordoned = host in places and not places[host].schedulable  # its data moves away
    return StorageNode(
        spec["nodeId"],
        status.get("zone") or labels.get(topology.zone, ""),
        status.get("rack") or labels.get(topology.rack, ""),
        held.capacity if held else 0,
        held.used if held else 0,
        able and desired == "Active" and state == "up" and not cordoned,
        tier,
        labels.get(topology.host) or host,
        labels,
        able and desired in ("Active", "Cordoned") and state in _KEEPING and not cordoned,
    )


def _dataset(name: str, spec: MeshDatasetSpec, holdings: Sequence[Holding], kept: DatasetHomes) -> Dataset:
    placement = spec.placement
    return Dataset(
        name,
        max((kept.source or 0, *(each.bytes for each in holdings))),
        placement.copies or 1,
        placement.priority,
        placement.full,
        placement.spread,
        placement.near_pods != "Off",
        max(0, (placement.max_copies_near_pods or 0) - (placement.copies or 1)),
        dict(placement.node_selector),
        tuple(placement.tier_preference),
    )


def _gpus(
    pods: Sequence[Manifest],
    places: Mapping[str, HostNode],
    topology: Topology,
    datasets: Mapping[tuple[str, str], MeshDatasetSpec],
) -> tuple[tuple[Demand, ...], tuple[FreeGpus, ...]]:
    used: dict[str, int] = defaultdict(int)
    demand: dict[tuple[str, str], int] = defaultdict(int)
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in _OVER:
            continue
        count, host = gpus(pod), (pod.get("spec") or {}).get("nodeName") or ""
        used[host] += count
        if not count or LABEL not in (pod["metadata"].get("labels") or {}):
            continue
        for name in requested_datasets(pod):
            namespace = pod["metadata"]["namespace"]
            if (namespace, name) in datasets:
                demand[f"{namespace}/{name}", host] += count
    found = [
        Demand(name, *_where(host, places, topology), count) for (name, host), count in sorted(demand.items())
    ]
    free = [
        FreeGpus(*_where(host, places, topology), place.gpus - used[host])
        for host, place in sorted(places.items())
        if place.schedulable and place.gpus > used[host]
    ]
    return tuple(found), tuple(free)


def _where(node: str, places: Mapping[str, HostNode], topology: Topology) -> tuple[str, str, str]:
    """Return the zone, rack and host of a Kubernetes node."""
    labels = places[node].labels if node in places else {}
    return labels.get(topology.zone, ""), labels.get(topology.rack, ""), labels.get(topology.host) or node


def gpus(pod: Manifest) -> int:
    """Return the number of GPUs that a pod requests."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    limits = (((each.get("resources") or {}).get("limits") or {}).get(GPU, 0) for each in containers)
    return sum(int(each) for each in limits)


def labels_wanted(
    marks: Mapping[str, set[str]], places: Mapping[str, HostNode], topology: Topology
) -> dict[str, set[str]]:
    """Return our labels by Kubernetes node. `marks`: a dataset's mark → the Kubernetes nodes that hold it."""
    found: dict[str, set[str]] = {name: set() for name in places}
    keys = {"host": topology.host, "rack": topology.rack, "zone": topology.zone}
    for mark, hosts in marks.items():
        for level, _ in LEVELS:
            key = keys[level]
            near = {places[host].labels.get(key, "") for host in hosts if host in places}
            for name, place in places.items():
                value = place.labels.get(key, "")
                if (level == "host" and name in hosts) or (value and value in near):
                    found[name].add(label(level, mark))
    return found


def label_change(place: HostNode, wanted: set[str], unknown: Collection[str] = ()) -> dict[str, Any]:
    """Return the merge patch that gives a Kubernetes node exactly these labels of ours; empty if it has them.
    Labels of datasets with the marks `unknown` stay as they are. The values are for people; earlier releases
    left them empty."""
    split = {key: key.partition("/") for key in place.labels}
    ours = {
        key: place.labels[key]
        for key, (level, _, name) in split.items()
        if level in _LABEL_VALUES and name not in unknown
    }
    values = {key: _LABEL_VALUES[key.partition("/")[0]] for key in wanted}
    change: dict[str, str | None] = dict.fromkeys(ours.keys() - wanted)
    change |= {key: value for key, value in values.items() if ours.get(key) != value}
    return {"metadata": {"labels": change}} if change else {}
