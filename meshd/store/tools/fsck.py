"""fsck: checks every index record against its bytes and every data file against the index.

Law: read only, with the data directory locked exclusively. Each problem names the object concerned;
leftover files do not count as damage.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.startup_recovery import open_disks
from meshd.store.engine.checkpointer import restore_after_power_cut
from meshd.store.engine.file_scan import DataFileScan
from meshd.store.errors import FormatError
from meshd.store.index.index import Index
from meshd.store.integrity.quarantine import all_quarantined
from meshd.store.records import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.config import StoreSettings
    from meshd.store.disks.layout import Disks
    from meshd.store.engine.file_scan import Progress
    from meshd.store.records import DataFile


class Problem(msgspec.Struct, frozen=True):
    """A problem found by fsck. `kind`: missing, damaged, quarantined (known damage, not served), mismatch,
    account, header. `name`: bucket/key where known."""

    kind: str
    path: str
    name: str
    detail: str


class CheckReport(msgspec.Struct):
    """What was checked, what is wrong, and which files the next start will remove."""

    objects: int = 0
    versions: int = 0
    files: int = 0
    bytes: int = 0
    problems: list[Problem] = msgspec.field(default_factory=list)
    leftovers: list[str] = msgspec.field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.problems


class _Claims:
    """The extents that the index uses in each file, packed as three numbers each."""

    def __init__(self) -> None:
        self._by_file: dict[int, array[int]] = {}

    def add(self, extent: Extent) -> None:
        self._by_file.setdefault(extent.file, array("Q")).extend(
            (extent.offset, extent.length, extent.crc32c)
        )

    def extents_in(self, disk: int, file: int) -> Iterator[Extent]:
        packed = self._by_file.get(file, array("Q"))
        for at in range(0, len(packed), 3):
            yield Extent(disk, file, *packed[at : at + 3])

    def files(self) -> set[int]:
        return set(self._by_file)


class Checker:
    """Compares an index with its data files."""

    def __init__(self, index: Index, disks: Disks, progress: Progress) -> None:
        self._index, self._disks, self._progress = index, disks, progress
        self.report = CheckReport()
        self._quarantined: set[Extent] = set()

    def run(self) -> CheckReport:
        with self._index.read_transaction() as txn:
            self._quarantine(txn)
            claims = self._claims(txn)
            self._order(txn)
            known = dict(self._index.files.all_files(txn))
            total, done = sum(info.end for info in known.values()), 0
            for file, info in known.items():
                if info.disk in self._disks.lost:
                    continue  # its data are in quarantine
                self._file(txn, file, info, list(claims.extents_in(info.disk, file)))
                done += info.end
                self._progress(done, total)
            for file in claims.files() - set(known):
                self._report_problem(
                    "missing", f"file {file:012x}", "", "records use a file that the index does not list"
                )
        self._leftovers(known)
        return self.report

    def _report_problem(self, kind: str, path: str, name: str, detail: str) -> None:
        self.report.problems.append(Problem(kind, path, name, detail))

    def _quarantine(self, txn: Any) -> None:
        """Reports known damage, and checks that records and quarantine table agree."""
        quarantined = {(name, stamp): about for name, stamp, about in all_quarantined(self._index, txn)}
        for (name, stamp), about in quarantined.items():
            record = self._index.versions.version_at(txn, name, stamp)
            if record is None or not record.broken:
                continue  # replaced or removed; the next prune forgets it
            self._quarantined.update(about.extents)
            size = sum(extent.length for extent in about.extents)
            self._report_problem("quarantined", "", _path_of(name), f"{size} bytes are damaged: {about.why}")
        for name, record in self._index.all_records(txn):
            if record.broken and (name, record.stamp) not in quarantined:
                self._report_problem(
                    "mismatch",
                    "",
                    _path_of(name),
                    "the record is in quarantine, but the quarantine table has no entry",
                )

    def _claims(self, txn: Any) -> _Claims:
        claims = _Claims()
        for name, record in self._index.all_records(txn):
            if sum(extent.length for extent in record.extents) != record.size:
                self._report_problem(
                    "mismatch", "", _path_of(name), f"the extents do not add up to {record.size} bytes"
                )
            for extent in record.used_extents:
                claims.add(extent)
        for upload in self._index.uploads.all_uploads(txn):
            if upload.place is not None:
                claims.add(upload.place)
        for _, part in self._index.uploads.all_parts(txn):
            for extent in part.extents:
                claims.add(extent)
        return claims

    def _file(self, txn: Any, file: int, info: DataFile, claims: list[Extent]) -> None:
        path = self._disks.path(info.disk, file)
        self.report.files += 1
        try:
            with DataFileScan(info.disk, file, path) as scan:
                self._headers(txn, scan, info, claims)
        except FileNotFoundError:
            self._report_problem(
                "missing", path, "", f"the file is missing, with {len(claims)} extents in use"
            )
        except OSError as error:
            self._report_problem("damaged", path, "", f"the device cannot read it: {error.strerror}")
        live = sum(extent.length for extent in claims)
        if (live, len(claims)) != (info.live, info.refs):
            detail = f"accounted {info.live} bytes in {info.refs} uses, found {live} in {len(claims)}"
            self._report_problem("account", path, "", detail)

    def _headers(self, txn: Any, scan: DataFileScan, info: DataFile, claims: list[Extent]) -> None:
        """Checks that every claimed extent is a member of the tar with the same checksum, and that its bytes
        match."""
        unseen = {(extent.offset, extent.length, extent.crc32c) for extent in claims}
        for found in scan.members(info.end if info.kind == "segment" else None):
            place = (found.extent.offset, found.extent.length, found.extent.crc32c)
            if place not in unseen:
                continue
            unseen.discard(place)
            self._bytes(scan, found.extent, f"{found.member.bucket}/{found.member.key}")
        for damage in scan.damage:
            self._report_problem("header", scan.path, "", damage)
        for offset, length, crc in unseen:
            extent = Extent(scan.disk, scan.file, offset, length, crc)
            name = self._owner(txn, extent)
            self._report_problem(
                "header", scan.path, name, f"no tar member header describes the bytes at {offset}"
            )
            self._bytes(scan, extent, name)

    def _bytes(self, scan: DataFileScan, extent: Extent, name: str) -> None:
        self.report.bytes += extent.length
        if extent in self._quarantined:
            return  # already reported
        if not scan.is_intact(extent):
            detail = f"{extent.length} bytes at {extent.offset} do not match their checksum"
            self._report_problem("damaged", scan.path, name, detail)

    def _owner(self, txn: Any, extent: Extent) -> str:
        """Returns the name that uses an extent. Scans the index, so it is called for damaged files only."""
        for name, record in self._index.all_records(txn):
            if extent in record.used_extents:
                return _path_of(name)
        return ""

    def _order(self, txn: Any) -> None:
        """Checks that the newest version is the current one unless it is a marker, and that `nulls` is
        correct."""
        versions, last, nulls = self._index.versions, b"", 0
        self.report.objects, self.report.versions = versions.objects.count(txn), versions.older.count(txn)
        for name, record in versions.all_older(txn):
            if not record.version:
                nulls += 1
                if versions.null_version(txn, name) != record:
                    self._report_problem(
                        "mismatch", "", _path_of(name), "the index does not list its null version correctly"
                    )
            if name == last:
                continue
            last, current = name, versions.current_version(txn, name)
            if not record.marker if current is None else record.stamp >= current.stamp:
                self._report_problem(
                    "mismatch", "", _path_of(name), "its newest version is not its current one"
                )
        if nulls != versions.nulls.count(txn):
            self._report_problem("mismatch", "", "", "the index lists null versions that do not exist")

    def _leftovers(self, known: dict[int, DataFile]) -> None:
        for disk, file, path in self._disks.files():
            if file not in known or known[file].disk != disk:
                self.report.leftovers.append(path)
        self.report.leftovers += [entry.path for entry in self._disks.drafts()]


def _path_of(name: bytes) -> str:
    """Returns the index key as bucket/key."""
    return name.decode().replace("\0", "/", 1)


def check_store(settings: StoreSettings, progress: Progress = lambda done, total: None) -> CheckReport:
    """Checks the whole store and reads every byte in use; calls `progress(done, total)` with byte counts.

    Raises StoreInUseError, FormatError.
    """
    if not settings.data_dir.is_dir():
        raise FormatError(f"{settings.data_dir} is not a directory; pass the node's --data-dir")
    with DataDirLock.acquire_exclusive(settings.data_dir):
        if not (settings.index_dir / "data.mdb").exists():
            raise FormatError(
                f"no index at {settings.index_dir}; pass --index-dir, or run meshd fsck --rebuild"
            )
        restore_after_power_cut(settings)
        index = Index.open(settings)
        try:
            return Checker(index, open_disks(index, settings), progress).run()
        finally:
            index.close()
