"""Views, read: which kind of reader answers for which view.

Law: one table from a view's type to its reader, no kind is known here by name. What holds objects for a view
is a redirection, after admission; what is made while it is sent is answered and copied as if it were stored.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshd.service.semantics.bodies import MAX_PUT_BYTES
from meshd.service.semantics.copying import checked_source, judge_source, part_range
from meshd.service.semantics.found import found_of
from meshd.service.semantics.tearing import Tear
from meshd.service.semantics.translation import store_errors
from meshd.service.views import counting
from meshd.service.views.copies import MadeBody, as_part, as_upload
from meshd.service.views.failing import unreachable
from meshd.service.views.kinds import Kept, Made
from meshwire.s3 import operations as ops
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from meshd.service.semantics.found import Found
    from meshd.service.views.definitions import ViewDefinitions
    from meshd.service.views.kinds import ViewKind
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.s3.results import ObjectListing
    from meshwire.views import View

# Settings and listings of a view are a bucket's; these are answered from its results.
_READS = (ops.GetObject, ops.GetObjectAttributes)
_ALLOWED = (
    ops.ListObjects,
    ops.HeadBucket,
    ops.DeleteBucket,
    ops.GetBucketLocation,
    ops.GetBucketSetting,
    ops.PutBucketSetting,
    ops.DeleteBucketSetting,
    ops.Preflight,
)
_SETTINGS_REFUSED = frozenset({"versioning", "lifecycle"})


class Assembled(NamedTuple):
    """`groups`: the bytes of `found` as open files, a group at a time. `tear`: is told where one cannot be
    read to its end, if `groups` go on from there."""

    found: Found
    groups: AsyncGenerator[Sequence[Span], None]
    tear: Tear | None = None


class ViewReader:
    """The dispatcher. One a worker."""

    def __init__(
        self, store: ObjectStore, definitions: ViewDefinitions, kinds: Mapping[type, ViewKind[Any]]
    ) -> None:
        self._store, self._definitions, self._kinds = store, definitions, kinds

    def __repr__(self) -> str:
        return f"<ViewReader of {', '.join(sorted(kind.__name__ for kind in self._kinds))}>"

    def is_view(self, bucket: str) -> bool:
        """Whether a bucket is a view."""
        return self._definitions.find(bucket) is not None

    def _view(self, bucket: str) -> View | None:
        view = self._definitions.find(bucket)
        if view is not None:
            counting.reading(bucket)
        return view

    def leaves(self, operation: ops.GetObject) -> bool:
        """Whether `redirected` gives the operation back as it is. Raises like it."""
        return self._definitions.find(operation.bucket) is None

    async def redirected(self, operation: ops.Operation) -> ops.Operation:
        """The operation, reads of a view turned to the object that holds the result.

        Raises S3Error: MethodNotAllowed (a write to a view), NoSuchKey, UnprocessableSource, SlowDown.
        """
        if isinstance(operation, ops.ListBuckets | ops.CreateBucket):
            return operation
        if isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
            operation = await self._with_source(operation)
        view = self._view(operation.bucket)
        if view is None:
            return operation
        if isinstance(operation, _READS):
            found = await self._find(view, operation)
            if isinstance(found, Kept):
                return replace(operation, bucket=found.bucket, key=found.key, version=None)
            return operation  # see `described`
        setting = getattr(operation, "setting", "")
        wrong = isinstance(operation, ops.PutBucketSetting) and setting in _SETTINGS_REFUSED
        if wrong or not isinstance(operation, _ALLOWED):
            raise S3Error(
                "MethodNotAllowed",
                "This bucket is a view: it is read, and changes with its source.",
                extra={"Method": ops.operation_name(operation), "ResourceType": "VIEW"},
            )
        return operation

    async def _with_source(
        self, operation: ops.CopyObject | ops.UploadPartCopy
    ) -> ops.CopyObject | ops.UploadPartCopy:
        source = operation.source
        view = self._view(source.bucket)
        if view is None:
            return operation
        found = await self._kind(view).find(view, source.key)
        if isinstance(found, Kept):
            return replace(operation, source=ops.CopySource(found.bucket, found.key))
        return operation  # see `copied` and `part_copied`

    def _kind(self, view: View) -> ViewKind[Any]:
        return self._kinds[type(view)]

    async def _find(self, view: View, operation: ops.GetObject | ops.GetObjectAttributes) -> Kept | Made:
        if operation.version not in (None, "null"):
            raise S3Error("NoSuchVersion", extra={"Key": operation.key})
        return await self._kind(view).find(view, operation.key)

    async def opened(self, operation: ops.GetObject) -> Assembled | ops.GetObject:
        """What is put together while it is sent; for all that has an object, the read of that. Raises
        S3Error."""
        view = self._view(operation.bucket)
        if view is None:
            return operation
        made = await self._find(view, operation)
        if isinstance(made, Kept):
            return replace(operation, bucket=made.bucket, key=made.key, version=None)
        found = found_of(operation, made.record)
        if made.mended is None:
            return Assembled(found, made.groups(found.offset, found.length))
        tear = Tear()
        return Assembled(found, made.mended(tear, found.offset, found.length), tear)

    async def again(self, operation: ops.GetObject, etag: str) -> bytes | None:
        """The bytes of an object that is kept and cannot be read, made anew; None where the bucket is no
        view, or keeps none. Raises S3Error."""
        view = self._view(operation.bucket)
        kept = None if view is None else await self._find(view, operation)
        if not isinstance(kept, Kept):
            return None
        with unreachable():
            data = await kept.again()
        if await asyncio.to_thread(_md5, data) != etag:
            raise S3Error("SlowDown", f"{operation.key} was replaced meanwhile; ask again.")
        return data

    async def described(self, operation: ops.GetObjectAttributes) -> Record | None:
        """What is known of what is put together; None for all that has an object."""
        view = self._view(operation.bucket)
        if view is None:
            return None
        found = await self._find(view, operation)
        return found.record if isinstance(found, Made) else None

    async def copied(self, operation: ops.CopyObject) -> tuple[ops.PutObject, MadeBody] | None:
        """A copy of what is put together, as the upload that it is; None for a copy of what has an object
        (`redirected` has turned it to that)."""
        made = await self.made(operation.source.bucket, operation.source.key)
        if made is None:
            return None
        checked_source(made.record, operation, MAX_PUT_BYTES, versioned=False)
        return as_upload(operation, made.record), MadeBody(made)

    async def part_copied(self, operation: ops.UploadPartCopy) -> tuple[ops.UploadPart, MadeBody] | None:
        """A part made of (a range of) what is put together, as the upload that it is; None for the rest.
        Raises S3Error InvalidArgument."""
        made = await self.made(operation.source.bucket, operation.source.key)
        if made is None:
            return None
        judge_source(operation.source_conditions, made.record)
        return as_part(operation), MadeBody(made, *part_range(operation.range, made.record.size))

    # --- for whoever reads views without a request: jobs -------------------------------------------------

    async def made(self, bucket: str, key: str) -> Made | None:
        """An object of a view with its bytes, wherever they are; None when the bucket is no view. Raises
        S3Error."""
        view = self._view(bucket)
        if view is None:
            return None
        found = await self._kind(view).find(view, key)
        if isinstance(found, Made):
            return found
        with store_errors():
            record = self._store.get(found.bucket, found.key)
        if record is None:  # evicted this moment
            raise S3Error("SlowDown", f"{key} is being made again; ask again.")
        return Made(record, lambda offset, length: self._stored(record, offset, length))

    async def _stored(self, record: Record, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        with ExitStack() as stack:
            yield stack.enter_context(self._store.reading(record, offset, length))

    async def listing(self, operation: ops.ListObjects) -> ObjectListing | None:
        """A page of a view, None when the bucket is none. Raises S3Error."""
        view = self._view(operation.bucket)
        return None if view is None else await self._kind(view).listing(view, operation)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
