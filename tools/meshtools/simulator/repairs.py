"""Repairs: the slots that nodes copy from each other after a change of the map, and how long that takes.

Law: a slot is copied from an owner that has it and answers. If there are several, the slots use them in turn,
as in `SyncPlan.first_peers` of the nodes. No node receives or sends faster than the rate of repairs, and no
rack faster than its uplink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshtools.simulator.scenario import Mesh

    Integers = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Repair:
    """The copies made after one change of the map.

    Attributes:
        why: the change.
        bytes: bytes copied.
        seconds: time until every node has its data.
        slots: copies of slots.
        senders: number of nodes that send.
        receivers: number of nodes that receive.
        racks: number of racks with such a receiver.
        most: slots of the node that receives most.
        short_bytes: bytes that had fewer copies than they should; 0 if there were none.
        short_seconds: the longest time for which any had.
    """

    why: str
    bytes: float
    seconds: float
    slots: int = 0
    senders: int = 0
    receivers: int = 0
    racks: int = 0
    most: int = 0
    short_bytes: float = 0.0
    short_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Copies of slots to be made. For each, `receivers` and `senders` (int64[n]) have the numbers of the two
    nodes. `nodes`: the number of nodes of the mesh."""

    receivers: Integers
    senders: Integers
    nodes: int

    def received(self) -> Integers:
        """Return int64[nodes]: the number of slots that each node receives."""
        return np.bincount(self.receivers, minlength=self.nodes)

    def sent(self) -> Integers:
        """Return int64[nodes]: the number of slots that each node sends."""
        return np.bincount(self.senders, minlength=self.nodes)

    def seconds(self, mesh: Mesh, slot_bytes: float) -> Floats:
        """Return float64[nodes]: the time until each node has received everything, 0 if it receives nothing.
        That is determined by the slowest of itself, its senders, and the uplinks between them."""
        times = np.zeros(self.nodes)
        of_node = np.maximum(self.received()[self.receivers], self.sent()[self.senders])
        took = of_node * slot_bytes / mesh.repair_bytes_per_second
        if mesh.rack_oversubscription > 1:
            to, of = self.receivers // mesh.nodes_per_rack, self.senders // mesh.nodes_per_rack
            crossing = to != of
            racks = -(-self.nodes // mesh.nodes_per_rack)
            down, up = (np.bincount(each[crossing], minlength=racks) for each in (to, of))
            uplink = mesh.nodes_per_rack * mesh.nic_bytes_per_second / mesh.rack_oversubscription
            took = np.maximum(took, np.maximum(down[to], up[of]) * crossing * slot_bytes / uplink)
        np.maximum.at(times, self.receivers, took)
        return times


def plan_copies(before: Integers, after: Integers, gone: npt.NDArray[np.bool_]) -> CopyPlan:
    """Plan the copies after a change of the owners. `before`, `after`: the owners of each slot, int64[slots,
    copies], −1 for none. `gone`: bool[nodes + 1], the nodes that do not answer; the last entry, for −1, is
    True. Slots without an owner that answers are not copied."""
    nodes = gone.size - 1
    there = ~gone[before]
    answering = there.sum(axis=1)
    turn = np.arange(before.shape[0]) % np.maximum(1, answering)
    chosen = (there & (np.cumsum(there, axis=1) - 1 == turn[:, None])).argmax(axis=1)
    senders = before[np.arange(before.shape[0]), chosen]
    fresh = ~(after[:, :, None] == before[:, None, :]).any(axis=2) & (after >= 0) & (answering > 0)[:, None]
    slots, ranks = np.nonzero(fresh)
    return CopyPlan(after[slots, ranks], senders[slots], nodes)


def describe(why: str, plan: CopyPlan, mesh: Mesh, slot_bytes: float, seconds: float) -> Repair:
    """Return the report of the copies."""
    received, sent = plan.received(), plan.sent()
    return Repair(
        why,
        plan.receivers.size * slot_bytes,
        seconds,
        int(plan.receivers.size),
        int((sent > 0).sum()),
        int((received > 0).sum()),
        int(np.unique(np.flatnonzero(received) // mesh.nodes_per_rack).size),
        int(received.max(initial=0)),
    )
