"""Disk health monitor: probes disks, retires failed ones, quarantines their data and adopts replacements.

Law: one process per node probes (the coordinator) and publishes the result in the index for the others.
A retired disk stays retired and may return only empty, as a new disk. The index device is probed, too;
its failure is for the caller to handle. Invariant: a full disk, or a probe that fails because this
process lacks descriptors or memory, does not count as a disk failure.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.disks.layout import (
    DRAFTS,
    EXTENTS,
    LOST_DISKS_KEY,
    MOUNTED_DISKS_KEY,
    is_mounted,
    write_lost_disks,
)
from meshd.store.disks.replacement import (
    AddDisk,
    RetireDisk,
    can_replace_disk,
    extent_uses_on,
    is_disk_unused,
    quarantine_mutation_for,
)
from meshd.store.engine.file_scan import DirectFile
from meshd.store.errors import is_exhausted
from meshd.telemetry import metrics
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.index.index import Index
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
_FAILURES: Final = 3  # probes in a row
_AT_ONCE: Final = 256
_PROBE: Final = bytes(4096)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def probe_disk(root: Path, disk: int) -> None:
    """Writes, makes durable, reads back and removes (blocking). Raises OSError."""
    _probe(f"{root}/{EXTENTS}/{DRAFTS}/probe.{disk}.part", f"store.probe.{disk}")


def _probe(path: str, failpoint: str) -> None:
    try:
        failpoints.hit(failpoint)
        found = _written_and_read(path)
    except OSError as error:
        if is_exhausted(error):
            _log.warning("a disk could not be probed", extra={"path": path, "why": str(error)})
        elif error.errno not in _FULL:
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
        return b"".join(map(bytes, found.iter_chunks(0, len(_PROBE))))


class DiskState(msgspec.Struct, frozen=True):
    """A directory that was given with `--disk`. `why`: it is out of service; `size` in bytes and how `full`
    (in percent) its file system is, 0 where it does not say."""

    path: str
    serves: bool
    why: str = ""
    size: int = 0
    full: int = 0


def _room(root: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(root)
    except OSError:
        return 0, 0
    used = found.f_blocks - found.f_bfree
    return found.f_blocks * found.f_frsize, round(100 * used / max(1, used + found.f_bavail))


class DiskHealthMonitor:
    """See the module; one a process. `wanted`: the directories that are to be disks. `index_failed`: why the
    index's device is thought to have failed, "" while it is not."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
        wanted: Sequence[Path],
    ) -> None:
        self._index, self._disks, self._committer = index, disks, committer
        self._clock, self._run, self._wanted = clock, run, tuple(wanted)
        self._failures: dict[int, int] = {}
        self._index_failures = 0
        self.index_failed = ""
        self._cleared: set[int] = set()
        self._looking = asyncio.Lock()
        self._news = False
        disks.set_refresh(self.apply_published_changes)

    def __repr__(self) -> str:
        return f"<DiskWatch, out of service: {sorted(self._disks.lost)}>"

    def apply_published_changes(self) -> None:
        """Puts out of service here what another process found to fail, and in what it put in."""
        lost = self._index.get_meta(LOST_DISKS_KEY) or ()
        for disk in lost:
            self._disks.retire_disk(disk)
        for disk, path in (self._index.get_meta("disks") or {}).items():
            if disk not in lost:
                self._disks.add_disk(disk, Path(path))

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk in service."""
        return bool(self._disks.roots)

    def take_data_lost_flag(self) -> bool:
        """Whether bytes were found to be lost with a disk since this was last asked."""
        news, self._news = self._news, False
        return news

    def disk_states(self) -> list[DiskState]:
        """Of every directory that is to be a disk, and of the index's if its device has failed (blocking)."""
        serving = set(self._disks.roots.values())
        found = [
            DiskState(str(root), True, "", *_room(root))
            if root in serving
            else DiskState(str(root), False, self._why(root))
            for root in self._wanted
        ]
        return [*found, self.index_state()] if self.index_failed else found

    def _why(self, root: Path) -> str:
        try:
            if root in self._was_mounted() and not is_mounted(root):
                return "not mounted: mount an empty one"
            return "failed: empty it, or put an empty one in its place" if any(root.iterdir()) else "fails"
        except OSError as error:
            return f"failed ({error.strerror}): put an empty one in its place"

    def _was_mounted(self) -> set[Path]:
        paths = self._index.get_meta("disks") or {}
        return {Path(paths[disk]) for disk in self._index.get_meta(MOUNTED_DISKS_KEY) or () if disk in paths}

    def index_state(self) -> DiskState:
        """Of the directory of the index, which has failed."""
        return DiskState(str(self._index.path), False, f"has the index, and fails: {self.index_failed}")

    async def _look_at_index(self) -> None:
        try:
            await self._run(lambda: _probe(f"{self._index.path}/probe.part", "store.probe.index"))
        except OSError as error:
            self._index_failures += 1
            metrics.store_disk_errors.labels("failed").inc()
            why = {"disk": str(self._index.path), "why": str(error)}
            _log.warning("the index's device failed a probe", extra=why)
            if self._index_failures >= _FAILURES and not self.index_failed:
                _log.error("the index's device fails: what is written is refused", extra=why)
                self.index_failed = error.strerror or str(error)
        else:
            self._index_failures, self.index_failed = 0, ""

    async def probe_disks(self) -> bool:
        """Probes every disk, and the index's device; a disk that fails for the third time goes out, one that
        was emptied or taken away at once; an empty one in its place goes in. Whether one that has failed is
        in doubt: look again in a moment. Raises StoreError."""
        async with self._looking:
            return await self._look()

    async def _look(self) -> bool:
        await self._look_at_index()
        if self._index_failures:  # nothing could be said about disks: that is in the index
            return not self.index_failed
        self.apply_published_changes()
        for disk, root in list(self._disks.roots.items()):
            try:
                await self._run(lambda root=root, disk=disk: probe_disk(root, disk))
            except OSError as error:
                failures = self._failures[disk] = self._failures.get(disk, 0) + 1
                metrics.store_disk_errors.labels("failed").inc()
                _log.warning("a disk failed a probe", extra={"disk": str(root), "why": str(error)})
                if failures >= _FAILURES or not await self._run(
                    lambda disk=disk: self._disks.is_present(disk)
                ):
                    await self._retire_disk(disk, root, str(error))
            else:
                self._failures.pop(disk, None)
        await self._settle()
        return bool(self._failures)

    async def check_missing_disks(self) -> None:
        """As `look`, without a probe: cheap enough to be done again and again."""
        async with self._looking:
            roots = dict(self._disks.roots)
            gone = await self._run(lambda: [disk for disk in roots if not self._disks.is_present(disk)])
            for disk in gone:
                await self._retire_disk(disk, roots[disk], "it was emptied, or taken away")
            if gone or len(roots) < len(self._wanted):
                await self._settle()

    async def _settle(self) -> None:
        for disk in sorted(set(self._disks.lost) - self._cleared):
            await self._clear(disk)
            self._cleared.add(disk)
        for root in self._wanted:
            if root not in self._disks.roots.values() and await self._run(
                lambda root=root: can_replace_disk(root, mounted=root in self._was_mounted())
            ):
                await self._add_disk(root)
        serving = set(self._disks.roots.values())
        metrics.store_disks_lost.set(sum(root not in serving for root in self._wanted))

    async def _retire_disk(self, disk: int, root: Path, why: str) -> None:
        await self._committer.submit(RetireDisk(disk))
        self._disks.retire_disk(disk)
        self._failures.pop(disk, None)
        _log.error(
            "a disk is out of service: what it had comes from other nodes, if they have it; put an empty one "
            "in its place",
            extra={"disk": str(root), "why": why},
        )
        await self._run(lambda: write_lost_disks(self._disks))

    async def _add_disk(self, root: Path) -> None:
        number = await self._committer.submit(AddDisk(root))
        self._disks.add_disk(number, root)
        await self._run(lambda: write_lost_disks(self._disks))
        _log.warning("an empty disk took the place of one that was lost", extra={"disk": str(root)})

    async def _clear(self, disk: int) -> None:
        """All that lies on a lost disk goes into quarantine."""
        with self._index.read_transaction() as txn:
            if is_disk_unused(self._index, txn, disk):
                return
        self._news = True
        done = 0
        uses = await self._run(lambda: list(extent_uses_on(self._index, {disk})))
        for start in range(0, len(uses), _AT_ONCE):
            some, now = uses[start : start + _AT_ONCE], self._clock.now_ms()
            intents = [quarantine_mutation_for(use, extent, now) for use, extent in some]
            for intent in [self._committer.submit(intent) for intent in intents]:
                done += bool(await intent)
        metrics.quarantined.inc(done)
        if done:
            _log.error("the bytes of versions are lost with a disk", extra={"number": done})
