"""Locks that are free in a forked process.

Law: of the threads of a process a fork copies the one that forks; a lock that another one holds would stay
held in the child for ever.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable


class ForkSafeLock:
    """A lock, reentrant or not, that a forked child finds released."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _locks.add(self)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock, and return whether that succeeded."""
        return bool(self._lock.acquire(blocking))

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __repr__(self) -> str:
        return f"<ForkSafeLock {self._lock!r}>"


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _replace_locks() -> None:
    for lock in _locks:
        lock._lock = lock._make()


os.register_at_fork(after_in_child=_replace_locks)
