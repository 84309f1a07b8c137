"""Interfaces of the object store: StoreReader, StoreWriter, and ObjectStore, which is both and a replica.

`Store` implements them on disks; the tests' reference store implements them in memory. A process has
one store object and calls it from one event loop. Methods without `async` never wait for a disk write.
Invariant: a write becomes visible to `get` and `list` of every process exactly when it is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from meshd.store.records import INTERNAL_WRITE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.store.records import (
        EntryPage,
        Location,
        Meta,
        NewObject,
        Page,
        PartPage,
        Record,
        Removed,
        Span,
        StoreChanges,
        StoreStats,
        Upload,
        UploadPage,
        VersionPage,
        WriteContext,
    )
    from meshd.store.replica.changes import Applied, Change
    from meshd.store.writer_api import ObjectWriter, ReplicaWriter
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning


class StoreReader(Protocol):
    """Reads objects by (bucket, key), their versions, and multipart uploads.

    Keys are str without surrogates and NUL, at most 1024 bytes of UTF-8. A version is identified by its id,
    or by `null`.
    """

    def get(self, bucket: str, key: str) -> Record | None:
        """Returns the current object's record; None if there is none or the newest version is a delete
        marker.

        Takes microseconds, so it may be called on the event loop.
        """
        ...

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        """Returns exactly this version, which may be a delete marker; None if there is none or the id is
        malformed."""
        ...

    def newest_version(self, bucket: str, key: str) -> Record | None:
        """Returns the newest version, which may be a delete marker."""
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
        """Lists keys after `after` in UTF-8 byte order.

        A common prefix appears once, and only if it sorts after `after`. `slots`, here and in the other
        listings, restricts the listing to names in these hash slots: one byte per slot, nonzero if included
        (`meshwire.cluster.slot_of`).
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
        """Lists the same page as `list` in the form S3 shows it, several times faster for a thousand keys."""
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
        """Lists versions after (key_marker, version_marker), or after all versions of key_marker if the
        latter is "".

        A marker whose version was removed keeps its position, except a removed null version: then the listing
        repeats its key from the start.
        """
        ...

    def is_empty(self, bucket: str) -> bool:
        """Returns True if the bucket has no object, no other version and no upload in progress."""
        ...

    def open_spans(self, record: Record, offset: int, length: int) -> AbstractContextManager[Sequence[Span]]:
        """Opens the files that hold these bytes and yields their ranges. The spans stay valid inside the
        `with` block, even if the object is deleted meanwhile."""
        ...

    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> AbstractContextManager[Sequence[Sequence[Span] | None]]:
        """Opens many (record, offset, length) ranges at once, like `open_spans`. An entry is None if its
        bytes are gone or cannot be opened."""
        ...

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        """Reads the bytes and verifies whole extents. Raises CorruptExtentError, ExtentGoneError."""
        ...

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        """Reads like `read_range`, but returns None if the bytes span several extents or are not in the page
        cache."""
        ...

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        """Returns a span like `open_spans`, valid only until the caller next awaits or reads; None if the
        bytes span several extents or their file is not kept open."""
        ...

    def locate(self, record: Record) -> Sequence[Location]:
        """Returns paths and ranges for other processes; a file may be gone before it is opened."""
        ...

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        """Returns the upload in progress, or None."""
        ...

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        """Lists parts with numbers above `after`, in order."""
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
        """Lists uploads after (key_marker, id_marker); without an id, after all uploads of key_marker."""
        ...

    def revision(self) -> int:
        """Returns a number that rises with every write or deletion by any process, but for those of documents
        in the reserved bucket. Equal numbers mean that no name of a client has changed its bytes, also if
        one was read before a restart."""
        ...

    def changes_since(self, revision: int, bucket: str) -> StoreChanges | None:
        """Returns which names of a bucket may have changed since an earlier revision, and the revision until
        which it says so; None if that is not known any more. Also over restarts."""
        ...

    def stats(self) -> StoreStats:
        """Returns current counts and byte totals."""
        ...


