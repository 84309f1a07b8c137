"""Which disk of a node takes what is new: the name's own, or the next of its order that has room.

Law: where bytes lie stands in their record, so nobody looks for them by name; and what frees room, or ends an
upload, may use the reserve that what grows must leave.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.store.layout import Disks

_KEEP_FREE: Final = 64 << 20  # bytes that puts leave for deletes, and for the index to grow
_KEEP_SHARE: Final = 20


def spare(path: str, reserves: int = 1) -> int:
    """Bytes that this file system takes before the store's reserve is touched, or the `reserves`-th part of
    it; negative when it is (blocking). Raises OSError."""
    stats = os.statvfs(path)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    return free - min(_KEEP_FREE, total // _KEEP_SHARE) // reserves


def has_room(path: str, wanted: int) -> bool:
    """True when `wanted` bytes fit on this file system and the store's reserve stays free."""
    return spare(path) > wanted


def index_has_room(path: str) -> bool:
    """The same for entries of the index: it shares a file system with a disk as a rule, and may go on when
    that disk takes no data any more."""
    return spare(path, reserves=2) > 0


class Rooms:
    """The room of a store's disks while one group of writes is laid out: measured once, then counted."""

    def __init__(self, disks: Disks) -> None:
        self._disks = disks
        self._spare: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Rooms {self._spare}>"

    @property
    def most(self) -> int:
        """Bytes that the emptiest disk takes (blocking). Raises OSError."""
        return max(map(self._of, tuple(self._disks.roots)), default=0)

    def place(self, bucket: str, key: str, size: int) -> int:
        """The disk for `size` bytes of a name; the emptiest where none has room (blocking). Raises OSError,
        DiskFailedError."""
        order = self._disks.order(bucket, key)
        if len(order) == 1:
            return order[0]
        found = next((disk for disk in order if self._of(disk) > size), None)
        disk = max(order, key=self._of) if found is None else found
        self._spare[disk] -= size
        if disk != order[0]:
            metrics.store_displaced.inc()
        return disk

    def _of(self, disk: int) -> int:
        if disk not in self._spare:
            root = self._disks.roots.get(disk)
            self._spare[disk] = -1 if root is None else spare(str(root))  # it went out of service meanwhile
        return self._spare[disk]
