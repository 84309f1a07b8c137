"""Replica counts by map: how many copies of each slot exist, for alerts and `mesh cluster status`.

Law: pure. Counts slots, not objects; a node counts as holding a slot when the map relies on it for that
slot.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from meshwire.cluster import compute_placement, routes
from meshwire.cluster.cluster_map import read_and_write_copies
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.cluster import ClusterMap

_CACHE_SIZE: Final = 8


class ReplicaShortfall(NamedTuple):
    """Slots of which fewer copies are there than are to be kept, and slots of which none is."""

    short: int
    lost: int


@lru_cache(maxsize=_CACHE_SIZE)
def replica_shortfall(cluster: ClusterMap, copies: int) -> ReplicaShortfall:
    """Of names of which so many copies are kept, where there are so many nodes that store; those that were
    given up count until they are removed from the map."""
    there, table = _present_copies(cluster, copies), routes(cluster, copies)
    lost = sum(not table.route_of_slot(int(slot)).read_set for slot in np.flatnonzero(there == 0))
    return ReplicaShortfall(
        int(under_replicated_slots(cluster, copies).sum()), lost if cluster.current_shares else 0
    )


def under_replicated_slots(cluster: ClusterMap, copies: int) -> npt.NDArray[np.bool_]:
    """bool[slots]: those of which fewer copies are there than that, or than there are nodes that store.
    `copies` as `routes` takes it; of one that changes this moment, what is relied on."""
    relied, _ = read_and_write_copies(copies)
    members = sum(node.stores for node in cluster.nodes)
    return _present_copies(cluster, relied) < min(relied, members)


def _present_copies(cluster: ClusterMap, copies: int) -> npt.NDArray[np.int64]:
    """How many of the owners of each slot are relied on."""
    present = compute_placement(cluster, copies, "present")
    sound = np.array(
        [node.state in COMPLETE_STATES for node in present.nodes] + [False]
    )  # the last is for −1
    return np.asarray(sound[present.table].sum(axis=1), np.int64)