class StoreWriter(Protocol):
    """Writes objects, versions and uploads, on this node or on every node that must have them."""

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        """Opens a writer for a new version. If `size` (bytes) is given, exactly that many bytes must be
        written."""
        ...

    async def put_many(
        self,
        bucket: str,
        objects: Sequence[NewObject],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Sequence[Record]:
        """Stores small objects, each with another key, and returns their records in the same order. Those
        that one node commits, all of them on a single node, become visible and durable together or not at
        all.

        Raises DiskFullError, DiskFailedError, MetadataTooLargeError, CorruptExtentError (bytes that do not
        match their crc32c).
        """
        ...

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        """Deletes the object. With versioning a delete marker hides it instead; with "Suspended" the marker
        replaces the null version. If the setting is "" but the object has a version id, the store behaves as
        if it were "Suspended".

        The deletion is durable when this returns. Raises the same errors as `ObjectWriter.commit`.
        """
        ...

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        """Deletes all these keys; missing keys are ignored. The deletions are durable when this returns."""
        ...

    async def delete_version(
        self,
        bucket: str,
        key: str,
        version: str,
        *,
        conditions: Conditions | None = None,
        stamp: int | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        """Removes this version for good. `record` of the result is None if it did not exist. Conditions apply
        to this version alone. With `stamp`, a version that has another one stays (ConditionFailedError): its
        ETag does not tell it from the same bytes with other metadata.

        If it was the newest, the next older version becomes the current object unless that is a delete
        marker.
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
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        """Changes the tags, the ACL or both of a version (None: the current object). Stamp, time and ETag
        stay the same.

        Raises NoSuchVersionError if the version does not exist or is a delete marker.
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
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        """Copies `source` to (bucket, key) with `meta`.

        Raises ExtentGoneError if the source was removed meanwhile.
        """
        ...

    async def create_upload(self, draft: Upload, *, context: WriteContext = INTERNAL_WRITE) -> Upload:
        """Begins a multipart upload; `draft` has no id yet. Ids rise with time, so a listing orders the
        uploads of a key by start."""
        ...

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        """Opens a writer for part `number` (1–10,000). The committed Record has size, etag, modified and
        checksums."""
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
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        """Makes an object of these parts in this order without copying bytes, and ends the upload; unused
        parts are dropped.

        `etags`: the ETag that each part must still have. Raises NoSuchUploadError, InvalidPartError, and the
        condition errors.
        """
        ...

    async def abort_upload(self, upload: Upload, *, context: WriteContext = INTERNAL_WRITE) -> int:
        """Drops the upload and its parts; returns the stamp of its end. Raises NoSuchUploadError."""
        ...

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        """Returns when every node that must hold a name has this node's state of it, or its removal; and also
        the version `record`, if given. A single-node store returns at once. Raises NotReplicatedError."""
        ...

    async def wait_upload_end_replicated(self, bucket: str, key: str, upload_id: str) -> None:
        """Returns when every node that must hold a name has the end of this upload, if this node has it. A
        single-node store returns at once. Raises NotReplicatedError."""
        ...

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        """Raises ConditionFailedError or ConditionMissingError if the conditions of a write do not hold now.
        When it returns, every node that must hold the name has the state that was checked. Raises
        NotReplicatedError."""
        ...


class ObjectStore(StoreReader, StoreWriter, Protocol):
    """The store of one node, which also accepts what other nodes have committed."""

    def close(self) -> None:
        """Commits pending writes and releases files. Idempotent."""
        ...

    def replica_writer(self, bucket: str, key: str, *, size: int | None) -> ReplicaWriter:
        """Opens a writer for a version or part that another node has committed."""
        ...

    async def apply_change(self, change: Change, *, context: WriteContext = INTERNAL_WRITE) -> Applied:
        """Applies a change received from another node. Changes may arrive in any order and repeatedly. The
        change is durable when this returns.

        Raises ReplicaLacksError if the bytes that it refers to are not on this node.
        """
        ...

    async def raise_fence(self, epoch: int) -> None:
        """Ensures that no process of this node commits a write under a cluster map older than `epoch`. When
        this returns, a write under an older map is either committed or will fail. See
        `WriteContext`.
        """
        ...

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        """Returns the stamp of the recorded deletion of a name's null version, or of the version or upload
        with id `what`; 0 if there is none."""
        ...

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        """Returns (id, stamp) of the removed versions of a name whose removal stamps are above `after`. The
        list may be incomplete if thousands are recorded for the name."""
        ...

    def ended_uploads(self, bucket: str, key: str) -> Sequence[tuple[str, int]]:
        """Returns (id, stamp) of the ended uploads of a name, the last end first. The list may be incomplete
        if thousands of removals are recorded for the name."""
        ...


class CacheLookup(Protocol):
    """Looks up objects of buckets that are backed by an origin, in the cache."""

    def get(self, bucket: str, key: str) -> Record | None:
        """Returns the record of a cached object, whose extents are in the cache's files. Raises
        NotCachedError for a bucket with an origin."""
        ...

    def require_listable(self, bucket: str) -> None:
        """Raises NotCachedError for a bucket with an origin, because no store can list it."""
        ...
