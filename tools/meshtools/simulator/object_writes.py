"""ObjectWrites: objects that are written beside training, to the nodes that the cluster map names.

Law: a write is acknowledged when all nodes of its write set have it, and repeated while one of them does not
answer. A disk takes it after the read in progress: reads ahead are queued one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.cluster.routes import routes, slot_of

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy.typing as npt
    import simpy

    from meshtools.simulator.cluster_model import ClusterModel
    from meshtools.simulator.resources import NodeResources
    from meshtools.simulator.scenario import Mesh, Writes


class ObjectWrites:
    """Writes of a scenario. `dead`: bool[nodes], the nodes that do not answer. seconds: of each write, until
    it was acknowledged; missed_bytes: float64[nodes], what was written while a node was away."""

    def __init__(
        self,
        env: simpy.Environment,
        mesh: Mesh,
        writes: Writes,
        cluster: ClusterModel,
        nodes: NodeResources,
        dead: npt.NDArray[np.bool_],
    ) -> None:
        self._env, self._mesh, self._writes = env, mesh, writes
        self._cluster, self._nodes, self._dead = cluster, nodes, dead
        self._version = 0
        self._sets: list[tuple[int, ...]] = [()] * mesh.slots
        self.seconds: list[float] = []
        self.missed_bytes = np.zeros(dead.size)

    def __repr__(self) -> str:
        return f"<ObjectWrites, {len(self.seconds)} acknowledged>"

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Begin writes at the rate of the scenario, for ever."""
        number = 0
        while True:
            yield self._env.timeout(self._writes.object_bytes / self._writes.bytes_per_second)
            self._env.process(self._write(number))
            number += 1

    def write_set(self, slot: int) -> tuple[int, ...]:
        """Return the numbers of the nodes that a write of this slot goes to, by the present map."""
        cluster = self._cluster.map
        if self._version != cluster.version:
            number = {name: place for place, name in enumerate(self._cluster.names)}
            for route, slots in routes(cluster, self._mesh.copies).slots_by_route():
                members = tuple(number[node.node_id] for node in route.write_set)
                for each in slots.tolist():
                    self._sets[each] = members
            self._version = cluster.version
        return self._sets[slot]

    def _write(self, number: int) -> Generator[simpy.Event, Any, None]:
        env, size, began = self._env, self._writes.object_bytes, self._env.now
        slot = slot_of("written", f"object-{number:09}", self._mesh.slots)
        yield env.timeout(self._mesh.request_seconds)
        while not (members := self.write_set(slot)) or self._dead[list(members)].any():
            yield env.timeout(self._writes.retry_seconds)
        done = self._nodes.write_object(env.now, members, number, size)
        for owner in self._cluster.target_owners(slot):
            if owner not in members:
                self.missed_bytes[owner] += size
        yield env.timeout(done - env.now)
        self.seconds.append(env.now - began)
