"""Startup recovery: creates a store's directories, identifies its disks and cleans up after a crash.

Law: idempotent. Recovery removes nothing from a disk whose marker does not name this index: a lost or
mistaken index must never cost data.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.layout import (
    DISK_FAILURES_KEY,
    DISK_STARTS_KEY,
    DRAFTS,
    EXTENTS,
    FORMAT,
    LOST_DISKS_KEY,
    MOUNTED_DISKS_KEY,
    SET_BACK_KEY,
    DiskMarker,
    Disks,
    read_marker,
    write_marker,
)
from meshd.store.disks.replacement import can_replace_disk, quarantine_lost_disks, record_mounts
from meshd.store.disks.reserve_files import make_reserves
from meshd.store.engine.checkpointer import REBUILD_DIRECTORY, protect_index, restore_after_power_cut
from meshd.store.errors import FormatError
from meshd.store.index.index import Index
from meshd.util.clock import SystemClock
from meshd.util.file_locks import ENDING_SECONDS
from meshwire.phrases import word_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.config import StoreSettings
    from meshd.store.records import DataFile


MissingDiskPolicy = Callable[[Path, str], None]
"""Called with each disk that `is missing` or `cannot be read (why)`. Raises FormatError if the store must not
start without it."""
_log = logging.getLogger("meshd.disks")
_PROCESS_ERRNOS: Final = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
"""Errors of the process or of configuration, not of the disk."""


_OLD_COPY: Final = "is an old copy, or the index is one"


def require_every_disk(path: Path, problem: str) -> None:
    """Refuses to start without a disk. Raises FormatError."""
    raise FormatError(f"disk {path} {problem}; mount it, then start again with its --disk")


class _FailingDisks(dict[Path, str]):
    """Disks that cannot be used, with the reason. With `writing`, a read-only disk counts as one."""

    def __init__(self, *, writing: bool = False, set_back: bool = False) -> None:
        super().__init__()
        self._writing, self.set_back = writing, set_back
        self.starts: dict[int, list[str]] = {}
        """Of the index: DISK_STARTS_KEY; empty if it went back to a checkpoint, and disks may be newer."""
        self.old = set[Path]()
        """Disks that are old copies, where the index has them."""

    def is_old_copy(self, marker: DiskMarker) -> bool:
        """Returns True if the node was started with this disk after the copy was made."""
        starts = self.starts.get(marker.disk)
        return bool(starts and marker.start and marker.start not in starts)

    def marker(self, root: Path) -> DiskMarker | None:
        """Reads a marker like `read_marker`; returns None for a failing disk. Raises FormatError,
        PermissionError."""
        if root in self:
            return None
        try:
            marker = read_marker(root)
            if marker is not None and self._writing:
                _require_writable(root)
        except OSError as error:
            if error.errno in _PROCESS_ERRNOS:
                raise
            self[root] = error.strerror or str(error)
            return None
        return marker

    def describe(self, root: Path) -> str:
        """Says why a disk is not in service."""
        if root in self.old:
            return f"{_OLD_COPY} (the last start of this node had others)"
        return f"cannot be read ({self[root]})" if root in self else "is missing"

    def describe_at_start(self, root: Path) -> str:
        """Says for the node's life why a disk is not in service."""
        if root in self.old:
            return _OLD_COPY
        return f"failed ({self[root]})" if root in self else "was missing when the node started"

    def attribute_error(self, error: OSError, roots: Iterable[Path]) -> None:
        """Attributes an error to one of the disks. Raises the error if it belongs to no disk that was
        considered healthy."""
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
        for root in roots:
            if (
                f"{name}/".startswith(f"{root / EXTENTS}/")
                and root not in self
                and error.errno not in _PROCESS_ERRNOS
            ):
                self[root] = error.strerror or str(error)
                return
        raise error


def _require_writable(root: Path) -> None:
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def open_disks(
    index: Index,
    settings: StoreSettings,
    missing_policy: MissingDiskPolicy = require_every_disk,
    failing: _FailingDisks | None = None,
) -> Disks:
    """Opens the store's disks; creates and marks new ones. Raises FormatError."""
    disks = _open_or_enrol(index, settings, missing_policy, _FailingDisks() if failing is None else failing)
    for root in disks.roots.values():
        (root / EXTENTS / DRAFTS).mkdir(exist_ok=True)
    return disks


