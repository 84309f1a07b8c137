"""Index rebuild: creates a new index from the data files alone.

Law: never writes to a data file. The new index is built next to the old one and replaces it by one
rename; a power cut in the middle leaves the old index or the new one. Memory does not grow with the
number of keys.
Invariant: the result does not depend on the order of the files. The highest stamp wins among a key's
null versions; a deletion of them holds until a higher stamp, that of a version with an id holds for
good; data that nothing refers to is left out.
"""

from __future__ import annotations

import os
import shutil
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.layout import FORMAT, Disks, find_disks
from meshd.store.engine.checkpointer import REBUILD_COMPLETE, REBUILD_DIRECTORY, adopt_rebuilt_index
from meshd.store.engine.file_scan import DataFileScan, is_large_object_file
from meshd.store.engine.member_header import cancels_others, stamp_of_version_id
from meshd.store.errors import FormatError
from meshd.store.index.index import Index, object_key
from meshd.store.index.ordered_table import OrderedTable
from meshd.store.index.tombstones import Tombstones
from meshd.store.index.versions import TAIL, decode, older_version_key
from meshd.store.records import DataFile, Record, Upload, UploadedPart
from meshd.util.durable_directories import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from meshd.config import StoreSettings
    from meshd.store.engine.file_scan import Progress, ScannedMember
    from meshd.store.engine.member_header import Member
    from meshd.store.records import Extent


_encode = msgspec.msgpack.Encoder().encode
_BATCH = 10_000


class RebuiltVersions:
    """Collects versions and removals in any order. Every method except `drop_scratch` may be called in any
    transaction of the rebuild."""

    def __init__(self, index: Index) -> None:
        self._versions = index.versions
        self._voided = OrderedTable(index.env.open_db(b"voided"))
        self._gone = OrderedTable(index.env.open_db(b"gone"))

    def add_version(self, txn: Any, name: bytes, record: Record) -> None:
        """Enters a version that a member describes, unless it was removed or a better copy is known."""
        if record.version:
            table, place = self._versions.older, older_version_key(name, record.stamp)
            gone = self._gone.get(txn, place) is not None
        else:
            table, place = self._versions.objects, name
            voided = self._voided.get(txn, name)
            gone = voided is not None and int.from_bytes(voided, "big") > record.stamp
        if gone:
            return
        existing = table.get(txn, place)
        if existing is None or _rank(decode(existing)) < _rank(record):
            table.put(txn, place, _encode(record))

    def add_removal(self, txn: Any, name: bytes, version: str, stamp: int) -> None:
        """Enters the removal of this version, or of all null versions older than `stamp`."""
        if version:
            place = older_version_key(name, stamp_of_version_id(version) or 0)
            self._gone.put(txn, place, b"")
            self._versions.older.delete(txn, place)
            return
        voided = self._voided.get(txn, name)
        if voided is None or int.from_bytes(voided, "big") < stamp:
            self._voided.put(txn, name, stamp.to_bytes(16, "big"))
        existing = self._versions.current_version(txn, name)
        if existing is not None and existing.stamp < stamp:
            self._versions.objects.delete(txn, name)

    def drop_version(self, txn: Any, name: bytes, record: Record) -> None:
        """Drops a version that was entered."""
        if record.version:
            self._versions.older.delete(txn, older_version_key(name, record.stamp))
        else:
            self._versions.objects.delete(txn, name)

    def arrange_versions(self, txn: Any) -> None:
        """Makes each key's newest version current, and its null version an older one where a newer version
        exists."""
        versions = self._versions
        for batch in _batches(versions.objects, txn):
            for name, raw in batch:
                record = decode(raw)
                if record.marker:
                    versions.objects.delete(txn, name)
                    versions.put_older(txn, name, record)
        for batch in _batches(versions.older, txn):
            for name in dict.fromkeys(key[:-TAIL] for key, _ in batch):
                self._promote(txn, name)

    def _promote(self, txn: Any, name: bytes) -> None:
        versions = self._versions
        current, older = versions.current_version(txn, name), next(versions.older_versions(txn, name), None)
        if older is None or (current is not None and current.stamp > older.stamp):
            return
        if current is not None:
            versions.objects.delete(txn, name)
            versions.put_older(txn, name, current)
        versions.promote_newest(txn, name)

    def drop_scratch(self, txn: Any) -> None:
        """Drops what was recorded about removals. The last call."""
        for table in (self._voided, self._gone):
            txn.drop(table.db)


