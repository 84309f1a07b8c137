"""Inventory of the placement planner, and the distance of nodes to the GPUs that want a dataset.

Law: pure. Sizes are in bytes; names are unique within their kind. A GPU reads from its nearest copy, so
a further copy is worth what it shortens that distance.
Invariant: nodes are in order of their names, so ties have one answer.
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
    what it has stays all the same (it is cordoned, or away for a moment). `tier`: its best disks with room.
    `host`: the machine it runs on; empty: called like it."""

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
    """Data to be placed: `copies` of `size` bytes, or one on every node (`full`). Higher `priority` is placed
    first. `more`: further copies at most, where many GPUs are far from the first ones."""

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
    """GPUs that want a dataset, at a place: running training pods, summed. Without a `node`: pending ones,
    that may come to wherever GPUs are free."""

    dataset: str
    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """GPUs of a Kubernetes node that nobody uses."""

    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything the planner may know. `current`: dataset → names of the nodes that hold it. `moving`: those
    of which a copy is on its way by an earlier plan."""

    nodes: tuple[StorageNode, ...]
    datasets: tuple[Dataset, ...]
    demand: tuple[Demand, ...] = ()
    current: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    free_gpus: tuple[FreeGpus, ...] = ()
    moving: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One copy's place, and why a person should find that reasonable."""

    dataset: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a copy of `dataset` to `target`; from `source` it goes afterwards (None: it is one more copy)."""

    dataset: str
    source: str | None
    target: str
    size: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The planner's answer. `unplaced`: dataset → why a copy of it has no place. `deferred`: moves that are
    worth it and wait for bandwidth. `released`: (dataset, node) of copies that are no longer needed.
    `considered`: dataset → which nodes were out of the question, and why."""

    assignments: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    unplaced: Mapping[str, str]
    deferred: tuple[Move, ...] = ()
    released: tuple[tuple[str, str], ...] = ()
    considered: Mapping[str, str] = field(default_factory=dict)


HOST, RACK, ZONE = 1.0, 0.6, 0.3  # nearness of a copy to the GPUs that read it
PENDING: Final = 0.5  # what a GPU is worth that a pod only may get


class NodeTopology:
    """The nodes, by place: 0…n−1 in order of their names."""

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

    def zone_of(self, zone: str) -> int:
        """A number for it."""
        return self._zones.setdefault(zone, len(self._zones))

    def rack_of(self, zone: str, rack: str) -> int:
        """A number for it; racks of one name in two zones are two."""
        return self._racks.setdefault((zone, rack), len(self._racks))

    def host_of(self, host: str) -> int:
        """A number for it."""
        return self._hosts.setdefault(host, len(self._hosts))

    def counts(self) -> tuple[int, int, int]:
        """How many zones, racks, hosts have been numbered."""
        return len(self._zones), len(self._racks), len(self._hosts)

    def matching(self, selector: Mapping[str, str]) -> npt.NDArray[np.bool_]:
        """Which nodes have the labels."""
        if not selector:
            return np.ones(len(self.nodes), dtype=bool)
        wanted = selector.items()
        return np.array([wanted <= node.labels.items() for node in self.nodes], dtype=bool)

    def fit(self, tiers: Sequence[str]) -> npt.NDArray[np.float64]:
        """How well the nodes' disks are what is preferred: 1 for the first, less for later ones, 0 for
        others; 1 for all where nothing is preferred."""
        if not tiers:
            return np.ones(len(self.nodes))
        worth = {tier: 1 - rank / len(tiers) for rank, tier in enumerate(tiers)}
        return np.array([worth.get(node.tier, 0.0) for node in self.nodes])

    def emptiness(self) -> npt.NDArray[np.float64]:
        """Free share of each node."""
        with np.errstate(divide="ignore", invalid="ignore"):
            free = 1 - self.used / self.capacity
        return np.where(self.capacity > 0, np.clip(free, 0.0, 1.0), 0.0)


class GpuProximity:
    """The GPUs that want one dataset, and how near its copies are to them by now."""

    def __init__(
        self, land: NodeTopology, dataset: Dataset, demand: Sequence[Demand], free: Sequence[FreeGpus]
    ) -> None:
        self._land = land
        found: dict[tuple[int, int, int], float] = {}
        waiting = 0
        for each in demand if dataset.near else ():
            if each.node:
                where = (land.zone_of(each.zone), land.rack_of(each.zone, each.rack), land.host_of(each.node))
                found[where] = found.get(where, 0.0) + each.gpus
            else:
                waiting += each.gpus
        room = sum(each.gpus for each in free)
        for each_free in free if waiting and room else ():
            where = (
                land.zone_of(each_free.zone),
                land.rack_of(each_free.zone, each_free.rack),
                land.host_of(each_free.node),
            )
            found[where] = found.get(where, 0.0) + PENDING * min(waiting, room) * each_free.gpus / room
        ordered = sorted(found.items())
        places = np.array([where for where, _ in ordered], dtype=np.intp).reshape(-1, 3)
        self._zone, self._rack, self._host = places[:, 0], places[:, 1], places[:, 2]
        self._gpus = np.array([gpus for _, gpus in ordered], dtype=np.float64)
        self.total = float(self._gpus.sum())
        self._best = np.zeros(len(ordered))

    def gains(self) -> npt.NDArray[np.float64]:
        """For each node: by how much the mean nearness (0…1) rises with a copy there, too."""
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
        """How near a node is to each group of GPUs."""
        land = self._land
        return np.where(
            self._host == land.host[place],
            HOST,
            np.where(
                self._rack == land.rack[place], RACK, np.where(self._zone == land.zone[place], ZONE, 0.0)
            ),
        )

    def set_copies(self, places: Iterable[int]) -> None:
        """Copies are at these places, and nowhere else."""
        self._best = np.zeros(len(self._best))
        for place in places:
            self._best = np.maximum(self._best, self.levels(place))

    def nearness(self) -> float:
        """Mean nearness of the GPUs to their nearest copy, 0…1."""
        return float(round((self._gpus * self._best).sum() / self.total, 9)) if self.total else 0.0

    def describe_levels(self, place: int) -> str:
        """What a node is near to; empty when nothing."""
        levels = self.levels(place)
        found = [
            f"{round(gpus)} GPUs in the same {word}"
            for word, level in (("host", HOST), ("rack", RACK), ("zone", ZONE))
            if round(gpus := float(self._gpus[levels == level].sum()))
        ]
        return " and ".join(found[:2])