def _open_or_enrol(
    index: Index, settings: StoreSettings, missing_policy: MissingDiskPolicy, failing: _FailingDisks
) -> Disks:
    known, lost = index.get_meta("disks"), index.get_meta(LOST_DISKS_KEY) or []
    if not index.get_meta(SET_BACK_KEY) and not failing.set_back:
        failing.starts = index.get_meta(DISK_STARTS_KEY) or {}
    if known is not None and not lost:
        disks = _recognise(known, index.get_meta("store"), settings.disks, failing)
        if disks is not None:
            return disks
    with index.write_transaction() as txn:
        store = index.get_meta("store", txn)
        if store is None:
            refuse_orphaned_data(settings, failing)
            store = uuid.uuid4().hex
            index.put_meta(txn, "format", FORMAT)
            index.put_meta(txn, "store", store)
            index.put_meta(txn, "next_file", settings.first_file)
        roots, gone = _enrol(index, txn, settings, store, missing_policy, failing)
        index.put_meta(txn, "disks", {number: str(root) for number, root in (roots | gone).items()})
        if gone:
            index.put_meta(txn, LOST_DISKS_KEY, sorted(gone))
            why = {number: failing.describe_at_start(path) for number, path in gone.items()}
            index.put_meta(txn, DISK_FAILURES_KEY, why | (index.get_meta(DISK_FAILURES_KEY, txn) or {}))
    return Disks(roots, gone)


def _recognise(
    paths: dict[int, str], store: str, roots: tuple[Path, ...], failing: _FailingDisks
) -> Disks | None:
    """Returns the disks if nothing changed since the last start; None if `_enrol` has to sort them."""
    known = {number: Path(path) for number, path in paths.items()}
    markers = {root: failing.marker(root) for root in roots}
    found = {
        marker.disk: root
        for root, marker in markers.items()
        if marker is not None and marker.store == store and not failing.is_old_copy(marker)
    }
    same = set(found) == set(known) and len(found) == len(roots)
    return Disks(found) if same and found == known else None


def refuse_orphaned_data(settings: StoreSettings, failing: _FailingDisks | None = None) -> None:
    """Refuses to begin with an empty index while disks hold data. Raises FormatError."""
    failing = _FailingDisks() if failing is None else failing
    for root in settings.disks:
        if (marker := failing.marker(root)) is None:
            continue
        if _holds_files(root, marker):
            if settings.evictable:
                failing[root] = "it still holds data of another index"
                continue
            raise FormatError(
                f"the index is empty, but {root} holds data: pass its --index-dir or run meshd fsck --rebuild"
            )


class _Enrolment:
    """The given directories, sorted by comparing their markers with the index."""

    def __init__(
        self, index: Index, txn: Any, settings: StoreSettings, store: str, failing: _FailingDisks
    ) -> None:
        paths: dict[int, str] = index.get_meta("disks", txn) or {}
        self.known = {number: Path(path) for number, path in paths.items()}
        self.gone = self._of_known(index.get_meta(LOST_DISKS_KEY, txn))
        self.found: dict[int, Path] = {}
        """Disks in service, by number."""
        self.fresh: list[Path] = []
        """Directories to put into service: they get a number and a marker."""
        self.refused: list[Path] = []
        """Unknown directories that cannot be used."""
        self._store, self._failing, self._evictable = store, failing, settings.evictable
        self._known_roots = set(self.known.values())
        self._was_mounted = set(self._of_known(index.get_meta(MOUNTED_DISKS_KEY, txn)).values())
        for root in settings.disks:
            self._sort(root)

    def _of_known(self, numbers: Iterable[int] | None) -> dict[int, Path]:
        return {number: self.known[number] for number in numbers or [] if number in self.known}

    def _sort(self, root: Path) -> None:
        marker = self._failing.marker(root)
        if root in self._failing:
            if root not in self._known_roots:
                self.refused.append(root)
        elif marker is not None:
            self._sort_marked(root, marker)
        elif root not in self._known_roots or can_replace_disk(root, mounted=root in self._was_mounted):
            self.fresh.append(root)

    def _sort_marked(self, root: Path, marker: DiskMarker) -> None:
        ours = marker.store == self._store
        if ours and marker.disk in self.gone:
            return  # it failed before: only an empty disk may take its place
        if ours and self._failing.is_old_copy(marker):
            self._failing.old.add(self.known.get(marker.disk, root))
        elif ours and marker.disk not in self.found:
            self.found[marker.disk] = root
        elif not _holds_files(root, marker):
            self.fresh.append(root)
        elif not (self._evictable and root in self.gone.values()):
            raise FormatError(
                f"{root} belongs to another store; remove it from --disk, or move its data away"
            )

    def missing(self) -> dict[int, Path]:
        """Returns known disks that were not given up and are not there."""
        return {
            number: path
            for number, path in self.known.items()
            if number not in self.found and number not in self.gone
        }


