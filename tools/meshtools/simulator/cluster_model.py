"""ClusterModel: the cluster map of a simulated mesh and what follows from it, as arrays over slots.

Law: every change is one of `meshwire.cluster.transitions`, every owner one of `placement` and `routes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwire.cluster import transitions
from meshwire.cluster.cluster_map import ClusterMap, Node
from meshwire.cluster.placement import compute_placement
from meshwire.cluster.routes import routes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from meshtools.simulator.scenario import Mesh

    Integers = npt.NDArray[np.int64]


class ClusterModel:
    """The map of `mesh`. Nodes have numbers in order of their ids, and keep them; new ones come last.

    changes, sent_bytes: of the map so far; each node gets every map whole.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.names = [node_name(number) for number in range(mesh.nodes)]
        nodes = tuple(self._node(number) for number in range(mesh.nodes))
        self.map = ClusterMap(1, nodes, mesh.slots, mesh.copies)
        self.changes, self.sent_bytes = 0, 0.0
        self.map_bytes = len(self.map.to_json())

    def __repr__(self) -> str:
        return f"<ClusterModel of {self.map!r}>"

    def _node(self, number: int) -> Node:
        rack = f"r{number // self._mesh.nodes_per_rack:04}"
        return Node(node_name(number), f"http://{node_name(number)}:9000", zone=rack, rack=rack, complete=1)

    def read_owners(self) -> Integers:
        """Return int64[slots]: the node that is read for each slot; −1 if there is none."""
        number = {name: place for place, name in enumerate(self.names)}
        found = np.full(self.map.slots, -1, np.int64)
        for route, slots in routes(self.map, self._mesh.copies).slots_by_route():
            if route.primary is not None:
                found[slots] = number[route.primary.node_id]
        return found

    def owners(self) -> Integers:
        """Return int64[slots, copies]: all target owners, −1 where there are fewer nodes than copies."""
        placement = compute_placement(self.map, self._mesh.copies)
        number = {name: place for place, name in enumerate(self.names)}
        numbers = np.array([number[node.node_id] for node in placement.nodes] + [-1], np.int64)
        return numbers[placement.table]

    def mark_away(self, nodes: Iterable[int]) -> None:
        """Nodes do not answer."""
        for node in nodes:
            self._become(transitions.mark_node_away(self.map, self.names[node]))

    def give_up(self, nodes: Iterable[int]) -> None:
        """Nodes are given up: their share is rebuilt on others."""
        for node in nodes:
            self._become(transitions.mark_node_down(self.map, self.names[node]))

    def bring_back(self, nodes: Iterable[int]) -> None:
        """Nodes that were away answer again, and are complete at once."""
        for node in nodes:
            known = self.map.node(self.names[node])
            assert known is not None
            self._become(transitions.join_node(self.map, known))
            self._become(transitions.mark_complete(self.map, self.names[node]))

    def add(self, count: int) -> None:
        """New nodes join; they have no data yet."""
        for number in range(len(self.names), len(self.names) + count):
            self.names.append(node_name(number))
            self._become(transitions.join_node(self.map, self._node(number)))

    def complete_all(self) -> None:
        """All nodes report that they have the data of their share; the last report ends the rebalance.

        The reports before it change nothing but their own node, so they become one map here, and are counted.
        """
        if not self.map.is_rebalancing:
            return
        version = self.map.version
        told = [node.node_id for node in self.map.nodes if node.stores and node.state not in ("away", "down")]
        first = set(told[:-1])
        nodes = tuple(
            replace(node, complete=version) if node.node_id in first else node for node in self.map.nodes
        )
        self._become(replace(self.map, version=version + len(first), nodes=nodes), len(first))
        self._become(transitions.mark_complete(self.map, told[-1], version))

    def _become(self, cluster: ClusterMap, changes: int = 1) -> None:
        if cluster is self.map:
            return
        self.map = cluster
        count = len(cluster.nodes)
        self.changes += changes
        self.sent_bytes += changes * self.map_bytes * count / self._mesh.nodes * count


def node_name(number: int) -> str:
    """Return the id of a node; ids are in the order of numbers."""
    return f"n{number:05}"


def added_slots(before: Integers, after: Integers, nodes: int) -> Integers:
    """Return int64[nodes]: how many slots each node gets that it did not own (owners as int64[slots, k])."""
    fresh = ~(after[:, :, None] == before[:, None, :]).any(axis=2) & (after >= 0)
    return np.bincount(after[fresh], minlength=nodes).astype(np.int64)
