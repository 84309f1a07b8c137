"""How many copies there are of what a mesh holds, by its map alone: for alerts and `mesh cluster status`.

Law: pure. Counted in slots, for what lies in a slot is an object of some bucket or none; a node counts as
having a slot when it is relied on for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from meshwire.cluster import place, routes
from meshwire.cluster.routes import SOUND

if TYPE_CHECKING:
    from meshwire.cluster import ClusterMap

_KEPT: Final = 8


class Redundancy(NamedTuple):
    """Slots of which fewer copies are there than are to be kept, and slots of which none is."""

    short: int
    lost: int


@lru_cache(maxsize=_KEPT)
def redundancy(cluster: ClusterMap, copies: int) -> Redundancy:
    """Of names of which so many copies are kept, where there are so many nodes that store; those that were
    given up count until they are removed from the map."""
    members = sum(node.stores for node in cluster.nodes)
    if not members:
        return Redundancy(0, 0)
    present = place(cluster, copies, "present")
    sound = np.array([node.state in SOUND for node in present.nodes] + [False])  # the last is for −1
    there = sound[present.table].sum(axis=1)
    table = routes(cluster, copies)
    lost = sum(not table.of_slot(int(slot)).readers for slot in np.flatnonzero(there == 0))
    return Redundancy(int((there < min(copies, members)).sum()), lost)