def _holds_files(root: Path, marker: DiskMarker) -> bool:
    return next(Disks({marker.disk: root}).files(), None) is not None


def _enrol(
    index: Index,
    txn: Any,
    settings: StoreSettings,
    store: str,
    missing_policy: MissingDiskPolicy,
    failing: _FailingDisks,
) -> tuple[dict[int, Path], dict[int, Path]]:
    """Returns the disks in service, with new ones numbered and marked, and the lost disks. Raises
    FormatError."""
    enrolment = _Enrolment(index, txn, settings, store, failing)
    missing = enrolment.missing()
    for path in missing.values():
        missing_policy(path, failing.describe(path))
    first_free = max(enrolment.known, default=settings.first_disk - 1) + 1
    found = enrolment.found | dict(enumerate(enrolment.fresh, start=first_free))
    refused = _unusable_disks(
        settings, enrolment.refused, missing_policy, failing, first_free + len(enrolment.fresh)
    )
    gone = enrolment.gone | missing | refused
    if not found and missing and enrolment.gone:
        held, old = (word_list(list(paths)) for paths in (missing.values(), settings.disks))
        raise FormatError(
            f"the data of this node is on {held}, which is missing; {old} was taken out of service before, "
            f"and its old data is not used: start the node with --disk {held}"
        )
    if not found:
        raise FormatError(
            "every disk of this node has failed: give it an empty data directory on a healthy disk; in a "
            "mesh, run `mesh cluster replace` first"
        )
    if enrolment.fresh or missing:
        for number, root in found.items():
            _mark(root, DiskMarker(FORMAT, store, number, len(found), tuple(sorted(gone))))
    return found, gone


def _unusable_disks(
    settings: StoreSettings,
    roots: Iterable[Path],
    missing_policy: MissingDiskPolicy,
    failing: _FailingDisks,
    first: int,
) -> dict[int, Path]:
    """Returns unknown disks that cannot be used, as lost ones. Raises FormatError."""
    gone = {}
    for number, root in enumerate(roots, start=first):
        if not settings.evictable:
            raise FormatError(
                f"disk {root} {failing.describe(root)}, and this node has never used it: put a healthy disk "
                "in its place, or remove it from --disk"
            )
        missing_policy(root, failing.describe(root))
        gone[number] = root
    return gone


def _mark(root: Path, marker: DiskMarker) -> None:
    try:
        write_marker(root, marker)
    except OSError as error:  # errors of file descriptors carry no file name
        error.filename = error.filename or str(root / EXTENTS)
        raise


def sweep_drafts(disks: Disks, writer: str | None) -> int:
    """Removes unfinished files of `writer` (None: of all writers); returns how many."""
    ending = ".part" if writer is None else f".{writer}.part"
    removed = 0
    for entry in disks.drafts():
        if entry.name.endswith(ending):
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
                removed += 1
    return removed


