"""Inventory of the placement planner, and the distance of nodes to the GPUs that read a dataset.

Law: pure. Sizes are in bytes; names are unique within their kind. A GPU reads from its nearest copy, so a
further copy is worth the distance it saves.
Invariant: nodes are sorted by name, so ties are broken the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt


Spread = Literal["Zone", "Rack", "Host"]


@dataclass(frozen=True, slots=True)
class StorageNode:
    """A daemon that can hold copies. `accepting` is False while it is cordoned, drained or down; `keeping`:
    its copies stay nevertheless (it is cordoned, or briefly away). `tier`: its best disks with free space.
    `host`: the machine it runs on; empty: the same name."""

    name: str
    zone: str
    rack: str
    capacity: int
    used: int
    accepting: bool = True
    tier: str = ""
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    keeping: bool = False


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data to place: `copies` of `size` bytes, or one on every node (`full`). Higher `priority` is placed
    first. `more`: limit of further copies for GPUs that are far from the first ones."""

    name: str
    size: int
    copies: int = 1
    priority: int = 0
    full: bool = False
    spread: Spread = "Rack"
    near: bool = True
    more: int = 0
    selector: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs that read a dataset at one place, summed over running training pods. Without a `node`: those of
    pending pods, which may run wherever GPUs are free."""

    dataset: str
    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """Unused GPUs of a Kubernetes node."""

    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The planner's whole input. `current`: dataset → names of the nodes that hold it. `moving`: datasets
    with a copy in transit by an earlier plan."""

    nodes: tuple[StorageNode, ...]
    datasets: tuple[Dataset, ...]
    demand: tuple[Demand, ...] = ()
    current: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    free_gpus: tuple[FreeGpus, ...] = ()
    moving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of one copy, and the reason in words."""

    dataset: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Load a copy of `dataset` onto `target`, then remove it from `source` (None: an additional copy)."""

    dataset: str
    source: str | None
    target: str
    size: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The planner's result. `unplaced`: dataset → why a copy has no place. `deferred`: worthwhile moves that
    wait for bandwidth. `released`: (dataset, node) of copies that are no longer needed. `considered`:
    dataset → which nodes were excluded, and why."""

    assignments: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    unplaced: Mapping[str, str]
    deferred: tuple[Move, ...] = ()
    released: tuple[tuple[str, str], ...] = ()
    considered: Mapping[str, str] = field(default_factory=dict)


HOST, RACK, ZONE = 1.0, 0.6, 0.3  # nearness of a copy to the GPUs that read it
PENDING: Final = 0.5  # weight of a GPU that a pending pod may get


class NodeTopology:
    """The nodes by index, 0…n−1 in order of their names."""

    def __init__(self, nodes: Iterable[StorageNode]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.place = {node.name: place for place, node in enumerate(self.nodes)}
        self.capacity = np.array([node.capacity for node in self.nodes], dtype=np.float64)
        self.used = np.array([node.used for node in self.nodes], dtype=np.float64)
        self.accepting = np.array([node.accepting for node in self.nodes], dtype=bool)
        self.keeping = np.array([node.keeping for node in self.nodes], dtype=bool)
        self._zones: dict[str, int] = {}
        self._racks: dict[tuple[str, str], int] = {}
        self._hosts: dict[str, int] = {}
        self.zone = np.array([self.zone_of(node.zone) for node in self.nodes], dtype=np.intp)
        self.rack = np.array([self.rack_of(node.zone, node.rack) for node in self.nodes], dtype=np.intp)
        self.host = np.array([self.host_of(node.host or node.name) for node in self.nodes], dtype=np.intp)
        _, first = np.unique(self.host, return_index=True)
        self._located = [(int(self.zone[at]), int(self.rack[at]), int(self.host[at])) for at in first]

    def zone_of(self, zone: str) -> int:
        """Return the zone's number."""
        return self._zones.setdefault(zone, len(self._zones))

    def rack_of(self, zone: str, rack: str) -> int:
        """Return the rack's number; the same name in two zones is two racks."""
        return self._racks.setdefault((zone, rack), len(self._racks))

    def host_of(self, host: str) -> int:
        """Return the host's number."""
        return self._hosts.setdefault(host, len(self._hosts))

    def location_of(self, zone: str, rack: str, host: str) -> tuple[int, int, int]:
        """Return the numbers of a host's zone, rack and host. A host that stores data is where its storage
        node is, whatever `zone` and `rack` say: with labels that contradict each other a move would look
        better than it is, and the next plan would move again."""
        number = self.host_of(host)
        if number < len(self._located):
            return self._located[number]
        return self.zone_of(zone), self.rack_of(zone, rack), number

    def counts(self) -> tuple[int, int, int]:
        """Return how many zones, racks and hosts have numbers."""
        return len(self._zones), len(self._racks), len(self._hosts)

    def matching(self, selector: Mapping[str, str]) -> npt.NDArray[np.bool_]:
        """Return which nodes have the labels."""
        if not selector:
            return np.ones(len(self.nodes), dtype=bool)
        wanted = selector.items()
        return np.array([wanted <= node.labels.items() for node in self.nodes], dtype=bool)

    def fit(self, tiers: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return how well each node's disks match the preferred tiers: 1 for the first, less for later ones,
        0 for others; 1 for all without a preference."""
        if not tiers:
            return np.ones(len(self.nodes))
        worth = {tier: 1 - rank / len(tiers) for rank, tier in enumerate(tiers)}
        return np.array([worth.get(node.tier, 0.0) for node in self.nodes])

    def emptiness(self) -> npt.NDArray[np.float64]:
        """Return the free share of each node."""
        with np.errstate(divide="ignore", invalid="ignore"):
            free = 1 - self.used / self.capacity
        return np.where(self.capacity > 0, np.clip(free, 0.0, 1.0), 0.0)


class GpuProximity:
    """The GPUs that read one dataset, and how near the chosen copies are to them."""

    def __init__(
        self, land: NodeTopology, dataset: Dataset, demand: Sequence[Demand], free: Sequence[FreeGpus]
    ) -> None:
        self._land = land
        found: dict[tuple[int, int, int], float] = {}
        waiting = 0
        for each in demand if dataset.near else ():
            if each.node:
                where = land.location_of(each.zone, each.rack, each.node)
                found[where] = found.get(where, 0.0) + each.gpus
            else:
                waiting += each.gpus
        room = sum(each.gpus for each in free)
        for each_free in free if waiting and room else ():
            where = land.location_of(each_free.zone, each_free.rack, each_free.node)
            found[where] = found.get(where, 0.0) + PENDING * min(waiting, room) * each_free.gpus / room
        ordered = sorted(found.items())
        places = np.array([where for where, _ in ordered], dtype=np.intp).reshape(-1, 3)
        self._zone, self._rack, self._host = places[:, 0], places[:, 1], places[:, 2]
        self._gpus = np.array([gpus for _, gpus in ordered], dtype=np.float64)
        self.total = float(self._gpus.sum())
        self._best = np.zeros(len(ordered))

    def gains(self) -> npt.NDArray[np.float64]:
        """Return, for each node, how much one more copy there raises the mean nearness (0…1)."""
        if not self.total:
            return np.zeros(len(self._land.nodes))
        zones, racks, hosts = self._land.counts()
        weights = self._gpus / self.total
        by_zone, by_rack, by_host = (
            weights * np.maximum(0.0, level - self._best) for level in (ZONE, RACK, HOST)
        )
        zone = np.bincount(self._zone, by_zone, zones)
        rack = np.bincount(self._rack, by_rack - by_zone, racks)
        host = np.bincount(self._host, by_host - by_rack, hosts)
        land = self._land
        return np.round(zone[land.zone] + rack[land.rack] + host[land.host], 9)

    def levels(self, place: int) -> npt.NDArray[np.float64]:
        """Return how near a node is to each group of GPUs."""
        land = self._land
        return np.where(
            self._host == land.host[place],
            HOST,
            np.where(
                self._rack == land.rack[place], RACK, np.where(self._zone == land.zone[place], ZONE, 0.0)
            ),
        )

    def set_copies(self, places: Iterable[int]) -> None:
        """Set the places of all copies."""
        self._best = np.zeros(len(self._best))
        for place in places:
            self._best = np.maximum(self._best, self.levels(place))

    def describe_levels(self, place: int) -> str:
        """Describe which GPUs a node is near to; empty if none."""
        levels = self.levels(place)
        found = [
            f"{round(gpus)} GPUs in the same {word}"
            for word, level in (("host", HOST), ("rack", RACK), ("zone", ZONE))
            if round(gpus := float(self._gpus[levels == level].sum()))
        ]
        return " and ".join(found[:2])
