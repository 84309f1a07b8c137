"""A large object's file: a tar of one member, its header room left free until the commit.

Law: blocking; called from the store's I/O threads, one call at a time. Until `publish` the file is a draft
that the next start of its writer sweeps away.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from awscrt import checksums

from meshd.kit import failpoints
from meshd.store import syscalls
from meshd.store.layout import sync_directory
from meshd.store.members import RESERVE
from meshd.telemetry import metrics
from meshwire import tars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.interface import Buffer
    from meshd.store.layout import Disks

_log = logging.getLogger(__name__)
_WINDOW = 8 << 20  # dirty bytes a draft may gather before the kernel is asked to write them out


class OwnFile:
    """A draft; `size` bytes of data so far, `crc` their crc32c. `eager`: the kernel is asked early to write
    them out; else when the file is finished, so that one that is not kept costs the disk nothing."""

    def __init__(self, disks: Disks, disk: int, file: int, writer: str) -> None:
        self.disk, self.file = disk, file
        self._directory = disks.directory(disk, file)
        self._draft = disks.draft(disk, file, writer)
        self.path = disks.path(disk, file)
        self._fd = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = self.crc = 0
        self._asked = 0
        self._published = False
        self.eager = True

    def __repr__(self) -> str:
        return f"<OwnFile {self.path if self._published else self._draft} size={self.size}>"

    def reserve(self, size: int) -> None:
        """Takes the room for `size` bytes of data now. Raises OSError when there is none."""
        syscalls.preallocate(self._fd, RESERVE + size + tars.padding(size) + len(tars.END))

    def append(self, chunks: Sequence[Buffer]) -> None:
        """Writes the next bytes and keeps the dirty pages of this file few."""
        for chunk in chunks:
            self.crc = checksums.crc32c(chunk, self.crc)
        failpoints.hit("store.own.before_write")
        self.size += syscalls.write_all(self._fd, chunks, RESERVE + self.size)
        window = self.size - self._asked
        if self.eager and window >= _WINDOW:
            syscalls.start_writeback(self._fd, RESERVE + self._asked, window)
            if self._asked >= _WINDOW:
                syscalls.finish_writeback(self._fd, RESERVE + self._asked - _WINDOW, _WINDOW)
            self._asked = self.size

    def finish(self) -> None:
        """Ends the tar."""
        if not self.eager:
            syscalls.start_writeback(self._fd, RESERVE, self.size)
        syscalls.write_all(self._fd, [bytes(tars.padding(self.size)) + tars.END], RESERVE + self.size)

    def share(self) -> tuple[int, int]:
        """A descriptor of its own for whoever reads the file as it grows, and where the data begin."""
        return os.dup(self._fd), RESERVE

    def sync(self) -> None:
        """The data are durable when this returns."""
        failpoints.hit("store.own.before_sync")
        os.fdatasync(self._fd)

    def publish(self, header: bytes, durable: bool) -> None:
        """Fills in the header and gives the file its name; durable when this returns."""
        os.pwrite(self._fd, header, 0)
        if durable:
            os.fdatasync(self._fd)
        failpoints.hit("store.own.before_rename")
        os.rename(self._draft, self.path)
        self._published = True
        if durable:
            sync_directory(self._directory)
        failpoints.hit("store.own.after_rename")

    def withdraw(self) -> None:
        """Takes the name back before the index knows the file: it is a draft again. Raises OSError."""
        os.rename(self.path, self._draft)
        self._published = False

    def patch(self, offset: int, data: bytes) -> None:
        """Changes header bytes before the index knows the file."""
        os.pwrite(self._fd, data, offset)
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes a published file; an error of that is told, and no reason to fail: a file that is to be
        durable was synced before. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)  # the descriptor is gone, whatever it answers
            failpoints.hit("store.own.after_close")
        except OSError as error:
            metrics.store_disk_errors.labels("failed").inc()
            _log.warning("a data file was not closed well", extra={"path": self.path, "why": str(error)})

    def discard_draft(self) -> None:
        """Removes what was never published. Idempotent."""
        if not self._published:
            self.discard()

    def discard(self) -> None:
        """Removes the file, whatever its state. Idempotent."""
        if self._fd < 0:
            return
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path if self._published else self._draft)
