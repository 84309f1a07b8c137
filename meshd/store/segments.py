"""The open segments of one writer: small members appended whole, group by group.

Law: one thread of one process appends to a segment. Bytes count only once their end is committed in the
index: a group that fails, or a crash, leaves a tail that is cut off.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.kit import failpoints
from meshd.store import syscalls
from meshd.store.layout import sync_directory
from meshwire import tars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.interface import Buffer
    from meshd.store.layout import Disks


class Segment:
    """An open data file: `end` is committed, `tail` is where the next member goes."""

    def __init__(self, disks: Disks, disk: int, file: int, end: int | None = None) -> None:
        """Makes a new file, or goes on with one at its committed `end`. Raises OSError."""
        self.disk, self.file = disk, file
        self._directory = disks.directory(disk, file)
        self.path = disks.path(disk, file)
        create = os.O_CREAT | os.O_EXCL if end is None else 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | create, 0o644)
        self.end = self.tail = end or 0
        self._pending: list[Buffer] = []
        self._named = end is not None
        if end is not None:
            os.ftruncate(self._fd, end)

    def __repr__(self) -> str:
        return f"<Segment {self.path} end={self.end} tail={self.tail}>"

    def append(self, header: bytes, chunks: Sequence[Buffer], size: int) -> int:
        """Lays a member out behind the others; returns where its data will begin. No I/O yet."""
        data = self.tail + len(header)
        self._pending.append(header)
        self._pending.extend(chunks)
        fill = tars.padding(size)
        if fill:
            self._pending.append(bytes(fill))
        self.tail = data + size + fill
        return data

    def patch(self, offset: int, data: bytes) -> None:
        """Changes bytes of a member that is written but not committed."""
        os.pwrite(self._fd, data, offset)

    def write(self) -> None:
        """Writes the pending members. Raises OSError; then call `drop`."""
        if self._pending:
            failpoints.hit("store.data.before_write")
            start = self.tail - sum(map(len, self._pending))
            syscalls.write_all(self._fd, self._pending, start)
            self._pending = []
            failpoints.hit("store.data.after_write")

    def sync(self) -> None:
        """Makes what is written durable. Raises OSError; then call `drop`."""
        failpoints.hit("store.data.before_sync")
        os.fdatasync(self._fd)
        failpoints.hit("store.data.after_sync")
        if not self._named:
            sync_directory(self._directory)
            self._named = True

    def committed(self) -> None:
        """The index knows everything up to the tail."""
        self.end = self.tail

    def drop(self) -> None:
        """Forgets and cuts off what was not committed."""
        self._pending = []
        self.tail = self.end
        os.ftruncate(self._fd, self.end)

    def seal(self, durable: bool) -> None:
        """Ends the tar and closes the file."""
        self.drop()
        os.pwrite(self._fd, tars.END, self.end)
        if durable:
            os.fdatasync(self._fd)
        self.close()

    def close(self) -> None:
        os.close(self._fd)
