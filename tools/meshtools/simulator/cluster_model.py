"""ClusterModel: the cluster map of a simulated mesh and what follows from it, as arrays over slots.

Law: every change is one of `meshwire.cluster.transitions`, every owner one of `placement` and `routes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
    Floats = npt.NDArray[np.float64]


WATCHES: Final = 5
"""Processes of a node that follow the control store: four workers and the coordinator."""
ETCD_SECONDS: Final = 1.26e-3
"""Processor time of etcd for a renewal of a lease, which asks for the version of the map: measured, see
docs/simulator.md."""


class ClusterModel:
    """The map of `mesh`, or of one that exists, `cluster`. Nodes have numbers in order of their ids, and keep
    them; new ones come last.

    changes, sent_bytes: of the map so far; each process of each node gets every map whole, in base64.
    """

    def __init__(self, mesh: Mesh, cluster: ClusterMap | None = None) -> None:
        self._mesh = mesh
        if cluster is None:
            nodes = tuple(self._node(number) for number in range(mesh.nodes))
            cluster = ClusterMap(1, nodes, mesh.slots, mesh.copies)
        self.map, self.names = cluster, [node.node_id for node in cluster.nodes]
        self._numbers: dict[str, int] = {}
        self.changes, self.sent_bytes = 0, 0.0
        self._owners_of, self._owned = 0, np.empty((0, 0), np.int64)
        self.map_bytes = len(self.map.to_stored())

    def __repr__(self) -> str:
        return f"<ClusterModel of {self.map!r}>"

    def _node(self, number: int) -> Node:
        rack = f"r{number // self._mesh.nodes_per_rack:04}"
        return Node(node_name(number), f"http://{node_name(number)}:9000", zone=rack, rack=rack, complete=1)

    @property
    def renewals_per_second(self) -> float:
        """Renewals of leases of all nodes."""
        nodes = len(self.map.nodes)
        return transitions.renewals_per_lease(nodes) / self._mesh.lease_seconds * nodes

    @property
    def etcd_cores(self) -> float:
        """Cores of etcd's leader that the renewals keep busy."""
        return self.renewals_per_second * ETCD_SECONDS

    def number_of(self, name: str) -> int:
        """Return the number of a node."""
        if len(self._numbers) < len(self.names):
            self._numbers = {name: number for number, name in enumerate(self.names)}
        return self._numbers[name]

    def read_owners(self) -> Integers:
        """Return int64[slots]: the node that is read for each slot; −1 if there is none."""
        number = {name: place for place, name in enumerate(self.names)}
        table = routes(self.map, self._mesh.copies)
        numbers = np.array([number[node.node_id] for node in table.nodes] + [-1], np.int64)
        return numbers[table.primary_places]

    def owners(self) -> Integers:
        """Return int64[slots, copies]: all target owners, −1 where there are fewer nodes than copies."""
        placement = compute_placement(self.map, self._mesh.copies)
        number = {name: place for place, name in enumerate(self.names)}
        numbers = np.array([number[node.node_id] for node in placement.nodes] + [-1], np.int64)
        return numbers[placement.table]

    def target_owners(self, slot: int) -> tuple[int, ...]:
        """Return the nodes that shall have a slot's data, whether they answer or not."""
        if self._owners_of != self.map.version:
            self._owners_of, self._owned = self.map.version, self.owners()
        return tuple(owner for owner in self._owned[slot].tolist() if owner >= 0)

    def mark_away(self, nodes: Iterable[int]) -> None:
        """Nodes do not answer, and are marked together."""
        self._become(transitions.mark_nodes_away(self.map, [self.names[node] for node in nodes]))

    def give_up(self, nodes: Iterable[int]) -> None:
        """Nodes are given up: their share is rebuilt on others."""
        self._become(transitions.mark_nodes_down(self.map, [self.names[node] for node in nodes]))

    def bring_back(self, nodes: Iterable[int]) -> None:
        """Nodes that were away answer again, and are complete at once."""
        for node in nodes:
            known = self.map.node(self.names[node])
            assert known is not None
            self._become(transitions.join_node(self.map, known))
            self._become(transitions.mark_complete(self.map, self.names[node]))

    def add(self, count: int) -> None:
        """New nodes join at the same time; they have no data yet."""
        numbers = range(len(self.names), len(self.names) + count)
        self.names += [node_name(number) for number in numbers]
        new = [self._node(number) for number in numbers]
        for first in range(0, count, count if transitions.batch_seconds(len(self.map.nodes)) else 1):
            last = first + (count if transitions.batch_seconds(len(self.map.nodes)) else 1)
            self._become(transitions.join_new_nodes(self.map, new[first:last]))

    def complete_all(self, seconds: Floats | None = None) -> None:
        """All nodes report that they have the data of their share; the last report ends the rebalance.
        seconds: float64[nodes], after how long each does."""
        if not self.map.is_rebalancing:
            return
        version, wait = self.map.version, transitions.batch_seconds(len(self.map.nodes))
        told = [
            (0.0 if seconds is None else float(seconds[number]), name)
            for number, name in enumerate(self.names)
            if self.map.must_sync(name)
        ]
        while told:
            told.sort()
            until = told[0][0] + wait
            reports = [name for when, name in told if when <= until] if wait else [told[0][1]]
            self._become(transitions.mark_all_complete(self.map, dict.fromkeys(reports, version)))
            told = told[len(reports) :]

    def _become(self, cluster: ClusterMap) -> None:
        if cluster is self.map:
            return
        self.map = cluster
        count = len(cluster.nodes)
        self.changes += 1
        self.sent_bytes += self.map_bytes * count / self._mesh.nodes * count * WATCHES * 4 / 3


def node_name(number: int) -> str:
    """Return the id of a node; ids are in the order of numbers."""
    return f"n{number:05}"
