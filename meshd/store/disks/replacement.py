"""Disk loss and replacement: retires a lost disk and adopts an empty directory in its place.

Law: data on a lost disk goes to quarantine; the index keeps its metadata, and other nodes supply the
bytes. Nothing is ever removed from a disk. A directory replaces a disk only if it is empty, and only if
it is a mount point where the old disk was one: a failed mount must not fill the file system below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshd.store.disks.layout import (
    DISK_FAILURES_KEY,
    DRAFTS,
    EXTENTS,
    FORMAT,
    LOST_DISKS_KEY,
    MOUNTED_DISKS_KEY,
    DiskMarker,
    Disks,
    is_mounted,
    read_marker,
    write_marker,
)
from meshd.store.engine.mutations import Mutation
from meshd.store.engine.write_batch import WriteBatch
from meshd.store.errors import StoreError
from meshd.store.integrity.quarantine import DropDamagedPart, ExtentUse, QuarantineVersion, RestoreManifest
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

    from meshd.store.engine.data_files import Segment
    from meshd.store.index.index import Index
    from meshd.store.records import Extent

_AT_ONCE: Final = 4096
_WHY: Final = "its disk was lost"


class RetireDisk(Mutation):
    """Marks a disk as out of service; returns False if it already was. `why`: as `failed (an error)`."""

    exclusive = True

    def __init__(self, disk: int, why: str = "failed") -> None:
        self.disk, self.why = disk, why

    def update_index(self, batch: WriteBatch, txn: Any) -> bool:
        known = batch.index.get_meta(LOST_DISKS_KEY, txn) or []
        if self.disk in known:
            return False
        batch.index.put_meta(txn, LOST_DISKS_KEY, [*known, self.disk])
        failures = batch.index.get_meta(DISK_FAILURES_KEY, txn) or {}
        batch.index.put_meta(txn, DISK_FAILURES_KEY, {**failures, self.disk: self.why})
        return True


class AddDisk(Mutation):
    """Makes an empty directory a disk of the store; returns its number."""

    exclusive = True

    def __init__(self, root: Path) -> None:
        self.root, self.number = root, 0

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        index = batch.index
        known, lost = index.get_meta("disks", txn) or {}, index.get_meta(LOST_DISKS_KEY, txn) or []
        marker = read_marker(self.root)
        if marker is not None:  # a process that is just starting has adopted it
            self.number = marker.disk
            return
        self.number = max(known) + 1
        marker = DiskMarker(
            FORMAT, index.get_meta("store", txn), self.number, len(known) + 1, tuple(sorted(lost))
        )
        write_marker(self.root, marker)
        (self.root / EXTENTS / DRAFTS).mkdir(exist_ok=True)

    def update_index(self, batch: WriteBatch, txn: Any) -> int:
        index = batch.index
        index.put_meta(txn, "disks", {**index.get_meta("disks", txn), self.number: str(self.root)})
        if is_mounted(self.root):
            index.put_meta(
                txn, MOUNTED_DISKS_KEY, [*(index.get_meta(MOUNTED_DISKS_KEY, txn) or []), self.number]
            )
        return self.number


def can_replace_disk(root: Path, *, mounted: bool) -> bool:
    """Returns True if a directory may replace a lost disk; `mounted`: the lost disk was a mount point.
    Creates the directory if that is allowed (blocking)."""
    try:
        if mounted and not is_mounted(root):
            return False
        if read_marker(root) is not None or next(Disks({0: root}).files(), None) is not None:
            return False
        (root / EXTENTS).mkdir(parents=True, exist_ok=True)
        probe = root / EXTENTS / "probe"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, StoreError):
        return False
    return True


def record_mounts(index: Index, disks: Disks, txn: Any) -> None:
    """Records which disks in service are mount points; keeps what is known of the others."""
    known = index.get_meta(MOUNTED_DISKS_KEY, txn) or []
    found = [disk for disk in known if disk not in disks.roots]
    found += [disk for disk, root in disks.roots.items() if is_mounted(root)]
    if sorted(found) != sorted(known):
        index.put_meta(txn, MOUNTED_DISKS_KEY, found)


def is_disk_unused(index: Index, txn: Any, disk: int) -> bool:
    """Returns True if no record uses bytes on a disk."""
    return not any(info.disk == disk and info.refs for _, info in index.files.all_files(txn))


def extent_uses_on(index: Index, lost: Container[int]) -> Iterator[tuple[ExtentUse, Extent]]:
    """Yields every use of bytes on these disks that is not in quarantine yet. Scans the whole index."""
    with index.read_transaction() as txn:
        for name, record in index.all_records(txn):
            if record.broken:
                continue
            for extent in record.extents:
                if extent.disk in lost:
                    yield ExtentUse(name, record.stamp), extent
            if record.manifest is not None and record.manifest.disk in lost:
                yield ExtentUse(name, record.stamp, manifest=True), record.manifest
        for upload_id, part in index.uploads.all_parts(txn):
            for extent in part.extents:
                if extent.disk in lost:
                    yield ExtentUse(b"", upload=upload_id, part=part.number), extent


def quarantine_mutation_for(use: ExtentUse, extent: Extent, now_ms: int) -> Mutation:
    """Returns the mutation that repairs or quarantines a use of lost bytes."""
    if use.part:
        return DropDamagedPart(use.upload, use.part, [extent])
    if use.manifest:
        return RestoreManifest(use.name, use.stamp, extent)
    return QuarantineVersion(use.name, use.stamp, [extent], now_ms, _WHY)


def quarantine_lost_disks(index: Index, disks: Disks) -> int:
    """Quarantines everything on the lost disks before the first read; returns the number of versions
    (blocking). While a node runs, the disk health monitor does this."""
    clock = SystemClock()
    with index.read_transaction() as txn:
        lost = {disk for disk in disks.lost if not is_disk_unused(index, txn, disk)}
    if not lost:
        return 0
    done, uses = 0, [found for found in extent_uses_on(index, lost) if not found[0].manifest]
    for start in range(0, len(uses), _AT_ONCE):
        batch = WriteBatch(index, disks, clock, _no_segment, writer="recovery", durable=True)
        with index.write_transaction() as txn:
            done += sum(
                bool(quarantine_mutation_for(use, extent, clock.now_ms()).update_index(batch, txn))
                for use, extent in uses[start : start + _AT_ONCE]
            )
            batch.write_accounts(txn)
        batch.finish_commit()
    return done


def _no_segment(disk: int) -> Segment:
    raise AssertionError(f"quarantining must not write to disk {disk}")
