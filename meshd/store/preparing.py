"""Making a store's directories, knowing its disks again, and cleaning up after a crash.

Law: idempotent. Nothing is removed from a disk whose marker does not name this very index: an index that was
lost or mistaken must never cost data.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshd.store.errors import FormatError
from meshd.store.index import Index
from meshd.store.layout import (
    DRAFTS,
    EXTENTS,
    FORMAT,
    LOST,
    MOUNTED,
    DiskMarker,
    Disks,
    read_marker,
    write_marker,
)
from meshd.store.locking import Locks
from meshd.store.losing import give_up, is_blank, remember_mounts

if TYPE_CHECKING:
    from meshd.config import StoreSettings


Spare = Callable[[Path], None]
"""Asked about each disk that is missing; raises FormatError where the store must not do without it."""


def mount_it(path: Path) -> None:
    """No disk may be missing. Raises FormatError."""
    raise FormatError(f"disk {path} is missing; mount it and start again with its --disk")


def prepare(index: Index, settings: StoreSettings, spare: Spare = mount_it) -> Disks:
    """The store's disks, made and marked where they are new. Raises FormatError."""
    disks = _find(index, settings, spare)
    for root in disks.roots.values():
        (root / EXTENTS / DRAFTS).mkdir(exist_ok=True)
    return disks


def _find(index: Index, settings: StoreSettings, spare: Spare) -> Disks:
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
        roots, gone = _enrol(index, txn, settings, store, spare)
        index.put_meta(txn, "disks", {number: str(root) for number, root in (roots | gone).items()})
        if gone:
            index.put_meta(txn, LOST, sorted(gone))
    return Disks(roots, gone)


def _recognise(paths: dict[int, str], store: str, roots: tuple[Path, ...]) -> Disks | None:
    """The disks when nothing changed since the last start, None when `_enrol` has to look."""
    known = {number: Path(path) for number, path in paths.items()}
    markers = {root: _marker_of(root, known) for root in roots}
    found = {
        marker.disk: root for root, marker in markers.items() if marker is not None and marker.store == store
    }
    same = set(found) == set(known) and len(found) == len(roots)
    return Disks(found) if same and found == known else None


def _refuse_orphaned(roots: tuple[Path, ...]) -> None:
    for root in roots:
        if (marker := read_marker(root)) is None:
            continue
        if next(Disks({marker.disk: root}).files(), None) is not None:
            raise FormatError(
                f"the index is empty but {root} holds data: give its --index-dir or run meshd fsck --rebuild"
            )


def _enrol(
    index: Index, txn: Any, settings: StoreSettings, store: str, spare: Spare
) -> tuple[dict[int, Path], dict[int, Path]]:
    """Disks in service, new ones numbered and marked, and those that are gone."""
    paths: dict[int, str] = index.get_meta("disks", txn) or {}
    known = {number: Path(path) for number, path in paths.items()}
    gone = {number: known[number] for number in index.get_meta(LOST, txn) or [] if number in known}
    was_mounted = {known[number] for number in index.get_meta(MOUNTED, txn) or [] if number in known}
    found: dict[int, Path] = {}
    fresh = []
    for root in settings.disks:
        marker = _marker_of(root, known)
        if marker is None:
            if root not in known.values() or is_blank(root, mounted=root in was_mounted):
                fresh.append(root)
        elif marker.store == store and marker.disk in gone:
            continue  # it failed: to be used again it has to be empty
        elif marker.store == store and marker.disk not in found:
            found[marker.disk] = root
        elif next(Disks({marker.disk: root}).files(), None) is not None:
            raise FormatError(
                f"{root} belongs to another store; remove it from --disk, or move its data away"
            )
        else:
            fresh.append(root)
    missing = {number: path for number, path in known.items() if number not in found and number not in gone}
    for path in missing.values():
        spare(path)
    gone |= missing
    found.update(enumerate(fresh, start=max(known, default=settings.first_disk - 1) + 1))
    if not found:
        raise FormatError(
            "every disk of this node has failed: give it an empty data directory on a sound one; in a mesh "
            "say `mesh cluster replace` first"
        )
    if fresh or missing:
        for number, root in found.items():
            write_marker(root, DiskMarker(FORMAT, store, number, len(found), tuple(sorted(gone))))
    return found, gone


def _marker_of(root: Path, known: dict[int, Path]) -> DiskMarker | None:
    """As `read_marker`; a disk that fails may not be readable."""
    try:
        return read_marker(root)
    except OSError:
        if root in known.values():
            return None
        raise


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


def recover(settings: StoreSettings, spare: Spare = mount_it) -> int:
    """Cleans up after a crash; to be called once before the workers start, while nobody has the store open.

    Cuts the tails of open segments, removes drafts and files that the index does not know, and moves file
    numbers past what exists. What lay on disks that are gone goes into quarantine: how many versions. Raises
    StoreInUseError, FormatError.
    """
    with Locks.alone(settings.data_dir):
        index = Index.open(settings)
        try:
            disks = prepare(index, settings, spare)
            sweep_drafts(disks, None)
            lost = give_up(index, disks)
            with index.writing() as txn:
                remember_mounts(index, disks, txn)
                _cut_tails(index, disks, txn)
                unused = _forget_unused(index, disks, txn)
            for path in unused:
                os.unlink(path)
        finally:
            index.close()
    return lost


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
    for file, info in list(index.all_files(txn)):
        if info.disk in disks.lost and not info.refs:
            index.delete_file(txn, file)
    if (index.get_meta("next_file", txn) or 1) <= highest:
        index.put_meta(txn, "next_file", highest + 1)
    return unused
