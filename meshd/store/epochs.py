"""Which version of the cluster map a write is decided by; the fence that keeps versions of maps in order.

Law: said once around the calls of a task (`decided_by`), carried along by every intent it submits. Invariant:
once a write that was decided by one version is committed, no process of the node commits one decided by an
earlier version: it raises StaleEpochError, and nothing of it is visible. Without an epoch nothing is fenced.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_epoch: Final[ContextVar[int]] = ContextVar("epoch", default=0)


def current_epoch() -> int:
    """The version that writes of this task are decided by; 0: none."""
    return _epoch.get()


@contextmanager
def decided_by(version: int) -> Iterator[None]:
    """Writes within it are decided by this version of the map."""
    token = _epoch.set(version)
    try:
        yield
    finally:
        _epoch.reset(token)
