"""Placement: the owners of every slot, a pure function of the map, by weighted rendezvous hashing.

Law: a key hashes to a slot (`routes.slot_of`), a slot to nodes that cost little for it (`preferences`); a
changed weight moves slots only to or from that node. Copies go to different zones where possible
(`assignment`).
Invariant: in each rank no node owns more than 1.1 times its share of slots, if zones and weights allow.
Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from meshwire.cluster.assignment import assign_slots
from meshwire.cluster.cluster_map import MAX_COPIES
from meshwire.cluster.preferences import preference_lists, updated_lists

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import ClusterMap, Node, Share
    from meshwire.cluster.preferences import PreferenceLists


LISTS: Final = 1 << 14
"""Slots with preferences of their own. Slot s beyond them has those of s modulo this number, so the parts
into which a slot is split prefer the same nodes, and few of them move."""
_KEPT_LISTS: Final = 2
OwnershipView = Literal["future", "present"]
"""`future`: the owners after all pending joins and drains. `present`: the owners that currently have the
data."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Owners by slot. `table`: int16[slots, copies], indices into `nodes` of each slot's owners in order;
    −1 where there are fewer nodes than copies."""

    nodes: tuple[Node, ...]
    table: npt.NDArray[np.int16]

    def __repr__(self) -> str:
        return (
            f"Placement(nodes={len(self.nodes)}, slots={self.table.shape[0]}, copies={self.table.shape[1]})"
        )

    def place_of(self, node_id: str) -> int:
        """Return the index of a node; −2 if it is not among them."""
        return next((place for place, node in enumerate(self.nodes) if node.node_id == node_id), -2)

    def owners_of_slot(self, slot: int) -> tuple[Node, ...]:
        """Return the owners of a slot, the primary first."""
        return tuple(self.nodes[place] for place in self.table[slot].tolist() if place >= 0)

    def slots_by_owners(self) -> Iterator[tuple[tuple[Node, ...], npt.NDArray[np.intp]]]:
        """Yield each distinct tuple of owners, with its slots in ascending order."""
        for slots in group_equal_rows(self.table):
            yield self.owners_of_slot(int(slots[0])), slots

    def slots_per_node(self) -> dict[str, int]:
        """Number of slots by node id, over all ranks."""
        places, numbers = np.unique(self.table[self.table >= 0], return_counts=True)
        found = {self.nodes[place].node_id: int(n) for place, n in zip(places, numbers, strict=True)}
        return {node.node_id: found.get(node.node_id, 0) for node in self.nodes}


def group_equal_rows(table: npt.NDArray[np.int16]) -> list[npt.NDArray[np.intp]]:
    """Return the indices of equal rows of a table of at least one column, each group in ascending order."""
    whole = np.ascontiguousarray(table).view(f"V{table[0].nbytes}").ravel()
    _, which, sizes = np.unique(whole, return_inverse=True, return_counts=True)
    return np.split(np.argsort(which, kind="stable"), np.cumsum(sizes)[:-1])


@lru_cache(maxsize=16)
def compute_placement(cluster: ClusterMap, copies: int, tense: OwnershipView = "future") -> Placement:
    """Compute the owners of every slot, with `copies` (1…8) each."""
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f"{copies} copies; the number must be 1 to {MAX_COPIES}")
    future = tense == "future"
    shares = cluster.target_shares if future else cluster.current_shares
    members = {node.node_id: node for node in cluster.nodes}
    nodes = tuple(members[share.node_id] for share in shares)
    slots = cluster.slots if future else cluster.current_slots
    table = _table(shares, slots, copies)
    if slots < cluster.slots:  # a split is going on: slot s is a part of s modulo the former number
        table = np.tile(table, (cluster.slots // slots, 1))
        table.flags.writeable = False
    return Placement(nodes, table)


@lru_cache(maxsize=16)
def _table(shares: tuple[Share, ...], slots: int, copies: int) -> npt.NDArray[np.int16]:
    """Depends on the shares only, so a node that goes away and comes back hits the cache."""
    table = np.full((slots, copies), -1, dtype=np.int16)
    if shares:
        assign_slots(shares, _lists(shares, min(slots, LISTS)), table)
    table.flags.writeable = False
    return table


_recent: tuple[PreferenceLists, ...] = ()


def _lists(shares: tuple[Share, ...], count: int) -> PreferenceLists:
    """Return preference lists; of a large mesh, made from those of nodes that are mostly the same."""
    global _recent
    known = [lists for lists in _recent if lists.slots == count]
    found = next((lists for lists in known if lists.nodes == shares), None)
    if found is None:
        updates = (updated_lists(lists, shares) for lists in known)
        found = next((lists for lists in updates if lists is not None), None)
    found = found or preference_lists(shares, count)
    if found.horizon is not None:
        _recent = (found, *[lists for lists in _recent if lists is not found])[:_KEPT_LISTS]
    return found
