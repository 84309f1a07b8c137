"""Disks that fail: found by probes, taken out of service, and what was on them into quarantine.

Law: one process a node looks (the steward), and says what it found in the index, where the others see it. A
disk that is out stays out: it comes back empty, as a new one. Invariant: a full disk is no failing disk.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from meshd.kit import failpoints
from meshd.store.direct import DirectFile
from meshd.store.intents import Intent
from meshd.store.layout import DRAFTS, EXTENTS, write_lost
from meshd.store.quarantine import Confine, ConfinePart
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.kit.clock import Clock
    from meshd.store.committer import Committer
    from meshd.store.convicting import Convictor, Use
    from meshd.store.index import Index
    from meshd.store.layout import Disks
    from meshd.store.records import Extent
    from meshd.store.works import Work

_log = logging.getLogger(__name__)
LOST: Final = "disks_lost"
_FAILURES: Final = 3  # probes in a row
_AT_ONCE: Final = 256
_PROBE: Final = bytes(4096)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class TakeOut(Intent):
    """Says that a disk is out of service; whether it was not."""

    exclusive = True

    def __init__(self, disk: int) -> None:
        self.disk = disk

    def apply(self, work: Work, txn: Any) -> bool:
        known = work.index.get_meta(LOST, txn) or []
        if self.disk in known:
            return False
        work.index.put_meta(txn, LOST, [*known, self.disk])
        return True


def probe(root: Path, disk: int) -> None:
    """Writes, makes durable, reads back and removes (blocking). Raises OSError."""
    path = f"{root}/{EXTENTS}/{DRAFTS}/probe.{disk}.part"
    try:
        failpoints.hit(f"store.probe.{disk}")
        found = _written_and_read(path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
    else:
        if found != _PROBE:
            raise OSError(errno.EIO, "what was written is not what is read")
    with suppress(FileNotFoundError):
        os.unlink(path)


def _written_and_read(path: str) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, _PROBE, 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    with DirectFile(path) as found:
        return b"".join(map(bytes, found.pieces(0, len(_PROBE))))


class DiskWatch:
    """See the module; one a process."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        convictor: Convictor,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._index, self._disks, self._committer, self._convictor = index, disks, committer, convictor
        self._clock, self._run = clock, run
        self._failures: dict[int, int] = {}
        self._cleared: set[int] = set()

    def __repr__(self) -> str:
        return f"<DiskWatch, out of service: {sorted(self._disks.lost)}>"

    def heed(self) -> None:
        """Puts out of service here what another process found to fail."""
        for disk in self._index.get_meta(LOST) or ():
            self._disks.take_out(disk)

    @property
    def any(self) -> bool:
        """Whether there is a disk in service."""
        return bool(self._disks.roots)

    async def look(self) -> bool:
        """Probes every disk; one that fails for the third time goes out. Whether one that has failed is in
        doubt: look again in a moment. Raises StoreError."""
        self.heed()
        for disk, root in list(self._disks.roots.items()):
            try:
                await self._run(lambda root=root, disk=disk: probe(root, disk))
            except OSError as error:
                failures = self._failures[disk] = self._failures.get(disk, 0) + 1
                metrics.store_disk_errors.labels("failed").inc()
                _log.warning("a disk failed a probe", extra={"disk": str(root), "why": str(error)})
                if failures >= _FAILURES:
                    await self._take_out(disk, root, error)
            else:
                self._failures.pop(disk, None)
        for disk in set(self._disks.lost) - self._cleared:
            await self._clear(disk)
            self._cleared.add(disk)
        metrics.store_disks_lost.set(len(self._disks.lost))
        return bool(self._failures)

    async def _take_out(self, disk: int, root: Path, error: OSError) -> None:
        await self._committer.submit(TakeOut(disk))
        self._disks.take_out(disk)
        self._failures.pop(disk, None)
        _log.error(
            "a disk fails and is out of service: what it had comes from other nodes, if they have it; "
            "replace it, and start the node again",
            extra={"disk": str(root), "why": str(error)},
        )
        await self._run(lambda: write_lost(self._disks))

    async def _clear(self, disk: int) -> None:
        """All that lies on a lost disk goes into quarantine."""
        done = 0
        uses = await self._run(lambda: list(self._convictor.on_disk(disk)))
        for start in range(0, len(uses), _AT_ONCE):
            intents = [self._confine(use, extent) for use, extent in uses[start : start + _AT_ONCE]]
            for intent in [self._committer.submit(intent) for intent in intents]:
                done += bool(await intent)
        metrics.quarantined.inc(done)
        if done:
            _log.error("the bytes of versions are lost with a disk", extra={"number": done})

    def _confine(self, use: Use, extent: Extent) -> Intent:
        if use.part:
            return ConfinePart(use.upload, use.part, [extent])
        return Confine(use.name, use.stamp, [extent], self._clock.now_ms(), "its disk has failed")
