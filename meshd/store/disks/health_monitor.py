"""Disk health monitor: probes disks, retires failed ones, quarantines their data and adopts replacements.

Law: one process per node probes (the coordinator) and publishes the result in the index for the others.
A retired disk stays retired and may return only empty, as a new disk. The index device is probed, too;
its failure is for the caller to handle. Invariant: a full disk, or a probe that fails because this
process lacks descriptors or memory, does not count as a disk failure. A disk that hangs is not retired: who
waits for it still holds its files, so the caller decides what the node does.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.disks.disk_probes import DiskProbes
from meshd.store.disks.layout import (
    DISK_FAILURES_KEY,
    DRAFTS,
    EXTENTS,
    LOST_DISKS_KEY,
    MOUNTED_DISKS_KEY,
    SET_BACK_KEY,
    has_free_space,
    index_has_free_space,
    is_mounted,
    is_on_disk,
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
from meshwire.http_values.dates import format_iso

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.index.index import Index
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
_FAILURES: Final = 3  # consecutive failed probes that retire a disk
_AT_ONCE: Final = 256
_PROBE: Final = bytes(4096)
_INDEX_FULL: Final = (
    "holds the index and is full: the node refuses writes; free space there (ShardmeshIndexFull)"
)
_INDEX_MAP_FULL: Final = (
    "the index has the size of index-map: the node refuses writes; set a higher one and restart the node, or "
    "delete objects (ShardmeshIndexFull)"
)
_EXCHANGED: Final = (
    "another disk was mounted in its place: the node has stopped; mount the right one, and start it again"
)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def probe_disk(root: Path, disk: int) -> None:
    """Writes a block, syncs it, reads it back and removes it (blocking). Raises OSError."""
    _probe(f"{root}/{EXTENTS}/{DRAFTS}/probe.{disk}.part", f"store.probe.{disk}")


def _probe(path: str, failpoint: str) -> None:
    try:
        failpoints.hit(failpoint)
        found = _write_and_read_back(path)
    except OSError as error:
        if is_exhausted(error):
            _log.warning(
                "cannot probe disk: this process is short of resources",
                extra={"path": path, "why": str(error)},
            )
        elif error.errno not in _FULL:
            raise
    else:
        if found != _PROBE:
            raise OSError(errno.EIO, "the block read back differs from the block written")
    with suppress(FileNotFoundError):
        os.unlink(path)


def _write_and_read_back(path: str) -> bytes:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, _PROBE, 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    with DirectFile(path) as found:
        return b"".join(map(bytes, found.iter_chunks(0, len(_PROBE))))


class DiskState(msgspec.Struct, frozen=True):
    """The state of a directory given with `--disk`. `why`: the reason it is out of service, or should be;
    `size` in bytes and `full` (used share in percent) of its file system, 0 if unknown; `refuses_writes`:
    whether only the reserve is left, so that no new data is placed there."""

    path: str
    serves: bool
    why: str = ""
    size: int = 0
    full: int = 0
    refuses_writes: bool = False


def _file_system_usage(root: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(root)
    except OSError:
        return 0, 0
    used = found.f_blocks - found.f_bfree
    return found.f_blocks * found.f_frsize, round(100 * used / max(1, used + found.f_bavail))


class DiskHealthMonitor:
    """Probes the disks of one process's store. `wanted`: the directories that should be disks.
    `index_failed`: why the index device is considered failed, "" while it works."""

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
        self._probes = DiskProbes(clock, run)
        self._failures: dict[int, int] = {}
        self._index_failures = 0
        self.index_failed = ""
        self._quarantined_disks: set[int] = set()
        self._lock = asyncio.Lock()
        self._applied = -1
        self._data_lost = self.is_set_back
        disks.set_refresh(self.apply_published_changes)

    def __repr__(self) -> str:
        return f"<DiskHealthMonitor, out of service: {sorted(self._disks.lost)}>"

    def apply_published_changes(self) -> None:
        """Retires the disks here that another process found to fail, and adds those that it adopted."""
        newest = self._index.last_transaction
        if newest == self._applied:
            return
        lost = self._index.get_meta(LOST_DISKS_KEY) or ()
        for disk in lost:
            self._disks.retire_disk(disk)
        for disk, path in (self._index.get_meta("disks") or {}).items():
            if disk not in lost:
                self._disks.add_disk(disk, Path(path))
        self._applied = newest

    @property
    def has_disk(self) -> bool:
        """Returns True if any disk is in service."""
        return bool(self._disks.roots)

    @property
    def all_serve(self) -> bool:
        """Returns True if every directory that should be a disk is in service, and the index device works."""
        return not self.index_failed and set(self._disks.roots.values()).issuperset(self._wanted)

    @property
    def index_is_usable(self) -> bool:
        """Returns True if this process can use the index; if not, another process may still."""
        return self._index.is_usable

    def take_data_lost_flag(self) -> bool:
        """Returns True if data was lost since the last call: with a disk, or before that because the index
        went back to a checkpoint. Each start returns the latter again until `forget_loss`."""
        data_lost, self._data_lost = self._data_lost, False
        return data_lost

    @property
    def is_set_back(self) -> bool:
        """Returns True while the index is back at a checkpoint, and not compared with other owners."""
        return bool(self._index.get_meta(SET_BACK_KEY))

    async def forget_loss(self) -> None:
        """Notes that this node has again what other owners have."""
        if self.is_set_back:
            await self._run(self._forget_set_back)

    def _forget_set_back(self) -> None:
        with self._index.write_transaction() as txn:
            self._index.put_meta(txn, SET_BACK_KEY, False)

    def disk_states(self) -> list[DiskState]:
        """Returns the state of every directory that should be a disk, and of the index device if it has
        failed, does not answer or is full (blocking)."""
        serving = set(self._disks.roots.values())
        found = [
            self._serving_state(root) if root in serving else DiskState(str(root), False, self._reason(root))
            for root in self._wanted
        ]
        if self.index_failed:
            return [*found, self.index_state()]
        path = self._index.path
        if silent := self._silence(path):
            found.append(DiskState(str(path), False, f"holds the index and {silent}"))
        elif self._index.map_free_space() <= 0:
            found.append(DiskState(str(path), True, _INDEX_MAP_FULL))
        elif self._is_index_full(path):
            found.append(DiskState(str(path), True, _INDEX_FULL, *_file_system_usage(path)))
        return found

    def _is_index_full(self, path: Path) -> bool:
        """Whether the index may not grow. Not if it is on one of the disks and all of them are full: these
        tell it themselves."""
        disks = self._disks.roots.values()
        with suppress(OSError):
            if not index_has_free_space(str(path)):
                return not is_on_disk(path, disks) or any(has_free_space(str(root), 0) for root in disks)
        return False

    def _serving_state(self, root: Path) -> DiskState:
        if silent := self._silence(root):
            return DiskState(str(root), True, silent)  # its file system may hang, too
        refuses = False
        with suppress(OSError):
            refuses = not has_free_space(str(root), 0)
        return DiskState(str(root), True, "", *_file_system_usage(root), refuses)

    def _silence(self, path: Path) -> str:
        since = self._probes.silent_since(path)
        return "" if since is None else f"has not answered since {format_iso(since)} (ShardmeshDiskHangs)"

    def silent_seconds(self) -> float:
        """Returns for how long the disk, or index device, that is silent longest has not answered; 0 if all
        do."""
        return self._probes.silent_seconds()

    def _reason(self, root: Path) -> str:
        why = self._failure_of(root)
        try:
            if root in self._mounted_before() and not is_mounted(root):
                return "not mounted: mount an empty file system there"
            if EXTENTS not in os.listdir(root):
                return f"{why or 'failed'}: put an empty disk that can be written in its place"
        except OSError as error:
            return f"{why or f'failed ({error.strerror})'}: put an empty disk in its place"
        # What else is there may be the node's index and identity.
        return f"{why or 'failed'}: remove {root / EXTENTS}, or put an empty disk in its place"

    def _failure_of(self, root: Path) -> str:
        """Why the disk that was last at this path is out of service; "" if an earlier release retired it."""
        paths, failures = self._index.get_meta("disks") or {}, self._index.get_meta(DISK_FAILURES_KEY) or {}
        numbers = [disk for disk, path in paths.items() if path == str(root)]
        return str(failures.get(max(numbers, default=-1), ""))

    def _mounted_before(self) -> set[Path]:
        paths = self._index.get_meta("disks") or {}
        return {Path(paths[disk]) for disk in self._index.get_meta(MOUNTED_DISKS_KEY) or () if disk in paths}

    def index_state(self) -> DiskState:
        """Returns the state of the index directory, whose device has failed."""
        return DiskState(str(self._index.path), False, f"holds the index and has failed: {self.index_failed}")

    async def _probe_index(self) -> None:
        path = self._index.path
        try:
            if not await self._probes.probe(path, lambda: _probe(f"{path}/probe.part", "store.probe.index")):
                return
        except OSError as error:
            self._index_failures += 1
            metrics.store_disk_errors.labels("failed").inc()
            why = {"disk": str(self._index.path), "why": str(error)}
            _log.warning("a probe of the index device failed", extra=why)
            if self._index_failures >= _FAILURES and not self.index_failed:
                _log.error("the index device has failed: the store refuses writes", extra=why)
                self.index_failed = error.strerror or str(error)
        else:
            self._index_failures, self.index_failed = 0, ""

    async def probe_disks(self) -> bool:
        """Probes every disk and the index device. Retires a disk after its third failed probe in a row, or at
        once if it was emptied or unmounted, and adopts an empty disk in its place. Does not wait for a disk
        that hangs.

        Returns True if a disk has failed a probe without being retired: probe again soon. Raises StoreError.
        """
        async with self._lock:
            return await self._probe_all()

    async def _probe_all(self) -> bool:
        await self._probe_index()
        if self._index_failures:  # disk states live in the index, so nothing can be recorded about disks now
            return not self.index_failed
        self.apply_published_changes()
        for disk, root in list(self._disks.roots.items()):
            try:
                if not await self._probes.probe(root, partial(probe_disk, root, disk)):
                    continue
            except OSError as error:
                if await self._run(lambda disk=disk: self._disks.is_exchanged(disk)):
                    continue  # it is another disk that fails
                failures = self._failures[disk] = self._failures.get(disk, 0) + 1
                metrics.store_disk_errors.labels("failed").inc()
                _log.warning("a disk probe failed", extra={"disk": str(root), "why": str(error)})
                if failures >= _FAILURES or not await self._run(
                    lambda disk=disk: self._disks.is_present(disk)
                ):
                    await self._retire_disk(disk, root, f"failed ({error.strerror or error})")
            else:
                self._failures.pop(disk, None)
        await self._apply_disk_changes()
        return bool(self._failures)

    def exchanged_disks(self) -> list[DiskState]:
        """Returns the disks in whose place there is another one, with all its files (blocking). They are not
        retired: which disk is where is found when the node starts."""
        found = [root for disk, root in self._disks.roots.items() if self._disks.is_exchanged(disk)]
        return [DiskState(str(root), False, _EXCHANGED) for root in found]

    def misses_disks(self) -> bool:
        """Returns True if a disk was emptied, unmounted or exchanged, or is not in service (blocking)."""
        roots = self._disks.roots
        return len(roots) < len(self._wanted) or not all(map(self._disks.is_present, roots))

    async def check_missing_disks(self) -> None:
        """Checks for missing disks like `probe_disks`, but without I/O probes."""
        async with self._lock:
            if await self._run(self.exchanged_disks):
                return
            roots = dict(self._disks.roots)
            gone = await self._run(lambda: [disk for disk in roots if not self._disks.is_present(disk)])
            for disk in gone:
                await self._retire_disk(disk, roots[disk], "was emptied or unmounted")
            if gone or len(roots) < len(self._wanted):
                await self._apply_disk_changes()

    async def _apply_disk_changes(self) -> None:
        for disk in sorted(set(self._disks.lost) - self._quarantined_disks):
            await self._quarantine_disk(disk)
            self._quarantined_disks.add(disk)
        for root in self._wanted:
            if root not in self._disks.roots.values() and await self._run(
                lambda root=root: can_replace_disk(root, mounted=root in self._mounted_before())
            ):
                await self._add_disk(root)
        serving = set(self._disks.roots.values())
        metrics.store_disks_lost.set(sum(root not in serving for root in self._wanted))

    async def _retire_disk(self, disk: int, root: Path, why: str) -> None:
        await self._committer.submit(RetireDisk(disk, why))
        self._disks.retire_disk(disk)
        self._failures.pop(disk, None)
        _log.error(
            "disk retired: other nodes restore its data if they have it; put an empty disk in its place",
            extra={"disk": str(root), "why": why},
        )
        await self._run(lambda: write_lost_disks(self._disks))

    async def _add_disk(self, root: Path) -> None:
        number = await self._committer.submit(AddDisk(root))
        self._disks.add_disk(number, root)
        await self._run(lambda: write_lost_disks(self._disks))
        _log.warning("an empty disk has replaced a lost one", extra={"disk": str(root)})

    async def _quarantine_disk(self, disk: int) -> None:
        """Quarantines everything stored on a lost disk."""
        with self._index.read_transaction() as txn:
            if is_disk_unused(self._index, txn, disk):
                return
        self._data_lost = True
        done = 0
        uses = await self._run(lambda: list(extent_uses_on(self._index, {disk})))
        for start in range(0, len(uses), _AT_ONCE):
            some, now = uses[start : start + _AT_ONCE], self._clock.now_ms()
            mutations = [quarantine_mutation_for(use, extent, now) for use, extent in some]
            for mutation in [self._committer.submit(mutation) for mutation in mutations]:
                done += bool(await mutation)
        metrics.quarantined.inc(done)
        if done:
            _log.error("versions lost their bytes with a failed disk", extra={"number": done})
