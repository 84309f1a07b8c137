"""LMDB index: the environment with all tables, the current objects, listings, and store metadata.

Law: a read opens a short transaction and closes it before anything waits. Writes happen inside
`write_transaction`, which LMDB serializes across processes. This module never touches data files.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import lmdb
import msgspec

from meshd.errors import OWN_FILES
from meshd.store.disks.layout import FORMAT
from meshd.store.errors import DiskFailedError, FormatError, IndexFullError, IndexMapFullError
from meshd.store.index.change_log import ChangeLog, RecordedTable
from meshd.store.index.checkpoint import OpeningPin, read_checkpoint
from meshd.store.index.data_file_table import DataFileTable
from meshd.store.index.listing import (
    ListingQuery,
    VersionQuery,
    entry_page,
    list_page,
    list_versions,
)
from meshd.store.index.ordered_table import OrderedTable, SlotBatchReader, SlotCursor, slot_filter
from meshd.store.index.uploads import Uploads
from meshd.store.index.versions import Versions
from meshd.store.records import Record, StoreStats
from meshd.telemetry import metrics
from meshd.util.durable_directories import make_directory, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.config import StoreSettings
    from meshd.store.records import DiskStats, EntryPage, Page, StoreChanges, VersionPage


_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(Record).decode

_META_PAGES: Final = 2
_MAP_RESERVES: Final = 4 << 20, 160 << 20
"""Bytes of the map that writes leave free, least and most. Deletions need them: each adds to the log of
changes and to the tombstones before a page is empty, and LMDB reuses it two transactions later."""
_MAP_RESERVE_SHARE: Final = 40
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
"""What LMDB says of a file that is not, or no longer, an environment of its version."""


def object_key(bucket: str, key: str) -> bytes:
    """Returns the index key of an object."""
    return f"{bucket}\0{key}".encode()


class Index:
    """One LMDB environment. At most one per process and directory may be open."""

    def __init__(
        self,
        path: Path,
        *,
        map_bytes: int,
        sync: bool = True,
        readonly: bool = False,
        checkpoints: bool = False,
    ) -> None:
        if checkpoints and not readonly and read_checkpoint(path) is None:
            Index(path, map_bytes=map_bytes).close()  # synced: there is no checkpoint to go back to
        if not readonly:
            make_directory(path)
        self.path, self.map_bytes = path, map_bytes
        self._pin: OpeningPin | None = None
        try:
            self.env = lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=16,
                max_readers=1024,
                max_spare_txns=8,
                sync=sync,
                metasync=sync,
                readonly=readonly,
                readahead=False,
                meminit=False,
            )
        except lmdb.Error as error:
            raise self._not_opened(error, map_bytes) from error
        try:
            if checkpoints and not readonly:
                self._pin = OpeningPin(self.env, path)  # before this process writes anything
            else:
                self.env.reader_check()  # frees reader slots of killed processes
            self._open_tables(readonly)
            if (
                not readonly
            ):  # or a power cut takes the file's name; that sync may have failed when it was new
                sync_directory(path)
        except BaseException as error:
            self.close()
            if isinstance(error, lmdb.Error):
                raise self._not_opened(error, map_bytes) from error
            raise
        self._begin = self.env.begin

    def _not_opened(self, error: lmdb.Error, map_bytes: int) -> FormatError:
        """Returns the error that says what to do; a rebuild is advised for a damaged file alone."""
        if isinstance(error, lmdb.MemoryError):
            advice = (
                f"it needs {map_bytes >> 20:,} MiB of address space, which the system refuses; raise the "
                "limit (`ulimit -v`, LimitAS= of a service) or set a lower index-map. The data is intact"
            )
        elif isinstance(error, _DAMAGE):
            advice = "run meshd fsck --rebuild"
        elif os.strerror(errno.EACCES) in str(error):
            advice = OWN_FILES
        else:
            advice = "remove the cause, then start again; if it stays, run meshd fsck --rebuild"
        return FormatError(f"the index at {self.path} cannot be opened ({error}): {advice}")

    def _open_tables(self, readonly: bool) -> None:
        create = not readonly
        self._databases: list[Any] = []
        self.meta = self._open_database(b"meta", create)
        version = self.get_meta("format")
        if version is not None and version > FORMAT:
            raise FormatError(
                f"the index at {self.path} has format {version}, this meshd knows {FORMAT}; upgrade meshd"
            )
        self.objects = RecordedTable(self._open_database(b"objects", create))
        older = OrderedTable(self._open_database(b"versions", create))
        nulls = OrderedTable(self._open_database(b"nulls", create))
        self.versions = Versions(self.objects, older, nulls)
        self.quarantine = OrderedTable(self._open_database(b"quarantine", create))
        self.tombstones = OrderedTable(self._open_database(b"graves", create))
        uploads = OrderedTable(self._open_database(b"uploads", create))
        self.uploads = Uploads(uploads, self._open_database(b"parts", create))
        files = self._open_database(b"files", create)
        self.files = DataFileTable(files, self._open_database(b"unsynced", True) if create else None)
        self.change_log = ChangeLog(self._open_database(b"changes", True)) if create else None

    def _open_database(self, name: bytes, create: bool) -> Any:
        database = self.env.open_db(name, create=create)
        self._databases.append(database)
        return database

    @classmethod
    def open(cls, settings: StoreSettings, *, readonly: bool = False) -> Index:
        """Opens the index that these settings describe."""
        sync = settings.durability == "commit"
        path, size = settings.index_dir, settings.index_map_bytes
        return cls(path, map_bytes=size, sync=sync, readonly=readonly, checkpoints=not sync)

    def close(self) -> None:
        if self._pin is not None:
            self._pin.close()
        self.env.close()

    def size(self) -> int:
        """Returns the size of the index on disk in bytes."""
        info = self.env.info()
        return int(self.env.stat()["psize"] * (info["last_pgno"] + 1))

    def map_free_space(self, reserves: int = 1) -> int:
        """Returns the bytes by which the pages in use may grow within the map (`index-map`) above its
        reserve, or above 1/`reserves` of it; negative if the reserve is in use. Pages that were freed count
        as free, also those that an open transaction still needs."""
        page = self.env.stat()["psize"]
        used = self.env.info()["last_pgno"] + 1
        if used > self.map_bytes // page // 2:  # the file never shrinks: count the pages of the tables
            with self._begin() as txn:
                tables = [self.env.stat(), *(txn.stat(database) for database in self._databases)]
            used = _META_PAGES + sum(
                table[kind] for table in tables for kind in ("branch_pages", "leaf_pages", "overflow_pages")
            )
        least, most = _MAP_RESERVES
        reserve = min(max(self.map_bytes // _MAP_RESERVE_SHARE, least), most)
        return int(self.map_bytes - used * page - reserve // reserves)

    def sync_pages(self) -> None:
        """Makes all pages durable, whatever this index does at its commits (blocking). Raises OSError."""
        try:
            self.env.sync(True)
        except lmdb.Error as error:
            raise OSError(errno.EIO, str(error), str(self.path)) from error

    @property
    def is_usable(self) -> bool:
        """Whether this process can use it. LMDB refuses everything in a process that could not write a meta
        page; another process can go on."""
        try:
            self.env.begin().abort()
        except lmdb.Error:
            return False
        return True

    # transactions -----------------------------------------------------------------------------------------

    def read_transaction(self) -> Any:
        """Opens a read transaction as a context manager; values are buffers that are valid inside it."""
        return self._begin(buffers=True)

    @contextmanager
    def write_transaction(self) -> Iterator[Any]:
        """Opens the write transaction: exclusive over all processes, aborted if the block raises."""
        with _translate_errors(), self._begin(write=True) as txn:
            self.objects.forget_changes()
            yield txn

    # metadata of the store --------------------------------------------------------------------------------

    @property
    def last_transaction(self) -> int:
        """Returns the number of the newest transaction that any process has committed. Cheap."""
        return int(self.env.info()["last_txnid"])

    def get_meta(self, name: str, txn: Any = None) -> Any:
        """Returns a value of the meta table, or None."""
        if txn is None:
            with self.env.begin() as own:
                return self.get_meta(name, own)
        raw = txn.get(name.encode(), db=self.meta)
        return None if raw is None else msgspec.msgpack.decode(raw)

    def put_meta(self, txn: Any, name: str, value: Any) -> None:
        txn.put(name.encode(), _encode(value), db=self.meta)

    def note_documents(self, txn: Any, before: int, stamp: int) -> None:
        """Notes that between two values of `last_stamp`, only documents of the node were written. A release
        that does not know of this changes `last_stamp` alone, and the note no longer applies."""
        noted = self.get_meta("documents", txn)
        since = noted[0] if noted and noted[1] == before else before
        self.put_meta(txn, "documents", (since, stamp))

    def log_changes(self, txn: Any, before: int, stamp: int) -> None:
        """Logs which names of clients this transaction changed; `before`: the value of `last_stamp` before
        it."""
        if self.change_log is not None:
            self.change_log.append(txn, stamp, self.objects.entry(self._revision(txn, before)))

    def changes_since(self, revision: int, bucket: str) -> StoreChanges | None:
        """Returns the names of a bucket that changed since a revision, None if that is not known."""
        with self.env.begin() as txn:
            now = self._revision(txn, int(self.get_meta("last_stamp", txn) or 0))
            return None if self.change_log is None else self.change_log.since(txn, revision, now, bucket)

    def revision(self) -> int:
        """Returns the stamp of the last change of an object of clients, or a later one."""
        with self.env.begin() as txn:
            return self._revision(txn, int(self.get_meta("last_stamp", txn) or 0))

    def _revision(self, txn: Any, last: int) -> int:
        noted = self.get_meta("documents", txn)
        return int(noted[0]) if noted and noted[1] == last else last

    # objects ----------------------------------------------------------------------------------------------

    def get(self, bucket: str, key: str) -> Record | None:
        """Returns the record in the latest committed state."""
        with self._begin(None, None, False, True) as txn:
            raw = self.objects.get(txn, f"{bucket}\0{key}".encode())
            return None if raw is None else _record(raw)

    def get_in(self, txn: Any, bucket: str, key: str) -> Record | None:
        """Returns the record as `txn` sees it."""
        raw = self.objects.get(txn, object_key(bucket, key))
        return None if raw is None else _record(raw)

    def find_version(self, bucket: str, key: str, version: str) -> Record | None:
        """Returns exactly this version in the latest committed state."""
        with self.read_transaction() as txn:
            return self.versions.find_version(txn, object_key(bucket, key), version)

    def list(
        self, bucket: str, prefix: str, delimiter: str, after: str, limit: int, slots: bytes | None = None
    ) -> Page:
        """Returns one page; see ObjectStore.list."""
        base = bucket.encode() + b"\0"
        query = ListingQuery(base, prefix.encode(), delimiter.encode(), after.encode(), limit)
        with self.read_transaction() as txn, self.objects.open_cursor(txn, query.start()) as cursor:
            if slots is None:
                return list_page(cursor, query, _record)
            return list_page(SlotCursor(cursor, slot_filter(slots), base + query.prefix), query, _record)

    def list_entries(
        self, bucket: str, prefix: str, delimiter: str, after: str, limit: int, slots: bytes | None = None
    ) -> EntryPage:
        """Returns one page; see ObjectStore.list_entries."""
        base = bucket.encode() + b"\0"
        query = ListingQuery(base, prefix.encode(), delimiter.encode(), after.encode(), limit)
        with self._begin() as txn, self.objects.open_batch_cursor(txn, query.start()) as runs:
            if slots is None:
                return entry_page(runs, query)
            return entry_page(SlotBatchReader(runs, slot_filter(slots), base + query.prefix), query)

    def list_versions(
        self,
        bucket: str,
        prefix: str,
        delimiter: str,
        key_marker: str,
        version_marker: str,
        limit: int,
        slots: bytes | None = None,
    ) -> VersionPage:
        """Returns one page; see ObjectStore.list_versions."""
        base = bucket.encode() + b"\0"
        query = VersionQuery(
            base, prefix.encode(), delimiter.encode(), key_marker.encode(), version_marker, limit
        )
        with self.read_transaction() as txn:
            return list_versions(self.versions, txn, query, None if slots is None else slot_filter(slots))

    def is_empty(self, bucket: str) -> bool:
        base = bucket.encode() + b"\0"
        with self.read_transaction() as txn:
            return not any(
                next(table.items(txn, prefix=base), None) is not None
                for table in (self.objects, self.versions.older, self.uploads.table)
            )

    def all_records(self, txn: Any) -> Iterator[tuple[bytes, Record]]:
        """Yields (name, record) of all versions: first the current ones, then the others, each in order."""
        for name, raw in self.objects.items(txn):
            yield name, _record(raw)
        yield from self.versions.all_older(txn)

    def stats(self, disks: tuple[DiskStats, ...]) -> StoreStats:
        """Returns the counts and byte totals of a store on these disks."""
        with self.read_transaction() as txn:
            count = own = live = dead = 0
            for _, info in self.files.all_files(txn):
                count += 1
                own += info.kind == "own"
                live += info.live
                dead += info.dead
            return StoreStats(
                objects=self.objects.count(txn),
                uploads=self.uploads.table.count(txn),
                segments=count - own,
                own_files=own,
                live_bytes=live,
                dead_bytes=dead,
                index_bytes=self.size(),
                disks=disks,
                versions=self.versions.older.count(txn),
                quarantined=self.quarantine.count(txn),
                index_map_bytes=self.map_bytes,
                index_map_free_bytes=self.map_free_space(),
            )


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _store_error_from(error) from error


def _store_error_from(error: lmdb.Error) -> IndexFullError | DiskFailedError:
    """Translates an error of an index write into a StoreError."""
    full = isinstance(error, lmdb.MapFullError | lmdb.DiskError) or "No space left" in str(error)
    metrics.store_disk_errors.labels("full" if full else "failed").inc()
    if isinstance(error, lmdb.MapFullError):
        return IndexMapFullError()
    if full:
        return IndexFullError("the file system of the index is full; free space under --index-dir")
    return DiskFailedError(f"writing the index failed: {error}; see the kernel log, then run meshd fsck")
