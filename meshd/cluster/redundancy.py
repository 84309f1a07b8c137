"""How many copies there are of what a mesh holds, by its map alone: for alerts and `mesh cluster status`.

Law: pure. Counted in slots, for what lies in a slot is an object of some bucket or none; a node counts as
having a slot when it is relied on for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from meshwire.cluster import place, routes
from meshwire.cluster.maps import relied_and_given
from meshwire.cluster.routes import SOUND

if TYPE_CHECKING:
    import numpy.typing as npt

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
    there, table = _there(cluster, copies), routes(cluster, copies)
    lost = sum(not table.of_slot(int(slot)).readers for slot in np.flatnonzero(there == 0))
    return Redundancy(int(short_slots(cluster, copies).sum()), lost if cluster.present else 0)


def short_slots(cluster: ClusterMap, copies: int) -> npt.NDArray[np.bool_]:
    """bool[slots]: those of which fewer copies are there than that, or than there are nodes that store.
    `copies` as `routes` takes it; of one that changes this moment, what is relied on."""
    relied, _ = relied_and_given(copies)
    members = sum(node.stores for node in cluster.nodes)
    return _there(cluster, relied) < min(relied, members)


def _there(cluster: ClusterMap, copies: int) -> npt.NDArray[np.int64]:
    """How many of the owners of each slot are relied on."""
    present = place(cluster, copies, "present")
    sound = np.array([node.state in SOUND for node in present.nodes] + [False])  # the last is for −1
    return np.asarray(sound[present.table].sum(axis=1), np.int64)