def recover(settings: StoreSettings, missing_policy: MissingDiskPolicy = require_every_disk) -> int:
    """Cleans up after a crash. Call it once before the workers start, while no process has the store open.

    Cuts the tails of open segments, removes drafts and files unknown to the index, and advances the next file
    number past every existing file. Processes of a killed daemon that are still ending get ENDING_SECONDS. A
    disk that reports errors meanwhile is treated as missing. Returns the number of versions quarantined
    because their disk is lost. Raises StoreInUseError, FormatError.
    """
    with DataDirLock.acquire_exclusive(settings.data_dir, ENDING_SECONDS):
        set_back = restore_after_power_cut(settings)
        failing = _FailingDisks(writing=True, set_back=set_back)
        shutil.rmtree(settings.index_dir / REBUILD_DIRECTORY, ignore_errors=True)  # one that was interrupted
        while True:
            try:
                return _recover(settings, missing_policy, failing, set_back=set_back)
            except OSError as error:
                failing.attribute_error(error, settings.disks)


def is_set_back(settings: StoreSettings) -> bool:
    """Returns True if the index is back at a checkpoint, and not compared with other owners since. Call it
    while no process has the store open."""
    with closing(Index.open(settings)) as index:
        return bool(index.get_meta(SET_BACK_KEY))


def _recover(
    settings: StoreSettings, missing_policy: MissingDiskPolicy, failing: _FailingDisks, *, set_back: bool
) -> int:
    clock = SystemClock()
    with (
        closing(Index.open(settings)) as index,
        closing(protect_index(index, settings, clock)),
    ):
        disks = open_disks(index, settings, missing_policy, failing)
        sweep_drafts(disks, None)
        make_reserves(disks.with_index(settings.index_dir))
        lost = quarantine_lost_disks(index, disks)
        with index.write_transaction() as txn:
            record_mounts(index, disks, txn)
            if set_back:
                index.put_meta(txn, SET_BACK_KEY, True)
            _cut_tails(index, disks, txn)
            unused = _forget_unused(index, disks, txn)
            start = uuid.uuid4().hex
            markers = {disk: read_marker(root) for disk, root in disks.roots.items()}
            starts = {disk: [marker.start, start] for disk, marker in markers.items() if marker is not None}
            index.put_meta(txn, DISK_STARTS_KEY, starts)
        protect_index(index, settings, clock).close()  # the checkpoint before may need what goes now
        marked = _mark_start(disks, start)
        with index.write_transaction() as txn:
            index.put_meta(txn, DISK_STARTS_KEY, starts | {disk: [start] for disk in marked})
        for path in unused:
            os.unlink(path)
    for disk, why in failing.items():
        _log.error("a disk cannot be used: the node starts without it", extra={"disk": str(disk), "why": why})
    return lost


def _mark_start(disks: Disks, start: str) -> list[int]:
    """Notes this start on the disks, and returns on which: on a full one that before stays. The index knows
    both meanwhile."""
    marked = []
    for disk, root in disks.roots.items():
        if (marker := read_marker(root)) is None:
            continue
        try:
            _mark(root, msgspec.structs.replace(marker, start=start))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        else:
            marked.append(disk)
    return marked


def _cut_tails(index: Index, disks: Disks, txn: Any) -> None:
    for file, info in index.files.all_files(txn):
        path = disks.path(info.disk, file)
        if info.disk in disks.lost:
            continue
        if info.kind == "segment" and info.state == "open" and os.path.getsize(path) > info.end:
            os.truncate(path, info.end)


def _is_purged(disks: Disks, file: int, info: DataFile) -> bool:
    """Returns True for a retired file that was unlinked after the checkpoint that still names it."""
    return info.state == "retired" and not os.path.exists(disks.path(info.disk, file))


def _forget_unused(index: Index, disks: Disks, txn: Any) -> list[str]:
    """Forgets files that the index does not know or has retired; returns their paths, to be unlinked after
    the index has committed."""
    highest, unused = 0, []
    for disk, file, path in disks.files():
        info = index.files.get_file(txn, file)
        if info is None or info.disk != disk or info.state == "retired":
            unused.append(path)
            if info is not None and info.disk == disk:
                index.files.delete_file(txn, file)
        highest = max(highest, file)
    for file, info in list(index.files.all_files(txn)):
        if not info.refs and (info.disk in disks.lost or _is_purged(disks, file, info)):
            index.files.delete_file(txn, file)
    if (index.get_meta("next_file", txn) or 1) <= highest:
        index.put_meta(txn, "next_file", highest + 1)
    return unused
