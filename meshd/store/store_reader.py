"""The reading half of the disk store: records, listings, the bytes of objects, and what was removed.

Law: nothing here waits for a write. A read opens a short transaction of the index and closes it before it
returns. Objects that are not stored here may be in the cache of buckets with an origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.store.engine.reader import ExtentReader
from meshd.store.index.index import object_key
from meshd.store.index.tombstones import Tombstones, ended_uploads, removals_since

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from meshd.store.api import CacheLookup
    from meshd.store.disks.layout import Disks
    from meshd.store.index.index import Index
    from meshd.store.records import (
        EntryPage,
        Location,
        Page,
        PartPage,
        Record,
        Span,
        StoreChanges,
        StoreStats,
        Upload,
        UploadPage,
        VersionPage,
    )


class DiskStoreReader:
    """Reads objects on disks; see StoreReader, and ObjectStore for what replicas compare."""

    def __init__(self, index: Index, disks: Disks, small_object_bytes: int) -> None:
        self._index, self._disks = index, disks
        self._reader = ExtentReader(disks, small=small_object_bytes)
        self._cache_lookup: CacheLookup | None = None

    def attach_cache(self, cache: DiskStoreReader, lookup: CacheLookup) -> None:
        """Looks up objects that are not stored here in `lookup`, whose records refer to the files of `cache`:
        a store of its own data directory, which the caller closes after this one."""
        self._cache_lookup = lookup
        self._disks.add_readable_disks(cache._disks)

    # records and listings -------------------------------------------------------------------------------

    def get(self, bucket: str, key: str) -> Record | None:
        record = self._index.get(bucket, key)
        if record is None and self._cache_lookup is not None:
            return self._cache_lookup.get(bucket, key)
        return record

    def get_stored(self, bucket: str, key: str) -> Record | None:
        """Returns a record like `get`, but only of objects stored here permanently."""
        return self._index.get(bucket, key)

    def list_stored_entries(
        self, bucket: str, prefix: str, after: str, limit: int, slots: bytes | None = None
    ) -> EntryPage:
        """Lists like `list_entries`, but only objects stored here permanently."""
        return self._index.list_entries(bucket, prefix, "", after, limit, slots)

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        return self._index.find_version(bucket, key, version)

    def version_at(self, name: bytes, stamp: int) -> Record | None:
        """Returns the version of a name (bucket, NUL, key) with this stamp."""
        with self._index.read_transaction() as txn:
            return self._index.versions.version_at(txn, name, stamp)

    def newest_version(self, bucket: str, key: str) -> Record | None:
        with self._index.read_transaction() as txn:
            return self._index.versions.newest_version(txn, object_key(bucket, key))

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> Page:
        if self._cache_lookup is not None:
            self._cache_lookup.require_listable(bucket)
        return self._index.list(bucket, prefix, delimiter, after, limit, slots)

    def list_entries(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> EntryPage:
        if self._cache_lookup is not None:
            self._cache_lookup.require_listable(bucket)
        return self._index.list_entries(bucket, prefix, delimiter, after, limit, slots)

    def list_versions(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        version_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> VersionPage:
        return self._index.list_versions(bucket, prefix, delimiter, key_marker, version_marker, limit, slots)

    def is_empty(self, bucket: str) -> bool:
        return self._index.is_empty(bucket)

    # bytes ----------------------------------------------------------------------------------------------

    def open_spans(self, record: Record, offset: int, length: int) -> AbstractContextManager[Sequence[Span]]:
        return self._reader.open_spans(record, offset, length)

    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> AbstractContextManager[Sequence[Sequence[Span] | None]]:
        return self._reader.open_spans_many(wanted)

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        return self._reader.read_range(record, offset, length)

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        return self._reader.try_read_range(record, offset, length)

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        return self._reader.try_open_span(record, offset, length)

    def locate(self, record: Record) -> Sequence[Location]:
        return self._reader.locate(record)

    # uploads --------------------------------------------------------------------------------------------

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        with self._index.read_transaction() as txn:
            return self._index.uploads.get_upload(txn, bucket, key, upload_id)

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        with self._index.read_transaction() as txn:
            return self._index.uploads.list_parts(txn, upload.upload_id, after, limit)

    def list_uploads(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        id_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> UploadPage:
        page = bucket, prefix, delimiter, key_marker, id_marker, limit, slots
        with self._index.read_transaction() as txn:
            return self._index.uploads.list_uploads(txn, *page)

    # removals -------------------------------------------------------------------------------------------

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        with self._index.read_transaction() as txn:
            return Tombstones(self._index, txn).stamp_of(txn, object_key(bucket, key), what)

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        with self._index.read_transaction() as txn:
            return removals_since(self._index, txn, object_key(bucket, key), after)

    def ended_uploads(self, bucket: str, key: str) -> Sequence[tuple[str, int]]:
        with self._index.read_transaction() as txn:
            return ended_uploads(self._index, txn, object_key(bucket, key))

    # the store itself -----------------------------------------------------------------------------------

    def revision(self) -> int:
        return self._index.revision()

    def changes_since(self, revision: int, bucket: str) -> StoreChanges | None:
        return self._index.changes_since(revision, bucket)

    def stats(self) -> StoreStats:
        return self._index.stats(self._disks.usage())

    def close_deleted_files(self) -> None:
        """Closes removed files that the read cache holds open. Call it periodically."""
        self._reader.forget_deleted()
