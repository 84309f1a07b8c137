"""Where copies of datasets go: filter, score, spread, hysteresis. A pure function.

Law: deterministic: one inventory has one placement, in whatever order it is listed. No clock, no I/O.
Invariant: no node twice for a dataset, none above its watermark by what is placed anew, no move without gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshoperator.inventory import Assignment, Move, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshoperator.inventory import Dataset, Demand, Inventory, StorageNode
    from meshoperator.settings import OperatorSettings

# Nearness of a copy to the GPUs that read it: on their host, in their rack, in their zone.
_HOST, _RACK, _ZONE = 1.0, 0.6, 0.3
_SPACE = 0.2  # what an empty node is worth against a full one


def plan(inventory: Inventory, settings: OperatorSettings) -> Placement:
    """Places for every copy, the moves that lead there, and what has no place."""
    return _Planner(inventory, settings).run()


@dataclass(frozen=True, slots=True)
class _Choice:
    node: StorageNode
    score: float
    near: str


class _Planner:
    def __init__(self, inventory: Inventory, settings: OperatorSettings) -> None:
        self._inventory, self._settings = inventory, settings
        self._nodes = {node.name: node for node in sorted(inventory.nodes, key=lambda node: node.name)}
        self._used = {node.name: node.used for node in inventory.nodes}
        self._assignments: list[Assignment] = []
        self._moves: list[Move] = []
        self._unplaced: dict[str, str] = {}

    def run(self) -> Placement:
        for dataset in sorted(self._inventory.datasets, key=lambda each: (-each.priority, each.name)):
            self._place(dataset)
        return Placement(tuple(self._assignments), tuple(self._moves), self._unplaced)

    def _place(self, dataset: Dataset) -> None:
        held = [name for name in self._inventory.current.get(dataset.name, ()) if name in self._nodes]
        chosen: list[_Choice] = []
        while len(chosen) < dataset.copies:
            choice = self._best(dataset, held, chosen)
            if choice is None:
                self._unplaced[dataset.name] = self._complaint(dataset, len(chosen))
                break
            chosen.append(choice)
            if choice.node.name not in held:
                self._used[choice.node.name] += dataset.size
        self._assignments += [_explain(dataset, choice, held) for choice in chosen]
        self._moves += self._movement(dataset, held, [choice.node.name for choice in chosen])

    def _best(self, dataset: Dataset, held: list[str], chosen: list[_Choice]) -> _Choice | None:
        taken = {choice.node.name for choice in chosen}
        zones = {choice.node.zone for choice in chosen}
        racks = {choice.node.rack for choice in chosen}
        candidates = [
            self._judge(dataset, node, held)
            for node in self._nodes.values()
            if node.name not in taken and self._fits(dataset, node, held)
        ]
        # A zone or rack without a copy comes first: losing one must not lose all copies.
        return max(
            candidates,
            key=lambda each: (each.node.zone not in zones, each.node.rack not in racks, each.score),
            default=None,
        )

    def _fits(self, dataset: Dataset, node: StorageNode, held: list[str]) -> bool:
        if not node.accepting:
            return False
        limit = node.capacity * self._settings.high_watermark
        return node.name in held or self._used[node.name] + dataset.size <= limit

    def _judge(self, dataset: Dataset, node: StorageNode, held: list[str]) -> _Choice:
        wanted = [demand for demand in self._inventory.demand if demand.dataset == dataset.name]
        nearness, near = _nearness(node, wanted)
        free = max(0.0, 1 - self._used[node.name] / node.capacity) if node.capacity else 0.0
        stay = self._settings.move_gain if node.name in held else 0.0
        return _Choice(node, round(nearness + _SPACE * free + stay, 9), near)

    def _movement(self, dataset: Dataset, held: list[str], chosen: list[str]) -> Iterable[Move]:
        leaving = [name for name in held if name not in chosen]
        for target in (name for name in chosen if name not in held):
            yield Move(dataset.name, leaving.pop(0) if leaving else None, target, dataset.size)

    def _complaint(self, dataset: Dataset, placed: int) -> str:
        share = round(self._settings.high_watermark * 100)
        return (
            f"{placed} of {dataset.copies} copies placed: no other accepting node stays below {share} % "
            f"with {dataset.size} bytes more"
        )


def _nearness(node: StorageNode, wanted: list[Demand]) -> tuple[float, str]:
    """GPU-weighted nearness from 0 to 1, and in words what the node is near to."""
    total = sum(demand.gpus for demand in wanted)
    if not total:
        return 0.0, ""
    levels = [(_level(node, demand), demand) for demand in wanted]
    score = sum(weight * demand.gpus for (weight, _), demand in levels) / total
    same = {
        word: sum(demand.gpus for (_, at), demand in levels if at == word)
        for word in ("host", "rack", "zone")
    }
    words = [f"{gpus} GPUs in the same {word}" for word, gpus in same.items() if gpus and word]
    return score, " and ".join(words[:2])


def _level(node: StorageNode, demand: Demand) -> tuple[float, str]:
    if demand.node == node.name:
        return _HOST, "host"
    if demand.zone == node.zone and demand.rack == node.rack:
        return _RACK, "rack"
    return (_ZONE, "zone") if demand.zone == node.zone else (0.0, "")


def _explain(dataset: Dataset, choice: _Choice, held: list[str]) -> Assignment:
    start = "keeps its copy" if choice.node.name in held else "new copy"
    return Assignment(dataset.name, choice.node.name, f"{start}: {choice.near or 'most free space'}")
