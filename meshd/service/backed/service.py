"""Backed buckets as the S3 endpoint sees them: what they can do, and what becomes of each operation.

Law: one table of what an origin can keep; the rest is refused with a sentence, never done in part.
"""

from __future__ import annotations

import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from meshd.kit.tasks import Tasks
from meshd.origin.errors import OriginError
from meshd.origin.interface import Facts
from meshd.origin.remote import checked
from meshd.service.backed.reading import told
from meshd.service.caching.shelf import record_of
from meshd.service.remote.continuing import CutShortError
from meshd.service.semantics.bodies import MAX_PUT_BYTES
from meshd.service.semantics.copying import checked_source, judge_source, part_range
from meshd.service.semantics.translation import store_errors
from meshd.service.views.copies import MadeBody, as_part, as_upload
from meshd.service.views.kinds import Made
from meshd.store.errors import ConditionFailedError, ConditionMissingError, StoreError
from meshd.store.records import NULL
from meshwire.conditions import Conditions
from meshwire.s3 import operations as ops
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.service.backed.bringing import Bringer
    from meshd.service.backed.listing import BackedListings
    from meshd.service.backed.reading import BackedReader
    from meshd.service.backed.sharing import Crew
    from meshd.service.caching.fetching import Keeper
    from meshd.service.caching.shelf import Shelf
    from meshd.service.semantics.found import Found
    from meshd.service.views.dispatch import Assembled
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshd.store.store import Store
    from meshwire.s3.results import ObjectListing

_log = logging.getLogger("meshd.origins")
_READS = (
    ops.GetObject,
    ops.GetObjectAttributes,
    ops.ListObjects,
    ops.ListMembers,
    ops.HeadBucket,
    ops.DeleteBucket,
    ops.GetBucketLocation,
    ops.GetBucketSetting,
    ops.PutBucketSetting,
    ops.DeleteBucketSetting,
    ops.Preflight,
    ops.GetObjectAcl,
)
_WRITES = (
    ops.PutObject,
    ops.PostObject,
    ops.CopyObject,
    ops.DeleteObject,
    ops.DeleteObjects,
    ops.CreateMultipartUpload,
    ops.UploadPart,
    ops.UploadPartCopy,
    ops.CompleteMultipartUpload,
)
_UPLOADS = (ops.AbortMultipartUpload, ops.ListParts, ops.ListMultipartUploads)
_SETTINGS_REFUSED = frozenset({"versioning", "lifecycle", "object-lock", "replication"})