def _rank(record: Record) -> tuple[int, int, bool]:
    """Ranks copies of a version by stamp, then by number of rewrites. A copy left by compaction may have been
    superseded by a manifest with newer tags."""
    return record.stamp, record.moves, record.manifest is not None


def _batches(table: OrderedTable, txn: Any) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yields all pairs of a table in batches; the caller may change the table up to the last pair read."""
    start = b""
    while batch := [(key, bytes(raw)) for key, raw in islice(table.items(txn, start), _BATCH)]:
        yield batch
        start = batch[-1][0] + b"\0"


_T = TypeVar("_T")


class RebuildReport(msgspec.Struct):
    """What was rebuilt, and what could not be read. `versions` counts older versions and delete markers."""

    objects: int = 0
    versions: int = 0
    uploads: int = 0
    files: int = 0
    problems: list[str] = msgspec.field(default_factory=list)


class _Account(msgspec.Struct):
    disk: int
    kind: str = "segment"
    state: str = "sealed"
    end: int = 0
    payload: int = 0
    live: int = 0
    refs: int = 0
    tombs: int = 0
    members: int = 0
    damaged: bool = False
    stamps: list[int] = msgspec.field(default_factory=list)


class IndexRebuilder:
    """Collects members in a new index; until the end all null versions are among the current ones.

    Memory: one account per data file.
    """

    def __init__(self, index: Index, tombstone_seconds: float = 0.0) -> None:
        self.index, self._tombstone_seconds = index, tombstone_seconds
        self.report = RebuildReport()
        self._accounts: dict[int, _Account] = {}
        self._doubtful = False
        self._versions = RebuiltVersions(index)
        self._ended = index.env.open_db(b"ended")

    def scan_file(self, disk: int, file: int, path: str) -> None:
        """Enters all members of one data file."""
        account = self._accounts[file] = _Account(disk)
        with DataFileScan(disk, file, path) as scan, self.index.write_transaction() as txn:
            first, count, tombstones = None, 0, Tombstones(self.index, txn, keep=self._tombstone_seconds > 0)
            try:
                for found in self._trusted_members(scan):
                    first, count = first or found, count + 1
                    self._count(account, found)
                    self._enter_member(txn, scan, found)
                    if self._tombstone_seconds and cancels_others(found.member):
                        self._add_tombstone(txn, tombstones, found.member)
            except OSError as error:  # members read before the error count
                account.state, self._doubtful = "lost", True
                problem = (
                    f"{path}: the device cannot read it: {error.strerror}; everything after that is lost"
                )
                self.report.problems.append(problem)
            tombstones.save(txn)
            for damage in scan.damage:
                self._report_lost(account, f"{path}: {damage}")
        if first is not None and is_large_object_file(first, count):
            account.kind, account.end = "own", first.extent.offset + first.extent.length
        self.report.files += 1

    def _report_lost(self, account: _Account, problem: str) -> None:
        self.report.problems.append(f"{problem}; its contents are lost")
        account.damaged = self._doubtful = True

    def _report_damage(self, scan: DataFileScan, found: ScannedMember, how: str) -> None:
        member = found.member
        problem = (
            f"{scan.path}: the {member.kind} of {member.bucket}/{member.key} at byte {found.extent.offset}"
        )
        self._report_lost(self._accounts[scan.file], f"{problem} {how}")

    @staticmethod
    def _count(account: _Account, found: ScannedMember) -> None:
        account.payload += found.extent.length
        account.tombs += cancels_others(found.member)
        account.members += found.member.kind not in ("deleted", "aborted")
        account.stamps = _span(account.stamps, int(found.member.stamp))
        account.end = found.next

    def _trusted_members(self, scan: DataFileScan) -> Iterable[ScannedMember]:
        """Yields the members. A file without an end mark may end in torn members after a crash, so their
        bytes are verified."""
        for _ in scan.members():
            pass
        torn = not scan.ended
        for found in scan.members():
            if not torn or scan.is_intact(found.extent):
                yield found
            else:
                self._report_damage(scan, found, "was being written when the node stopped, or is damaged")

    def _enter_member(self, txn: Any, scan: DataFileScan, found: ScannedMember) -> None:
        member = found.member
        stamp = int(member.stamp)
        name = object_key(member.bucket, member.key)
        if member.kind in ("object", "marker"):
            self._versions.add_version(txn, name, found.as_record())
        elif member.kind == "manifest":
            record = self._document(scan, found, Record)
            if record is not None:
                record = msgspec.structs.replace(record, stamp=stamp, manifest=found.extent)
                self._versions.add_version(txn, name, record)
            if member.upload:
                txn.put(member.upload.encode(), b"", db=self._ended)
        elif member.kind == "deleted":
            self._versions.add_removal(txn, name, member.version, stamp)
        elif member.kind == "upload":
            upload = self._document(scan, found, Upload)
            if upload is not None:
                self._upload(txn, msgspec.structs.replace(upload, place=found.extent, moves=member.moves))
        elif member.kind == "aborted":
            txn.put(member.upload.encode(), b"", db=self._ended)
        elif member.kind == "part" and member.upload:
            self._part(txn, found, stamp)

    def _document(self, scan: DataFileScan, found: ScannedMember, kind: type[_T]) -> _T | None:
        """Decodes a member's data; returns None and reports the damage if they are damaged."""
        if scan.is_intact(found.extent):
            return msgspec.json.decode(scan.read_extent(found.extent), type=kind)
        self._report_damage(scan, found, "is damaged")
        return None

    @staticmethod
    def _add_tombstone(txn: Any, tombstones: Tombstones, member: Member) -> None:
        name = object_key(member.bucket, member.key)
        tombstones.add(txn, name, int(member.stamp), member.upload or member.version)

    def _upload(self, txn: Any, upload: Upload) -> None:
        existing = self.index.uploads.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
        if existing is None or existing.moves < upload.moves:
            self.index.uploads.put_upload(txn, upload)

    def _part(self, txn: Any, found: ScannedMember, stamp: int) -> None:
        member, extent = found.member, found.extent
        existing = self.index.uploads.get_part(txn, member.upload, member.part)
        if existing is None or (existing.stamp, existing.moves) < (stamp, member.moves):
            part = UploadedPart(
                member.part,
                extent.length,
                member.etag,
                member.checksums,
                member.modified,
                (extent,),
                stamp,
                member.moves,
            )
            self.index.uploads.put_part(txn, member.upload, part)

    # after the last file ----------------------------------------------------------------------------------

    def finish(self, store: str, disks: dict[int, Path]) -> None:
        """Drops ended uploads and lost versions, computes the accounts, and writes the metadata of the
        index."""
        with self.index.write_transaction() as txn:
            self._drop_ended(txn)
            self._drop_lost(txn)
            self._versions.arrange_versions(txn)
            for extent in self._used(txn):
                account = self._accounts[extent.file]
                account.live += extent.length
                account.refs += 1
            self._write_accounts(txn)
            for name, value in self._facts(store, disks).items():
                self.index.put_meta(txn, name, value)
            self._versions.drop_scratch(txn)
            txn.drop(self._ended)
            if self._tombstone_seconds:
                tombstones = Tombstones(self.index, txn, keep=True)
                newest = self.index.get_meta("last_stamp", txn)
                tombstones.mark_incomplete(newest - round(self._tombstone_seconds * 1e9))
                tombstones.save(txn)
            self.report.objects = self.index.objects.count(txn)
            self.report.versions = self.index.versions.older.count(txn)
            self.report.uploads = self.index.uploads.table.count(txn)

    def _facts(self, store: str, disks: dict[int, Path]) -> dict[str, Any]:
        stamps = [account.stamps[-1] for account in self._accounts.values() if account.stamps]
        return {
            "format": FORMAT,
            "store": store,
            "disks": {number: str(root) for number, root in disks.items()},
            "next_file": max(self._accounts, default=0) + 1,
            "last_stamp": max(stamps, default=0),
        }

    def _drop_ended(self, txn: Any) -> None:
        uploads = list(self.index.uploads.all_uploads(txn))
        running = set()
        for upload in uploads:
            if txn.get(upload.upload_id.encode(), db=self._ended) is None:
                running.add(upload.upload_id)
            else:
                self.index.uploads.delete_upload(txn, upload)
        for upload_id, part in list(self.index.uploads.all_parts(txn)):
            if upload_id not in running:
                self.index.uploads.delete_part(txn, upload_id, part.number)

    def _drop_lost(self, txn: Any) -> None:
        """Drops and reports versions whose extents are missing."""
        lost = [
            (name, record)
            for name, record in self.index.all_records(txn)
            if not all(self._present(extent) for extent in record.extents)
        ]
        self._doubtful = self._doubtful or bool(lost)
        for name, record in lost:
            self._versions.drop_version(txn, name, record)
            problem = f" (version {record.version})" if record.version else ""
            self.report.problems.append(
                f"{name.decode().replace(chr(0), '/', 1)}{problem}: some of its bytes are missing; it is lost"
            )

    def _present(self, extent: Extent) -> bool:
        account = self._accounts.get(extent.file)
        return (
            account is not None
            and account.disk == extent.disk
            and extent.offset + extent.length <= account.end
        )

    def _used(self, txn: Any) -> Iterable[Extent]:
        for _, record in self.index.all_records(txn):
            yield from record.used_extents
        for upload in self.index.uploads.all_uploads(txn):
            if upload.place is not None:
                yield upload.place
        for _, part in self.index.uploads.all_parts(txn):
            yield from part.extents

    def _is_kept(self, account: _Account) -> bool:
        """Returns True if an unreadable file may have held records that use this one."""
        return self._doubtful and bool(account.members or account.damaged)

    def _write_accounts(self, txn: Any) -> None:
        for file, account in self._accounts.items():
            unused = not account.refs and not account.tombs and account.state == "sealed"
            if unused and not self._is_kept(account):
                continue  # nothing in it is used: startup recovery removes the file
            first, last = account.stamps or (0, 0)
            info = DataFile(
                account.disk,
                account.kind,
                "lost" if unused else account.state,
                "rebuilt",
                account.end,
                account.live,
                dead=max(0, account.payload - account.live),
                refs=account.refs,
                tombs=account.tombs,
                first_stamp=first,
                last_stamp=last,
                buried=max(0, account.members - account.refs),
            )
            self.index.files.put_file(txn, file, info)


