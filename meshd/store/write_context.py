"""Write context: where a write comes from, and the fence under which it may be committed.

A write carries one from the endpoint that accepts it to the commit: every method of the store that
writes takes it as `context`. Invariants: after a commit under one map version, no process of the node
commits under an earlier version. No write gets a stamp later than its node's lease, even if the process
was suspended in between; such a write fails with StaleEpochError and leaves no trace. A write without an
epoch is not fenced, and a write that no client waits for is never abandoned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

NO_DEADLINE: Final = 1 << 100
"""A stamp above all others."""


@dataclass(frozen=True, slots=True)
class WriteContext:
    """What must hold for a write until it is committed. Immutable: a step that adds a condition passes a
    changed copy on."""

    accepted_by: str = ""
    """The node that accepted the request from its client; "" for a write of this node's own."""
    map_version: int = 0
    """The cluster map version that `accepted_by` used then."""
    forwarded: bool = False
    """Another node forwarded the write to this one, which commits it as primary or refuses it."""
    epoch: int = 0
    """The map version that the commit is bound to; 0 without a fence."""
    deadline: int = NO_DEADLINE
    """The commit's stamp must not exceed it: until then no other node acts as primary."""

    def under_fence(self, epoch: int, deadline: int = NO_DEADLINE) -> WriteContext:
        """Returns this context bound to map version `epoch`, for stamps up to `deadline`."""
        return replace(self, epoch=epoch, deadline=deadline)

    def is_past_deadline(self, stamp: int) -> bool:
        """Returns True if the write must not carry this stamp, because the node's lease ends before it."""
        return stamp > self.deadline


INTERNAL_WRITE: Final = WriteContext()
"""The context of a write that no client waits for, and that no fence binds."""
