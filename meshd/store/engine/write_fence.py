"""Write fence: the cluster map version and the lease deadline under which a task's writes are committed.

`epoch_scope` sets both for the calls of a task, and every mutation submitted inside it carries them.
Invariants: after a commit under one map version, no process of the node commits under an earlier
version. No write gets a stamp later than its node's lease, even if the process was suspended in
between; such a write fails with StaleEpochError and leaves no trace. A write without an epoch is not
fenced.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_DEADLINE: Final = 1 << 100
"""A stamp above all others."""
_epoch: Final[ContextVar[int]] = ContextVar("epoch", default=0)
_deadline: Final[ContextVar[int]] = ContextVar("latest", default=NO_DEADLINE)


def current_epoch() -> int:
    """Returns the map version that this task's writes are bound to; 0 without a fence."""
    return _epoch.get()


def is_past_deadline(stamp: int) -> bool:
    """Returns True if a write of this task must not carry this stamp, because the node's lease ends before
    it."""
    return stamp > _deadline.get()


@contextmanager
def epoch_scope(version: int, latest: int = NO_DEADLINE) -> Iterator[None]:
    """Binds the writes inside the block to map version `version`. Their stamps must not exceed `latest`:
    until then no other node acts as primary."""
    epoch, until = _epoch.set(version), _deadline.set(latest)
    try:
        yield
    finally:
        _deadline.reset(until)
        _epoch.reset(epoch)
