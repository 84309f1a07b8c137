"""Who answers for a name: who decides about it, who may read it, who has to get every write of it.

Law: a pure function of (map, copies). Writers are the present and the future owners that answer; readers are
those of the present owners of whom the map knows that they have everything. Where all that answer have been
away, the one that went last has everything, and nobody else; while it is not back, nobody reads or decides.
Invariant: one decider a slot and map, and it is a reader and a writer.

Who acknowledges a write looks at the map again when all of its writers have it: a newer one may name more.
Then whatever was acknowledged under one map is at the readers of every later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.cluster.maps import relied_and_given
from meshwire.cluster.placement import place, slot_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.cluster.maps import ClusterMap, Node

SOUND: Final = ("up", "draining")
"""States of nodes that have everything of their present share."""
_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Route:
    """`decider`: None while nobody may decide. `readers` in order, the decider first. `writers`: everybody
    who answers and owns the name at present, or will."""

    decider: Node | None
    readers: tuple[Node, ...]
    writers: tuple[Node, ...]


class Routes:
    """The routes of one map and one number of copies; `routes` gives it."""

    def __init__(self, cluster: ClusterMap, copies: int) -> None:
        self.version, self.slots = cluster.version, cluster.slots
        relied, given = relied_and_given(copies)
        self._present, self._future = place(cluster, relied, "present"), place(cluster, given)
        self._given = place(cluster, given, "present")
        self._found: dict[int, Route] = {}
        tables = (self._present.table, self._given.table, self._future.table)
        self._rows = np.hstack(tables)
        self._made: dict[bytes, Route] = {}
        self._decided: dict[str, npt.NDArray[np.bool_]] = {}

    def __repr__(self) -> str:
        return f"<Routes of map {self.version}, {self._present.table.shape[1]} copies>"

    def of_slot(self, slot: int) -> Route:
        """The route of a slot."""
        found = self._found.get(slot)
        if found is None:
            row = self._rows[slot].tobytes()  # slots of the same owners have the same route
            found = self._made.get(row)
            if found is None:
                found = self._made[row] = self._make(slot)
            self._found[slot] = found
        return found

    def of(self, bucket: str, key: str) -> Route:
        """The route of a name."""
        return self.of_slot(slot_of(bucket, key, self.slots))

    def decided_by(self, node_id: str) -> npt.NDArray[np.bool_]:
        """bool[slots]: those of which a node is the decider."""
        found = self._decided.get(node_id)
        if found is None:
            deciders = [self.of_slot(slot).decider for slot in range(self.slots)]
            found = np.array([node is not None and node.node_id == node_id for node in deciders])
            found.flags.writeable = False
            self._decided[node_id] = found
        return found

    def _make(self, slot: int) -> Route:
        present, future = self._present.of_slot(slot), self._future.of_slot(slot)
        readers = _readers(present)
        given = self._given.of_slot(slot)
        everybody = {node.node_id: node for node in (*readers, *present, *given, *future)}
        writers = tuple(node for node in everybody.values() if node.state not in ("away", "down"))
        return Route(readers[0] if readers else None, readers, writers)


def _readers(owners: tuple[Node, ...]) -> tuple[Node, ...]:
    sound = tuple(node for node in owners if node.state in SOUND)
    if sound:
        return sound
    had = [node for node in owners if node.state in ("away", "returning")]
    last = max(had, key=lambda node: node.since, default=None)
    return (last,) if last is not None and last.state == "returning" else ()


@lru_cache(maxsize=_KEPT)
def routes(cluster: ClusterMap, copies: int) -> Routes:
    """The routes by a map for names of which so many copies are kept (1…8), or as `Count.copies` says."""
    return Routes(cluster, copies)
