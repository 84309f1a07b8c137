"""Which version of the cluster map a write is decided by, and until when; the fence that keeps them in order.

Law: said once around the calls of a task (`decided_by`), carried along by every intent it submits.
Invariants: once a write that was decided by one version is committed, no process of the node commits one
decided by an earlier version; and none gets a stamp of a time at which its node was not sure any more that it
decides, though its process stands still in between. It raises StaleEpochError, and nothing of it is visible.
Without an epoch nothing is fenced.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

EVER: Final = 1 << 100
"""A stamp above all others."""
_epoch: Final[ContextVar[int]] = ContextVar("epoch", default=0)
_latest: Final[ContextVar[int]] = ContextVar("latest", default=EVER)


def current_epoch() -> int:
    """The version that writes of this task are decided by; 0: none."""
    return _epoch.get()


def late(stamp: int) -> bool:
    """Whether a write of this task may not be of the time that the stamp says."""
    return stamp > _latest.get()


@contextmanager
def decided_by(version: int, latest: int = EVER) -> Iterator[None]:
    """Writes within it are decided by this version of the map, and of a time before the stamp `latest`: until
    then nobody else decides."""
    epoch, until = _epoch.set(version), _latest.set(latest)
    try:
        yield
    finally:
        _latest.reset(until)
        _epoch.reset(epoch)
