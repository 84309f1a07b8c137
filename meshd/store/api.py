"""Interfaces of the object store: ObjectStore, ObjectWriter and ReplicaWriter.

`Store` implements them on disks; the tests' reference store implements them in memory. A process has
one store object and calls it from one event loop. Methods without `async` never wait for a disk write.
Invariant: a write becomes visible to `get` and `list` of every process exactly when it is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.store.records import (
        EntryPage,
        Location,
        Meta,
        Page,
        PartPage,
        Record,
        Removed,
        Span,
        StoreStats,
        Upload,
        UploadPage,
        VersionPage,
    )
    from meshd.store.replica.changes import Applied, Change, PartOf
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

Buffer = bytes | bytearray | memoryview


class ObjectWriter(Protocol):
    """Takes one object's (or part's) bytes, then commits or aborts.

    One task at a time; nothing leaks when dropped.
    """

    async def write(self, data: Buffer) -> None:
        """Adds bytes; `data` may be reused once this returns.

        Raises DiskFullError, DiskFailedError, SizeMismatchError.
        """
        ...

    async def write_borrowed(self, data: memoryview) -> None:
        """As `write`, but what was lent may be read until the next `lend` or `commit` returns: two buffers in
        turn cost no copy."""
        ...

    async def commit(
        self, meta: Meta, *, conditions: Conditions | None = None, versioning: Versioning = ""
    ) -> Record:
        """Makes the object visible and durable. When cancelled, the write may still take place.

        `versioning`, as everywhere, is the bucket's present setting: a write replaces the null version, with
        "Enabled" it replaces nothing. Conditions look at the current object; a delete marker is none.
        Raises ConditionFailedError, ConditionMissingError, NoSuchUploadError (parts), DiskFullError,
        DiskFailedError, SizeMismatchError, MetadataTooLargeError; StaleEpochError: then it may be called
        again.
        """
        ...

    def read_back(self) -> AsyncGenerator[bytes, None]:
        """All that was written, from its beginning, while it is not committed; nothing may be written
        afterwards. Raises DiskFailedError, CorruptExtentError."""
        ...

    async def abort(self) -> None:
        """Forgets the bytes. Idempotent; does nothing after a commit."""
        ...


class ReplicaWriter(Protocol):
    """As ObjectWriter, for bytes that have their stamp already."""

    async def write(self, data: Buffer) -> None: ...

    async def write_borrowed(self, data: memoryview) -> None: ...

    async def make_durable(self) -> None:
        """All bytes are written: those of a large object are durable when this returns. Optional."""
        ...

    async def commit_at_stamp(self, record: Record, part: PartOf | None = None) -> Applied:
        """Enters the version at exactly its stamp, or the part; what is known already, ended, or a null
        version under a newer one is left out. Where the bytes lie is the store's own matter: extents, `moves`
        and manifest of `record` are not looked at.

        Raises SizeMismatchError, NoSuchUploadError (of a part whose upload has ended), DiskFullError,
        DiskFailedError, MetadataTooLargeError.
        """
        ...

    async def abort(self) -> None: ...


class ObjectStore(Protocol):
    """Objects by (bucket, key), their versions, and multipart uploads.

    Keys are str without surrogates and NUL, at most 1024 bytes of UTF-8. A version is named by its id, or
    `null`.
    """

    def close(self) -> None:
        """Commits what is pending and releases files. Idempotent."""
        ...

    def get(self, bucket: str, key: str) -> Record | None:
        """The current object's record; None when there is none or the newest version is a delete marker.

        Microseconds: may be called on the event loop.
        """
        ...

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        """Exactly this version, a delete marker too. None when there is none, whatever the text."""
        ...

    def newest_version(self, bucket: str, key: str) -> Record | None:
        """The newest version, a delete marker too."""
        ...

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
        """Keys after `after` in order of UTF-8 bytes.

        A common prefix is given once, and only when it sorts after `after`. `slots`, here and in the other
        listings: only names of these, a byte a slot, 0 or not (`meshwire.cluster.slot_of`).
        """
        ...

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
        """The same page as `list`, as S3 shows it: for listings of a thousand keys at several times the
        speed."""
        ...

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
        """Versions after (key_marker, version_marker); without the latter, after all of key_marker.

        A marker that is gone keeps its place; only after a null version that is gone its key begins anew.
        """
        ...

    def is_empty(self, bucket: str) -> bool:
        """True when the bucket has no object, no other version and no upload in progress."""
        ...

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        """A writer for a new version; `size` in bytes when known (then exactly so many must be written)."""
        ...

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
    ) -> Removed:
        """Deletes the object; with versioning a delete marker hides it, which "Suspended" puts in the place
        of the null version. Where the setting is "" but the object has a version, "Suspended" is meant.

        Durable when it returns. Raises like `ObjectWriter.commit`.
        """
        ...

    async def delete_many(
        self, bucket: str, keys: Iterable[str], *, versioning: Versioning = ""
    ) -> Mapping[str, Removed]:
        """Deletes all these keys; missing ones are fine. Durable when it returns."""
        ...

    async def delete_version(
        self, bucket: str, key: str, version: str, *, conditions: Conditions | None = None
    ) -> Removed:
        """Removes this version for good; `record` is None when it was not there. Conditions judge it alone.

        Under the newest one, the next becomes the current object unless it is a marker.
        """
        ...

    async def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
    ) -> Record:
        """Changes tags, ACL or both of the current object (None) or a version: same stamp, time and ETag.

        Raises NoSuchVersionError when it is gone or a delete marker.
        """
        ...

    async def link(
        self,
        bucket: str,
        key: str,
        source: Record,
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        versioning: Versioning = "",
    ) -> Record:
        """A copy of `source` under (bucket, key) with `meta`.

        Raises ExtentGoneError when the source went away.
        """
        ...

    def open_spans(self, record: Record, offset: int, length: int) -> AbstractContextManager[Sequence[Span]]:
        """Open files and ranges holding these bytes; valid inside the `with`, even if deleted meanwhile."""
        ...

    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> AbstractContextManager[Sequence[Sequence[Span] | None]]:
        """As `reading`, for many (record, offset, length) at once; None for one whose bytes are gone or
        cannot be opened."""
        ...

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        """The bytes. Whole extents are checked: raises CorruptExtentError, ExtentGoneError."""
        ...

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        """As `read`, but None when the bytes lie in several extents or not in memory."""
        ...

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        """As `reading`, but the range is valid only until the caller next awaits or reads; None when the
        bytes lie in several extents, or in a file that is not kept open."""
        ...

    def locate(self, record: Record) -> Sequence[Location]:
        """Paths and ranges for other processes; a file may be gone by the time it is opened."""
        ...

    async def create_upload(
        self,
        bucket: str,
        key: str,
        *,
        headers: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
        checksum_algorithm: str = "",
        checksum_type: str = "",
        owner: str = "",
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        born: int = 0,
    ) -> Upload:
        """Begins a multipart upload. Ids rise with time, so listings are ordered by start within a key."""
        ...

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        """The upload in progress, or None."""
        ...

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        """A writer for part `number` (1–10,000); the commit's Record has size, etag, modified, checksums."""
        ...

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        """Parts with numbers above `after`, in order."""
        ...

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
        """Uploads after (key_marker, id_marker); without an id, after all uploads of key_marker."""
        ...

    async def complete_upload(
        self,
        upload: Upload,
        parts: Sequence[int],
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        etags: Sequence[str] = (),
        versioning: Versioning = "",
    ) -> Record:
        """Makes the object of these parts, in this order; copies nothing. The upload and other parts are gone
        after.

        `etags`: what each part must still be. Raises NoSuchUploadError, InvalidPartError, condition errors.
        """
        ...

    async def abort_upload(self, upload: Upload) -> int:
        """Drops the upload and its parts; the stamp of its end. Raises NoSuchUploadError."""
        ...

    def replica_writer(self, bucket: str, key: str, *, size: int | None) -> ReplicaWriter:
        """A writer for a version or a part that another node has stored."""
        ...

    async def apply_change(self, change: Change) -> Applied:
        """Enters what another node says of a name; in any order and any number of times. Durable when it
        returns.

        Raises ReplicaLacksError when the bytes that it is about are not here.
        """
        ...

    async def raise_fence(self, epoch: int) -> None:
        """No process of this node decides by a map before `epoch` any more: what such a map decided is
        committed by now, or never. See `epochs`."""
        ...

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        """Returns when every node that must have a name has what is here of it, or its removal, and `record`
        in particular, a version of it. A store of its own has nobody to tell. Raises NotReplicatedError."""
        ...

    async def check_conditions(self, bucket: str, key: str, conditions: Conditions) -> None:
        """Raises ConditionFailedError or ConditionMissingError if the conditions of a write do not hold now,
        and every node that must have the name has what they were checked against. Raises NotReplicatedError.
        """
        ...

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        """The stamp of the deletion that is remembered of a name's null version, or of the version or upload
        with this id; 0 when there is none."""
        ...

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        """The ids of versions of a name whose removals have higher stamps than `after`, and these stamps: not
        all where thousands are remembered of the name."""
        ...

    def revision(self) -> int:
        """Rises with every write or deletion of any process; equal numbers mean that every name still stands
        for the same bytes."""
        ...

    def stats(self) -> StoreStats:
        """Counts and bytes now."""
        ...
