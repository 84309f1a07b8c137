"""A day of a large cluster, simulated: jobs come and go, demand shifts, a rack is drained; the planner
follows.

Pods go where Kubernetes' scheduler would put them with the webhook's preferences: to a node with free GPUs
that has a copy, else to one in a copy's rack, else to one in its zone, else anywhere.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from meshoperator.planners.placement_model import Dataset, Demand, FreeGpus, Inventory, StorageNode
from meshoperator.planners.placement_planner import plan_placement
from meshoperator.settings import OperatorSettings

GIB = 1 << 30
GPUS = 8
_SLOW, _TRIES = 0.5, 5
"""A plan that takes more seconds of CPU is made again: they are more where processors and caches are shared
with other work."""


@dataclass
class Day:
    """What came of it. Shares are of GPU-hours of pods; `moved`: bytes of moves for the better."""

    near: float = 0.0
    all: float = 0.0
    moved: int = 0
    made: int = 0
    planned: list[float] = field(default_factory=list)
    unplaced: int = 0

    @property
    def locality(self) -> float:
        return self.near / self.all


@dataclass
class _Pod:
    dataset: str
    gpus: int
    until: float
    node: str


class Cluster:
    def __init__(self, seed: int, nodes: int = 1000, datasets: int = 200) -> None:
        self.chance = random.Random(seed)
        self.nodes = {
            name: StorageNode(name, f"z{n % 4}", f"r{n // 4 % 25}", capacity=8192 * GIB, used=0, tier="nvme")
            for n, name in enumerate(f"n{n:04d}" for n in range(nodes))
        }
        sizes = [round(min(4096, self.chance.lognormvariate(5, 1.2)) * GIB) for _ in range(datasets)]
        self.datasets = tuple(
            Dataset(f"d{n:03d}", size, copies=2, more=30, priority=n % 3) for n, size in enumerate(sizes)
        )
        self.weights = [1 / (rank + 3) for rank in range(datasets)]
        self.held: dict[str, set[str]] = {each.name: set() for each in self.datasets}
        self.pods: list[_Pod] = []
        self.free = dict.fromkeys(self.nodes, GPUS)
        self.settings = OperatorSettings(move_bytes_per_second=20 * GIB, plan_seconds=1800, moves_at_once=48)

    def run(self, hours: float = 24.0, step: float = 0.5) -> Day:
        day, now = Day(), 0.0
        self._plan(Day())  # before anybody came
        while now < hours:
            self._finish(now)
            self._arrive(now)
            self._plan(day)
            self._count(day, step)
            if now == hours / 2:
                self._drain()
            now += step
        return day

    def _finish(self, now: float) -> None:
        for pod in self.pods:
            if pod.until <= now:
                self.free[pod.node] += pod.gpus
        self.pods = [pod for pod in self.pods if pod.until > now]

    def _arrive(self, now: float) -> None:
        """Jobs of one to eight pods of eight GPUs, until three quarters of the GPUs are in use."""
        most = 0.75 * GPUS * len(self.nodes)
        while GPUS * len(self.nodes) - sum(self.free.values()) < most:
            (rank,) = self.chance.choices(range(len(self.datasets)), self.weights)
            dataset = self.datasets[(rank + int(now) * 7) % len(self.datasets)].name  # favourites change
            until = now + self.chance.uniform(1, 8)
            for _ in range(self.chance.choice((1, 1, 2, 4, 8))):
                node = self._scheduled(dataset)
                if node is not None:
                    self.free[node] -= GPUS
                    self.pods.append(_Pod(dataset, GPUS, until, node))

    def _scheduled(self, dataset: str) -> str | None:
        copies = [self.nodes[name] for name in self.held[dataset]]
        hosts = {node.name for node in copies}
        racks, zones = {(node.zone, node.rack) for node in copies}, {node.zone for node in copies}
        able = [node for name, node in self.nodes.items() if self.free[name] >= GPUS]
        if not able:
            return None
        scores = [
            (100 * (node.name in hosts) + 60 * ((node.zone, node.rack) in racks) + 30 * (node.zone in zones))
            for node in able
        ]
        best = max(scores)
        equal = [node.name for node, score in zip(able, scores, strict=True) if score == best]
        return self.chance.choice(equal)

    def _plan(self, day: Day) -> None:
        gpus: dict[tuple[str, str], int] = defaultdict(int)
        for pod in self.pods:
            gpus[pod.dataset, pod.node] += pod.gpus
        demand = tuple(
            Demand(dataset, self.nodes[node].zone, self.nodes[node].rack, node, count)
            for (dataset, node), count in gpus.items()
        )
        free = tuple(
            FreeGpus(self.nodes[name].zone, self.nodes[name].rack, name, count)
            for name, count in self.free.items()
            if count
        )
        current = {name: tuple(sorted(held)) for name, held in self.held.items()}
        inventory = Inventory(tuple(self.nodes.values()), self.datasets, demand, current, free)
        taken = list[float]()
        while not taken or (min(taken) > _SLOW and len(taken) < _TRIES):
            began = time.thread_time()
            placement = plan_placement(inventory, self.settings)
            taken.append(time.thread_time() - began)
        day.planned.append(min(taken))
        day.unplaced += len(placement.unplaced)
        used = {name: node.used for name, node in self.nodes.items()}
        sizes = {each.name: each.size for each in self.datasets}
        for move in placement.moves:
            self.held[move.dataset].add(move.target)
            used[move.target] += move.size
            if move.reason.startswith("new copy"):
                day.made += move.size
            else:
                day.moved += move.size
        gone = [(move.dataset, move.source) for move in placement.moves if move.source]
        for name, node in (*gone, *placement.released):
            self.held[name].discard(node)
            used[node] -= sizes[name]
        self.nodes = {name: replace(node, used=used[name]) for name, node in self.nodes.items()}

    def _count(self, day: Day, step: float) -> None:
        for pod in self.pods:
            node = self.nodes[pod.node]
            racks = {(self.nodes[name].zone, self.nodes[name].rack) for name in self.held[pod.dataset]}
            day.all += step * pod.gpus
            day.near += step * pod.gpus * ((node.zone, node.rack) in racks)

    def _drain(self) -> None:
        """A rack is to be emptied."""
        self.drained = {name for name, node in self.nodes.items() if (node.zone, node.rack) == ("z0", "r0")}
        for name in self.drained:
            self.nodes[name] = replace(self.nodes[name], accepting=False)