class BackedService:
    """One a process."""

    def __init__(
        self,
        store: Store,
        shared: ObjectStore,
        shelf: Shelf,
        crew: Crew,
        bringer: Bringer,
        reader: BackedReader,
        listings: BackedListings,
        mesh: Mesh,
    ) -> None:
        self._store, self._shared, self._shelf, self._crew = store, shared, shelf, crew
        self._mesh, self.bringer = mesh, bringer
        self.reader, self.listings = reader, listings
        self._tasks = Tasks("write-back")

    def __repr__(self) -> str:
        return f"<BackedService {self.reader!r}>"

    @property
    def shelf(self) -> Shelf:
        return self._shelf

    @property
    def keeper(self) -> Keeper:
        return self.reader.keeper

    def is_backed(self, bucket: str) -> bool:
        """Whether a bucket has an origin."""
        return self._shelf.backed(bucket) is not None

    def check(self, operation: ops.Operation) -> None:
        """Raises S3Error for what a backed bucket cannot do."""
        if isinstance(operation, ops.ListBuckets | ops.CreateBucket):
            return
        bucket = self._shelf.backed(operation.bucket)
        if bucket is None:
            return
        if isinstance(operation, ops.PutBucketSetting) and operation.setting in _SETTINGS_REFUSED:
            raise refused(bucket, f"has no {operation.setting} of its own")
        if isinstance(operation, _READS + _UPLOADS):
            return
        if not isinstance(operation, _WRITES):
            raise refused(bucket, f"cannot do {ops.operation_name(operation)}")
        assert bucket.origin is not None
        if bucket.origin.write == "off":
            raise S3Error("AccessDenied", f"{bucket.name} is backed by an origin that is only read.")
        self._check_write(bucket, operation)

    def _check_write(self, bucket: Bucket, operation: ops.Operation) -> None:
        key = getattr(operation, "key", None)
        if key is not None:
            try:
                checked(key)
            except OriginError as error:
                raise told(error, key) from error
        if getattr(operation, "conditions", None) is not None:
            raise refused(bucket, "takes no conditional writes: judge them at the origin")
        if getattr(operation, "tags", None):
            raise refused(bucket, "keeps no tags")
        acl = getattr(operation, "acl", None)
        if acl is not None and acl.canned not in {"private", "bucket-owner-full-control"}:
            raise refused(bucket, "keeps no ACLs of objects: use a bucket policy")
        if getattr(operation, "version", None) not in {None, NULL}:
            raise refused(bucket, "has no versions")

    # --- reading

    def leaves(self, operation: ops.GetObject) -> Callable[[], None] | None:
        """See `BackedReader.leaves`."""
        return self.reader.leaves(operation.bucket, operation.key)

    async def opened(self, operation: ops.GetObject) -> Assembled | None:
        """See `BackedReader.opened`."""
        return await self.reader.opened(operation)

    def rest(self, bucket: str, key: str, found: Found, sent: int) -> AsyncGenerator[bytes, None] | None:
        """What is left of an answer from the cache of which `sent` bytes are out, from the origin; None for
        one that was not. Raises CutShortError."""
        backed = self._shelf.backed(bucket)
        if backed is None or self._store.own(bucket, key) is not None:
            return None
        return self._rest(backed, key, found, sent)

    async def _rest(self, bucket: Bucket, key: str, found: Found, sent: int) -> AsyncGenerator[bytes, None]:
        record, offset = found.record, found.base + found.offset + sent
        facts = Facts(record.size, record.etag, record.modified, record.headers, record.metadata)
        pieces = self.reader.pieces(bucket, key, facts, offset, found.length - sent, torn=True)
        try:
            async with aclosing(pieces) as given:
                async for piece in given:
                    yield piece
        except S3Error as error:
            raise CutShortError(f"s3://{bucket.name}/{key} from byte {offset} on: {error.message}") from error

    async def listing(self, operation: ops.ListObjects) -> ObjectListing | None:
        """See `BackedListings.objects`."""
        return await self.listings.objects(operation)

    async def described(self, bucket: str, key: str) -> Record | None:
        """What an object is, for whoever wants no bytes; None where the store can say. Raises S3Error."""
        backed = self._shelf.backed(bucket)
        if backed is None or self._store.own(bucket, key) is not None:
            return None
        try:
            return record_of(backed, await self.reader.facts(backed, key))
        except OriginError as error:
            raise told(error, key) from error

    def dirty(self, bucket: Bucket, key: str) -> bool:
        """Whether this node has something that the origin does not have yet."""
        return self._store.own(bucket.name, key) is not None

    async def looked(self, bucket: Bucket, key: str) -> Facts:
        """What there is, here or at the origin. Raises OriginError, S3Error NoSuchKey."""
        own = self._store.own(bucket.name, key)
        if own is not None:
            return Facts(own.size, own.etag, own.modified)
        checked(key)
        return await self.reader.facts(bucket, key)

    async def made(self, bucket: str, key: str) -> Made | None:
        """An object of a backed bucket with its bytes, wherever they are; None for one that the store has."""
        record = await self.described(bucket, key)
        if record is None:
            return None
        backed = self._shelf.backed(bucket)
        assert backed is not None
        facts = Facts(record.size, record.etag, record.modified, record.headers, record.metadata)
        reader = self.reader
        return Made(record, lambda offset, length: reader.groups(backed, key, facts, offset, length))

    async def copied(self, operation: ops.CopyObject) -> tuple[ops.PutObject, MadeBody] | None:
        """A copy of an object of a backed bucket, as the upload that it is; None for the rest. Raises
        S3Error."""
        made = await self.made(operation.source.bucket, operation.source.key)
        if made is None:
            return None
        checked_source(made.record, operation, MAX_PUT_BYTES, versioned=False)
        return as_upload(operation, made.record), MadeBody(made)

    async def part_copied(self, operation: ops.UploadPartCopy) -> tuple[ops.UploadPart, MadeBody] | None:
        """A part made of (a range of) one, as the upload that it is; None for the rest. Raises S3Error."""
        made = await self.made(operation.source.bucket, operation.source.key)
        if made is None:
            return None
        judge_source(operation.source_conditions, made.record)
        return as_part(operation), MadeBody(made, *part_range(operation.range, made.record.size))

    # --- writing

    async def stored(self, bucket: str, key: str, record: Record) -> bool:
        """An object was committed to the durable store: its origin is to have it; False where there is none.

        Write-through waits, and takes the object away again when the origin does not have it. Raises S3Error.
        """
        backed = self._shelf.backed(bucket)
        if backed is None:
            return False
        assert backed.origin is not None
        if backed.origin.write == "back" and self._survives(bucket, key):
            await self._crew.of(bucket, key).forget(backed, key)
            self._tasks.spawn(self._behind(backed, key), "push")
            return True
        with store_errors():
            try:
                await self.bringer.push(backed, key)
            except OriginError as error:
                same = Conditions(if_match=(record.etag,))
                with suppress(ConditionFailedError, ConditionMissingError):  # replaced or removed meanwhile
                    await self._shared.delete_version(bucket, key, NULL, conditions=same)
                raise told(error, key) from error
        return True

    def _survives(self, bucket: str, key: str) -> bool:
        """Whether no single node's death loses what is only here: else it is written through."""
        return self._mesh.alone or len(self._mesh.route(bucket, key).writers) > 1

    async def push(self, bucket: Bucket, key: str) -> None:
        """See `Bringer.push`."""
        await self.bringer.push(bucket, key)

    async def _behind(self, bucket: Bucket, key: str) -> None:
        try:
            await self.bringer.push(bucket, key)
        except (OriginError, StoreError) as error:  # the steward tries again
            _log.warning("not at its origin yet", extra={"bucket": bucket.name, "why": str(error)})

    async def removed(self, bucket: str, key: str) -> bool:
        """Delete an object at its origin; False for a bucket without. Raises S3Error."""
        backed = self._shelf.backed(bucket)
        if backed is None:
            return False
        try:
            checked(key)
            with store_errors():
                await self.bringer.remove(backed, key)
        except OriginError as error:
            raise told(error, key) from error
        return True

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self.bringer.aclose()


def refused(bucket: Bucket, what: str) -> S3Error:
    """A backed bucket cannot do this."""
    return S3Error("NotImplemented", f"{bucket.name} is backed by an origin, and {what}.")
