"""Making a store's directories, knowing its disks again, and cleaning up after a crash.

Law: idempotent. Nothing is removed from a disk whose marker does not name this very index: an index that was
lost or mistaken must never cost data.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshd.store.errors import FormatError
from meshd.store.index import Index
from meshd.store.layout import DRAFTS, EXTENTS, FORMAT, DiskMarker, Disks, read_marker, write_marker
from meshd.store.locking import Locks
from meshd.store.probing import LOST

if TYPE_CHECKING:
    from meshd.config import StoreSettings


def prepare(index: Index, settings: StoreSettings) -> Disks:
    """The store's disks, made and marked where they are new. Raises FormatError."""
    disks = _find(index, settings)
    for root in disks.roots.values():
        (root / EXTENTS / DRAFTS).mkdir(exist_ok=True)
    return disks


def _find(index: Index, settings: StoreSettings) -> Disks:
    known, lost = index.get_meta("disks"), index.get_meta(LOST) or []
    if known is not None and not lost:
        disks = _recognise(known, index.get_meta("store"), settings.disks)
        if disks is not None:
            return disks
    with index.writing() as txn:
        store = index.get_meta("store", txn)
        if store is None:
            _refuse_orphaned(settings.disks)
            store = uuid.uuid4().hex
            index.put_meta(txn, "format", FORMAT)
            index.put_meta(txn, "store", store)
            index.put_meta(txn, "next_file", settings.first_file)
        numbers: dict[int, str] = index.get_meta("disks", txn) or {}
        gone = {
            number: Path(numbers[number]) for number in index.get_meta(LOST, txn) or [] if number in numbers
        }
        roots = _enrol(settings.disks, store, numbers, settings.first_disk, gone)
        if not roots:
            raise FormatError(
                "every disk of this node has failed: give it an empty data directory on a sound one; in a "
                "mesh say `mesh cluster replace` first"
            )
        index.put_meta(txn, "disks", {number: str(root) for number, root in (roots | gone).items()})
    return Disks(roots, gone)


def _recognise(known: dict[int, str], store: str, roots: tuple[Path, ...]) -> Disks | None:
    """The disks when nothing changed since the last start, None when `_enrol` has to look."""
    markers = {root: read_marker(root) for root in roots}
    found = {
        marker.disk: root for root, marker in markers.items() if marker is not None and marker.store == store
    }
    same = set(found) == set(known) and len(found) == len(roots)
    return Disks(found) if same and {n: str(r) for n, r in found.items()} == known else None


def _refuse_orphaned(roots: tuple[Path, ...]) -> None:
    for root in roots:
        if (marker := read_marker(root)) is None:
            continue
        if next(Disks({marker.disk: root}).files(), None) is not None:
            raise FormatError(
                f"the index is empty but {root} holds data: give its --index-dir or run meshd fsck --rebuild"
            )


def _enrol(
    roots: tuple[Path, ...], store: str, known: dict[int, str], first: int, lost: dict[int, Path]
) -> dict[int, Path]:
    """Numbers for all disks in service, from `first` on; new ones are marked."""
    found: dict[int, Path] = {}
    fresh = []
    for root in roots:
        marker = _marker_of(root, lost)
        if marker is None and root in lost.values() and not _is_writable(root):
            continue
        if marker is not None and marker.store == store and marker.disk in lost:
            continue  # it failed: to be used again it has to be empty
        if marker is not None and marker.store == store and marker.disk not in found:
            found[marker.disk] = root
        elif marker is not None and next(Disks({marker.disk: root}).files(), None) is not None:
            raise FormatError(
                f"{root} belongs to another store; remove it from --disk, or move its data away"
            )
        else:
            fresh.append(root)
    missing = [path for number, path in known.items() if number not in found and number not in lost]
    if missing:
        raise FormatError(f"disk {missing[0]} is missing; mount it and start again with its --disk")
    found.update(enumerate(fresh, start=max(known, default=first - 1) + 1))
    if fresh:
        for number, root in found.items():
            write_marker(root, DiskMarker(FORMAT, store, number, len(found), tuple(sorted(lost))))
    return found


def _marker_of(root: Path, lost: dict[int, Path]) -> DiskMarker | None:
    """As `read_marker`; a disk that failed may not be readable."""
    try:
        return read_marker(root)
    except OSError:
        if root in lost.values():
            return None
        raise


def _is_writable(root: Path) -> bool:
    try:
        (root / EXTENTS).mkdir(parents=True, exist_ok=True)
        probe = root / EXTENTS / "probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError:
        return False
    return True


def sweep_drafts(disks: Disks, writer: str | None) -> int:
    """Removes unfinished files of `writer` (None: of all); how many."""
    ending = ".part" if writer is None else f".{writer}.part"
    removed = 0
    for entry in disks.drafts():
        if entry.name.endswith(ending):
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
                removed += 1
    return removed


def recover(settings: StoreSettings) -> None:
    """Cleans up after a crash; to be called once before the workers start, while nobody has the store open.

    Cuts the tails of open segments, removes drafts and files that the index does not know, and moves file
    numbers past what exists. Raises StoreInUseError, FormatError.
    """
    with Locks.alone(settings.data_dir):
        index = Index.open(settings)
        try:
            disks = prepare(index, settings)
            sweep_drafts(disks, None)
            with index.writing() as txn:
                _cut_tails(index, disks, txn)
                unused = _forget_unused(index, disks, txn)
            for path in unused:
                os.unlink(path)
        finally:
            index.close()


def _cut_tails(index: Index, disks: Disks, txn: Any) -> None:
    for file, info in index.all_files(txn):
        path = disks.path(info.disk, file)
        if info.disk in disks.lost:
            continue
        if info.kind == "segment" and info.state == "open" and os.path.getsize(path) > info.end:
            os.truncate(path, info.end)


def _forget_unused(index: Index, disks: Disks, txn: Any) -> list[str]:
    """Paths of files that the index does not know, or was done with; to be removed once it forgot them."""
    highest, unused = 0, []
    for disk, file, path in disks.files():
        info = index.get_file(txn, file)
        if info is None or info.disk != disk or info.state == "retired":
            unused.append(path)
            if info is not None and info.disk == disk:
                index.delete_file(txn, file)
        highest = max(highest, file)
    if (index.get_meta("next_file", txn) or 1) <= highest:
        index.put_meta(txn, "next_file", highest + 1)
    return unused
