"""What a node has to compare with whom, and what it need not hold any more: pure, by the map.

Law: no I/O. Whoever is to have a slot compares it with every node that may be read for it, and with nobody
else: those are the ones that have everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshd.cluster.comparing import scope_of
from meshwire.cluster import place, routes
from meshwire.cluster.maps import MAX_COPIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from meshd.cluster.comparing import Scope
    from meshwire.cluster import ClusterMap


@dataclass(frozen=True, slots=True)
class Errand:
    """`holders`: by node id, the slots to compare with it. `first`: the same slots, each with one holder
    only, for the bulk. `blocked`: slots that nobody can be asked about now."""

    holders: Mapping[str, Scope]
    first: Mapping[str, Scope]
    blocked: int = 0


def errand(cluster: ClusterMap, node_id: str, copies: Iterable[int]) -> Errand:
    """What `node_id` has to compare by this map. `copies`: every number that some bucket keeps."""
    every: dict[str, dict[int, npt.NDArray[np.bool_]]] = {}
    first: dict[str, dict[int, npt.NDArray[np.bool_]]] = {}
    blocked = 0

    def mark(into: dict[str, dict[int, npt.NDArray[np.bool_]]], holder: str, number: int, slot: int) -> None:
        masks = into.setdefault(holder, {})
        if number not in masks:
            masks[number] = np.zeros(cluster.slots, np.bool_)
        masks[number][slot] = True

    for number in set(copies):
        table = routes(cluster, number)
        for slot in range(cluster.slots):
            route = table.of_slot(slot)
            if all(node.node_id != node_id for node in route.writers):
                continue
            others = [node.node_id for node in route.readers if node.node_id != node_id]
            blocked += not route.readers
            for other in others:
                mark(every, other, number, slot)
            if others:
                mark(first, others[slot % len(others)], number, slot)
    return Errand(_scopes(every, cluster.slots), _scopes(first, cluster.slots), blocked)


def everything(cluster: ClusterMap, copies: Iterable[int]) -> Scope:
    """Every name there can be."""
    return scope_of({number: np.ones(cluster.slots, np.bool_) for number in copies}, cluster.slots)


def unowned(cluster: ClusterMap, node_id: str, copies: Iterable[int]) -> Mapping[str, Scope]:
    """Slots that `node_id` has no share of, now or soon, and whose owners are all there: by the id of the one
    that decides. Nothing while data is on the move."""
    if cluster.moving:
        return {}
    found: dict[str, dict[int, npt.NDArray[np.bool_]]] = {}
    for number in set(copies):
        if number > MAX_COPIES:  # of a bucket whose number of copies changes this moment
            continue
        present = place(cluster, number, "present")
        for slot in range(cluster.slots):
            owners = present.of_slot(slot)
            if not owners or any(node.node_id == node_id or node.state != "up" for node in owners):
                continue
            masks = found.setdefault(owners[0].node_id, {})
            if number not in masks:
                masks[number] = np.zeros(cluster.slots, np.bool_)
            masks[number][slot] = True
    return _scopes(found, cluster.slots)


def _scopes(masks: Mapping[str, dict[int, npt.NDArray[np.bool_]]], slots: int) -> dict[str, Scope]:
    return {node_id: scope_of(each, slots) for node_id, each in masks.items()}
