"""Local reads: the part of a replicated store that this node's own store answers.

Law: every owner of a name has what was acknowledged, so a read asks no other node. What a replica
receives is entered in the own store as well, and is not sent on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.store.write_context import INTERNAL_WRITE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from meshd.store.api import ObjectStore, ReplicaWriter
    from meshd.store.records import (
        EntryPage,
        Location,
        Page,
        PartPage,
        Record,
        Span,
        StoreStats,
        Upload,
        UploadPage,
        VersionPage,
    )
    from meshd.store.replica.changes import Applied, Change
    from meshd.store.write_context import WriteContext


class LocalReads:
    """Reads from this node's own store; see ObjectStore."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def close(self) -> None:
        self._store.close()

    # objects ----------------------------------------------------------------------------------------------

    def get(self, bucket: str, key: str) -> Record | None:
        return self._store.get(bucket, key)

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        return self._store.get_version(bucket, key, version)

    def newest_version(self, bucket: str, key: str) -> Record | None:
        return self._store.newest_version(bucket, key)

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
        return self._store.list(
            bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit, slots=slots
        )

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
        return self._store.list_entries(
            bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit, slots=slots
        )

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
        return self._store.list_versions(
            bucket,
            prefix=prefix,
            delimiter=delimiter,
            key_marker=key_marker,
            version_marker=version_marker,
            limit=limit,
            slots=slots,
        )

    def is_empty(self, bucket: str) -> bool:
        return self._store.is_empty(bucket)

    def open_spans(self, record: Record, offset: int, length: int) -> AbstractContextManager[Sequence[Span]]:
        return self._store.open_spans(record, offset, length)

    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> AbstractContextManager[Sequence[Sequence[Span] | None]]:
        return self._store.open_spans_many(wanted)

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        return self._store.read_range(record, offset, length)

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        return self._store.try_read_range(record, offset, length)

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        return self._store.try_open_span(record, offset, length)

    def locate(self, record: Record) -> Sequence[Location]:
        return self._store.locate(record)

    # uploads ----------------------------------------------------------------------------------------------

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        return self._store.get_upload(bucket, key, upload_id)

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        return self._store.list_parts(upload, after, limit)

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
        return self._store.list_uploads(
            bucket,
            prefix=prefix,
            delimiter=delimiter,
            key_marker=key_marker,
            id_marker=id_marker,
            limit=limit,
            slots=slots,
        )

    # as a replica -----------------------------------------------------------------------------------------

    def replica_writer(self, bucket: str, key: str, *, size: int | None) -> ReplicaWriter:
        return self._store.replica_writer(bucket, key, size=size)

    async def apply_change(self, change: Change, *, context: WriteContext = INTERNAL_WRITE) -> Applied:
        return await self._store.apply_change(change, context=context)

    async def raise_fence(self, epoch: int) -> None:
        await self._store.raise_fence(epoch)

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        return self._store.tombstone_stamp(bucket, key, what)

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        return self._store.removals_since(bucket, key, after)

    # the store itself -------------------------------------------------------------------------------------

    def revision(self) -> int:
        return self._store.revision()

    def stats(self) -> StoreStats:
        return self._store.stats()
