"""Repairs: what nodes copy from each other after the map has changed, and how long that takes.

Law: a copy of a slot is made from an owner that has it and answers; of several, slots take turns, as in
`SyncPlan.first_peers` of the nodes. No node receives or sends faster than the rate of repairs, and no rack
faster than its uplink.
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
    """What was copied, and why. seconds: until the last node has all that it should; slots: copies of slots;
    senders, receivers, racks: nodes that send, nodes that receive, and the racks of these; most: slots of the
    node that receives the most. short_bytes, short_seconds: how much had fewer copies than it should, and for
    how long at most; 0 if nothing had."""

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
    """Copies of slots that are to be made, as int64[n]: of each, the node that receives it and the one that
    sends it. `nodes`: of the mesh."""

    receivers: Integers
    senders: Integers
    nodes: int

    def received(self) -> Integers:
        """Return int64[nodes]: slots that each node receives."""
        return np.bincount(self.receivers, minlength=self.nodes)

    def sent(self) -> Integers:
        """Return int64[nodes]: slots that each node sends."""
        return np.bincount(self.senders, minlength=self.nodes)

    def seconds(self, mesh: Mesh, slot_bytes: float) -> Floats:
        """Return float64[nodes]: when each node has all that it receives, 0 if it receives nothing. It waits
        for the slowest of itself, its senders, and the uplinks between them."""
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
    """Plan the copies of a change of the owners, int64[slots, copies], −1 for none. gone: bool[nodes + 1],
    the nodes that do not answer, and True for nobody. What no node has any more is not copied."""
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