def _span(stamps: list[int], stamp: int) -> list[int]:
    return [min(stamps[0], stamp), max(stamps[1], stamp)] if stamps else [stamp, stamp]


def rebuild_index(settings: StoreSettings, progress: Progress = lambda done, total: None) -> RebuildReport:
    """Creates a new index; the old one is kept next to it as `data.mdb.before-rebuild`. Calls `progress(done,
    total)` with byte counts.

    Raises StoreInUseError, FormatError.
    """
    if not settings.data_dir.is_dir():
        raise FormatError(f"{settings.data_dir} is not a directory; pass the node's --data-dir")
    with DataDirLock.acquire_exclusive(settings.data_dir):
        store, roots = find_disks(settings)
        build_dir = settings.index_dir / REBUILD_DIRECTORY
        shutil.rmtree(build_dir, ignore_errors=True)
        index = Index(build_dir, map_bytes=settings.index_map_bytes, sync=False)
        try:
            rebuilder = IndexRebuilder(index, settings.tombstone_seconds)
            files = [(*found, os.path.getsize(found[2])) for found in Disks(roots).files()]
            total, done = sum(size for *_, size in files), 0
            for disk, file, path, size in files:
                rebuilder.scan_file(disk, file, path)
                done += size
                progress(done, total)
            rebuilder.finish(store, roots)
            index.env.sync(True)
        finally:
            index.close()
        (build_dir / REBUILD_COMPLETE).touch()
        sync_directory(build_dir)
        adopt_rebuilt_index(settings)
        return rebuilder.report
