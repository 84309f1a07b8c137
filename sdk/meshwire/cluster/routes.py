"""Routes: the primary, read set and write set of a key, and the node to which an address is assigned.

Law: a pure function of (map, copies). The write set is the reachable current and target owners; the read
set is the current owners known to be complete. If every owner was away, only the last to leave is complete;
until it returns, the slot has no primary and no read set.
Law: before a write is acknowledged, the primary rechecks the map, so every later read set has the write.
Invariant: a slot has one primary per map, which is in its read set and its write set.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.cluster.cluster_map import read_and_write_copies
from meshwire.cluster.placement import compute_placement, group_equal_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import ClusterMap, Node


_SERVING = ("up", "draining", "joining", "returning")


def batch_nodes(cluster: ClusterMap) -> tuple[Node, ...]:
    """Return the nodes that build batches: those with the role `compute`, else those that store, else all."""
    there = [node for node in cluster.nodes if node.state in _SERVING]
    compute = tuple(node for node in there if "compute" in node.roles)
    return compute or tuple(node for node in there if node.stores) or tuple(there)


def rendezvous_order(nodes: tuple[Node, ...], address: str) -> tuple[Node, ...]:
    """Return the nodes in the order in which to ask them for the data at an address (rendezvous hashing)."""
    return tuple(sorted(nodes, key=lambda node: _rank(node.node_id, address), reverse=True))


def frame_address(plan: str, epoch: int, step: int, rank: int, world: int, batch: int, origin: int) -> str:
    """Format the address of a frame as the text that rendezvous hashing uses."""
    return f"{plan}/{epoch}/{step}/{rank}-of-{world}/{batch}+{origin}"


def _rank(node_id: str, address: str) -> bytes:
    return hashlib.blake2b(f"{node_id}\0{address}".encode(), digest_size=8, person=b"mesh-meet").digest()


COMPLETE_STATES: Final = ("up", "draining")
"""States of nodes that have all data of their current share."""
_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Route:
    """The owners of a slot by role. `primary`: None while the slot has no complete owner. `read_set` in
    order of preference, the primary first. `write_set`: all reachable current and target owners."""

    primary: Node | None
    read_set: tuple[Node, ...]
    write_set: tuple[Node, ...]


def slot_of(bucket: str, key: str, slots: int) -> int:
    """Return the slot of a key, 0…slots−1."""
    digest = hashlib.blake2b(f"{bucket}\0{key}".encode(), digest_size=8, person=b"mesh-name").digest()
    return int.from_bytes(digest, "big") & (slots - 1)


class Routes:
    """The routes of one map and one number of copies; obtained from `routes`."""

    def __init__(self, cluster: ClusterMap, copies: int) -> None:
        self.version, self.slots = cluster.version, cluster.slots
        relied, given = read_and_write_copies(copies)
        self._decided: dict[tuple[str, bool], npt.NDArray[np.bool_]] = {}
        self._present, self._future = (
            compute_placement(cluster, relied, "present"),
            compute_placement(cluster, given),
        )
        self._given = compute_placement(cluster, given, "present")
        self._found: dict[int, Route] = {}
        tables = (self._present.table, self._given.table, self._future.table)
        self._rows = np.hstack(tables)
        self._made: dict[bytes, Route] = {}
        self._groups: list[tuple[Route, npt.NDArray[np.intp]]] | None = None
        self.nodes = self._present.nodes
        states = [node.state in COMPLETE_STATES for node in self.nodes]
        self._complete = np.array([*states, False])  # the last stands for −1, no owner

    def __repr__(self) -> str:
        return f"<Routes of map {self.version}, {self._present.table.shape[1]} copies>"

    def route_of_slot(self, slot: int) -> Route:
        """Return the route of a slot."""
        found = self._found.get(slot)
        if found is None:
            row = self._rows[slot].tobytes()  # slots with the same owners have the same route
            found = self._made.get(row)
            if found is None:
                found = self._made[row] = self._make(slot)
            self._found[slot] = found
        return found

    def route_of_key(self, bucket: str, key: str) -> Route:
        """Return the route of a key."""
        return self.route_of_slot(slot_of(bucket, key, self.slots))

    def slots_by_route(self, node_id: str | None = None) -> list[tuple[Route, npt.NDArray[np.intp]]]:
        """Return the route of each combination of owners, with its slots in ascending order; `node_id`: of
        those to which a node belongs."""
        if node_id is not None:
            return self._group_slots(np.flatnonzero(self._slots_with(node_id)))
        if self._groups is None:
            self._groups = self._group_slots(np.arange(self.slots))
        return self._groups

    def _group_slots(self, slots: npt.NDArray[np.intp]) -> list[tuple[Route, npt.NDArray[np.intp]]]:
        if not slots.size:
            return []
        groups = [slots[rows] for rows in group_equal_rows(self._rows[slots])]
        return [(self.route_of_slot(int(each[0])), each) for each in groups]

    def _slots_with(self, node_id: str) -> npt.NDArray[np.bool_]:
        """bool[slots]: the slots of which a node is an owner, now or in future."""
        found = np.zeros(self.slots, np.bool_)
        for placement in (self._present, self._given, self._future):
            found |= (placement.table == placement.place_of(node_id)).any(axis=1)
        return found

    @cached_property
    def primary_counts(self) -> Mapping[str, int]:
        """The number of slots of each primary by its id; slots without one are in none."""
        places = self.primary_places
        found = np.bincount(places[places >= 0], minlength=len(self.nodes))
        return {self.nodes[place].node_id: int(found[place]) for place in np.flatnonzero(found)}

    @cached_property
    def primary_places(self) -> npt.NDArray[np.int32]:
        """int32[slots]: the place of each slot's primary in `nodes`; −1: none."""
        table, complete = self._present.table, self._complete
        found = np.full(self.slots, -1, np.int32)
        for column in reversed(table.T):
            np.copyto(found, column, where=complete[column])
        numbers = {node.node_id: place for place, node in enumerate(self.nodes)}
        for slot in np.flatnonzero(found < 0).tolist():
            primary = self.route_of_slot(slot).primary
            if primary is not None:
                found[slot] = numbers[primary.node_id]
        return found

    def primary_slots(self, node_id: str) -> npt.NDArray[np.bool_]:
        """bool[slots]: the slots of which a node is the primary."""
        return self.reader_slots(node_id, first_only=True)

    def reader_slots(self, node_id: str, *, first_only: bool = False) -> npt.NDArray[np.bool_]:
        """bool[slots]: the slots in whose read set a node is; `first_only`: at its head, as the primary."""
        found = self._decided.get((node_id, first_only))
        if found is None:
            place, table = self._present.place_of(node_id), self._present.table
            if place < 0:
                found = np.zeros(self.slots, np.bool_)
            elif first_only or not self._complete[place]:  # incomplete: it is read only where it is the last
                found = self.primary_places == place
            else:
                found = (table == place).any(axis=1)
            found.flags.writeable = False
            self._decided[node_id, first_only] = found
        return found

    def given_up_owners(self, slot: int) -> tuple[Node, ...] | None:
        """Return the owners of a slot that were given up and have joined again, if all its owners were given
        up: nobody else has its data, and nobody is expected to bring it. Otherwise None."""
        owners = self._present.owners_of_slot(slot)
        if any(node.state not in ("down", "joining") for node in owners):
            return None
        return tuple(node for node in owners if node.state == "joining")

    def _make(self, slot: int) -> Route:
        present, future = self._present.owners_of_slot(slot), self._future.owners_of_slot(slot)
        readers = _readers(present)
        given = self._given.owners_of_slot(slot)
        involved = {node.node_id: node for node in (*readers, *present, *given, *future)}
        writers = tuple(node for node in involved.values() if node.state not in ("away", "down"))
        return Route(readers[0] if readers else None, readers, writers)


def _readers(owners: tuple[Node, ...]) -> tuple[Node, ...]:
    sound = tuple(node for node in owners if node.state in COMPLETE_STATES)
    if sound:
        return sound
    had = [node for node in owners if node.state in ("away", "returning")]
    last = max(had, key=lambda node: node.since, default=None)
    return (last,) if last is not None and last.state == "returning" else ()


@lru_cache(maxsize=_KEPT)
def routes(cluster: ClusterMap, copies: int) -> Routes:
    """Return the routes of a map for names with this many copies (1…8), or for `BucketCopies.copies`."""
    return Routes(cluster, copies)
