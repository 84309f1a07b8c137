"""Doing without a disk, and putting an empty one in its place.

Law: what lay on a disk that is gone goes into quarantine: its facts stay, for they are in the index, and
other nodes give its bytes. Nothing is ever removed from a disk. A directory takes a disk's place when it is
empty, and a file system of its own if the disk was one: a mount that failed must not fill what is below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshd.kit.clock import SystemClock
from meshd.store.convicting import Use
from meshd.store.errors import StoreError
from meshd.store.intents import Intent
from meshd.store.layout import (
    DRAFTS,
    EXTENTS,
    FORMAT,
    LOST,
    MOUNTED,
    DiskMarker,
    Disks,
    is_mounted,
    read_marker,
    write_marker,
)
from meshd.store.quarantine import Confine, ConfinePart, RestoreManifest
from meshd.store.works import Work

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

    from meshd.store.index import Index
    from meshd.store.records import Extent
    from meshd.store.segments import Segment

_AT_ONCE: Final = 4096
_WHY: Final = "its disk is gone"


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


class PutIn(Intent):
    """Makes an empty directory a disk of the store; its number."""

    exclusive = True

    def __init__(self, root: Path) -> None:
        self.root, self.number = root, 0

    def place(self, work: Work, txn: Any | None) -> None:
        index = work.index
        known, lost = index.get_meta("disks", txn) or {}, index.get_meta(LOST, txn) or []
        marker = read_marker(self.root)
        if marker is not None:  # a process that started this moment has done it
            self.number = marker.disk
            return
        self.number = max(known) + 1
        marker = DiskMarker(
            FORMAT, index.get_meta("store", txn), self.number, len(known) + 1, tuple(sorted(lost))
        )
        write_marker(self.root, marker)
        (self.root / EXTENTS / DRAFTS).mkdir(exist_ok=True)

    def apply(self, work: Work, txn: Any) -> int:
        index = work.index
        index.put_meta(txn, "disks", {**index.get_meta("disks", txn), self.number: str(self.root)})
        if is_mounted(self.root):
            index.put_meta(txn, MOUNTED, [*(index.get_meta(MOUNTED, txn) or []), self.number])
        return self.number


def is_blank(root: Path, *, mounted: bool) -> bool:
    """Whether a directory may take the place of a disk that is gone; `mounted`: that one was a file system of
    its own. Makes the directory where that is allowed (blocking)."""
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


def remember_mounts(index: Index, disks: Disks, txn: Any) -> None:
    """Which disks are file systems of their own; of those that are gone, which were."""
    known = index.get_meta(MOUNTED, txn) or []
    found = [disk for disk in known if disk not in disks.roots]
    found += [disk for disk, root in disks.roots.items() if is_mounted(root)]
    if sorted(found) != sorted(known):
        index.put_meta(txn, MOUNTED, found)


def is_bare(index: Index, txn: Any, disk: int) -> bool:
    """Whether nothing that is in use lies on a disk."""
    return not any(info.disk == disk and info.refs for _, info in index.all_files(txn))


def uses_on(index: Index, lost: Container[int]) -> Iterator[tuple[Use, Extent]]:
    """Everybody who uses bytes on these disks, and is not in quarantine: goes through the whole index."""
    with index.reading() as txn:
        for name, record in index.all_records(txn):
            if record.broken:
                continue
            for extent in record.extents:
                if extent.disk in lost:
                    yield Use(name, record.stamp), extent
            if record.manifest is not None and record.manifest.disk in lost:
                yield Use(name, record.stamp, manifest=True), record.manifest
        for upload_id, part in index.all_parts(txn):
            for extent in part.extents:
                if extent.disk in lost:
                    yield Use(b"", upload=upload_id, part=part.number), extent


def confinement(use: Use, extent: Extent, now_ms: int) -> Intent:
    """What has a use of lost bytes put right, or in quarantine."""
    if use.part:
        return ConfinePart(use.upload, use.part, [extent])
    if use.manifest:
        return RestoreManifest(use.name, use.stamp, extent)
    return Confine(use.name, use.stamp, [extent], now_ms, _WHY)


def give_up(index: Index, disks: Disks) -> int:
    """As the steward does while a node runs, before anybody reads: all that lay on lost disks into
    quarantine; how many versions (blocking)."""
    clock = SystemClock()
    with index.reading() as txn:
        lost = {disk for disk in disks.lost if not is_bare(index, txn, disk)}
    if not lost:
        return 0
    done, uses = 0, [found for found in uses_on(index, lost) if not found[0].manifest]
    for start in range(0, len(uses), _AT_ONCE):
        work = Work(index, disks, clock, _no_segment, writer="recovery", durable=True)
        with index.writing() as txn:
            done += sum(
                bool(confinement(use, extent, clock.now_ms()).apply(work, txn))
                for use, extent in uses[start : start + _AT_ONCE]
            )
            work.settle(txn)
        work.committed()
    return done


def _no_segment(disk: int) -> Segment:
    raise AssertionError(f"nothing is written to disk {disk} here")
