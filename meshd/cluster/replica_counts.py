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
    """Slots with fewer copies than required, and slots with none."""

    short: int
    lost: int


@lru_cache(maxsize=_CACHE_SIZE)
def replica_shortfall(cluster: ClusterMap, copies: int) -> ReplicaShortfall:
    """Counts slots for this replica count, if there are enough storing nodes. Nodes that were given up count
    as members until they are removed from the map."""
    present, table = _present_copies(cluster, copies), routes(cluster, copies)
    lost = sum(not table.route_of_slot(int(slot)).read_set for slot in np.flatnonzero(present == 0))
    return ReplicaShortfall(
        int(under_replicated_slots(cluster, copies).sum()), lost if cluster.current_shares else 0
    )


def under_replicated_slots(cluster: ClusterMap, copies: int) -> npt.NDArray[np.bool_]:
    """Returns bool[slots]: the slots with fewer copies than `copies`, or than there are storing nodes.
    `copies` has the form that `routes` takes; while it is being changed, only the copies that reads rely on
    count."""
    relied, _ = read_and_write_copies(copies)
    members = sum(node.stores for node in cluster.nodes)
    return _present_copies(cluster, relied) < min(relied, members)


def _present_copies(cluster: ClusterMap, copies: int) -> npt.NDArray[np.int64]:
    """Returns how many owners of each slot the map relies on."""
    present = compute_placement(cluster, copies, "present")
    # The last entry stands for −1, no owner.
    complete = np.array([node.state in COMPLETE_STATES for node in present.nodes] + [False])
    return np.asarray(complete[present.table].sum(axis=1), np.int64)
