"""View dispatcher: routes reads of a view to the reader of its kind.

Law: one table maps view types to readers; the dispatcher knows no kind by name. A stored result becomes
a redirect after admission; an assembled object is answered and copied like a stored one.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshd.core.api_errors import store_errors
from meshd.core.read_source import LocalSource, ReadSource, memory_spans
from meshd.objects.object_reader import lookup_result
from meshd.views import view_kind
from meshd.views.copy_out import assembled_part, assembled_upload
from meshd.views.view_kind import AssembledObject, StoredResult, translate_peer_errors
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from meshd.core.object_io import LookupResult
    from meshd.core.read_source import FailoverRead
    from meshd.peer_reads.load_window import LoadWindow
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span
    from meshd.views.copy_out import AssembledBody
    from meshd.views.definitions import ViewDefinitions
    from meshd.views.view_kind import ViewKind
    from meshwire.s3.result_types import ObjectListing
    from meshwire.views.view_kinds import View

# Settings and listings of a view are those of its bucket; these reads are answered from its results.
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


class AssembledRead(NamedTuple):
    """`read`: the bytes of `found`."""

    found: LookupResult
    read: FailoverRead


class ViewDispatcher:
    """Dispatches reads of views, for a worker."""

    def __init__(
        self, store: ObjectStore, definitions: ViewDefinitions, kinds: Mapping[type, ViewKind[Any]]
    ) -> None:
        self._store, self._definitions, self._kinds = store, definitions, kinds

    def __repr__(self) -> str:
        return f"<ViewDispatcher of {', '.join(sorted(kind.__name__ for kind in self._kinds))}>"

    def is_view(self, bucket: str) -> bool:
        """Return whether a bucket is a view."""
        return self._definitions.find_view(bucket) is not None

    def _view(self, bucket: str) -> View | None:
        view = self._definitions.find_view(bucket)
        if view is not None:
            view_kind.set_current_view(bucket)
        return view

    async def redirect(self, operation: ops.Operation) -> ops.Operation:
        """Return the operation, with a read of a view redirected to the object that holds the result.

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
            if isinstance(found, StoredResult):
                return replace(operation, bucket=found.bucket, key=found.key, version=None)
            return operation  # an assembled object: see `open_read` and `find_record`
        setting = getattr(operation, "setting", "")
        wrong = isinstance(operation, ops.PutBucketSetting) and setting in _SETTINGS_REFUSED
        if wrong or not isinstance(operation, _ALLOWED):
            raise S3Error(
                "MethodNotAllowed",
                "This bucket is a view: it is read-only and changes with its source.",
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
        found = await self._kind(view).find_object(view, source.key)
        if isinstance(found, StoredResult):
            return replace(operation, source=ops.CopySource(found.bucket, found.key))
        return operation  # an assembled object: see `plan_copy` and `plan_part_copy`

    def _kind(self, view: View) -> ViewKind[Any]:
        return self._kinds[type(view)]

    async def _find(
        self, view: View, operation: ops.GetObject | ops.GetObjectAttributes
    ) -> StoredResult | AssembledObject:
        if operation.version not in (None, "null"):
            raise S3Error("NoSuchVersion", extra={"Key": operation.key})
        return await self._kind(view).find_object(view, operation.key)

    async def open_read(self, operation: ops.GetObject) -> AssembledRead | ops.GetObject:
        """Return the read of an assembled object, or the redirected operation for a stored one.

        Raises S3Error.
        """
        view = self._view(operation.bucket)
        if view is None:
            return operation
        made = await self._find(view, operation)
        if isinstance(made, StoredResult):
            return replace(operation, bucket=made.bucket, key=made.key, version=None)
        found = lookup_result(operation, made.record)
        read = made.open_range(found.offset, found.length, f"s3://{operation.bucket}/{operation.key}")
        return AssembledRead(found, read)

    async def rebuild_result(self, operation: ops.GetObject, etag: str) -> bytes | None:
        """Rebuild the bytes of a stored result that cannot be read.

        Returns None if the bucket is not a view or does not store its results. Raises S3Error.
        """
        view = self._view(operation.bucket)
        kept = None if view is None else await self._find(view, operation)
        if not isinstance(kept, StoredResult):
            return None
        with translate_peer_errors():
            data = await kept.rebuild()
        if await asyncio.to_thread(_md5, data) != etag:
            raise S3Error("SlowDown", f"{operation.key} was replaced during the read; retry.")
        return data

    async def find_record(self, operation: ops.GetObjectAttributes) -> Record | None:
        """Return the record of an assembled object; None for a stored one."""
        view = self._view(operation.bucket)
        if view is None:
            return None
        found = await self._find(view, operation)
        return found.record if isinstance(found, AssembledObject) else None

    async def plan_copy(self, operation: ops.CopyObject) -> tuple[ops.PutObject, AssembledBody] | None:
        """Return a copy of an assembled object as the upload that it amounts to.

        None for a copy of a stored object, which `redirect` has redirected.
        """
        made = await self.find_assembled(operation.source.bucket, operation.source.key)
        return None if made is None else assembled_upload(operation, made)

    async def plan_part_copy(
        self, operation: ops.UploadPartCopy
    ) -> tuple[ops.UploadPart, AssembledBody] | None:
        """Return a part copy of an assembled object, or of a range of one, as the upload that it amounts to.

        None for other sources. Raises S3Error InvalidArgument.
        """
        made = await self.find_assembled(operation.source.bucket, operation.source.key)
        return None if made is None else assembled_part(operation, made)

    # --- reads without a request, for jobs ---------------------------------------------------------------

    async def find_assembled(self, bucket: str, key: str) -> AssembledObject | None:
        """Return an object of a view with its bytes, stored or assembled; None if the bucket is not a view.

        Raises S3Error.
        """
        view = self._view(bucket)
        if view is None:
            return None
        found = await self._kind(view).find_object(view, key)
        if isinstance(found, AssembledObject):
            return found
        with store_errors():
            record = self._store.get(found.bucket, found.key)
        if record is None:  # just evicted
            raise S3Error("SlowDown", f"{key} is being rebuilt; retry.")

        async def add_places(window: LoadWindow, offset: int, length: int) -> None:
            window.add_range(found.bucket, found.key, record, offset, length)

        return AssembledObject(record, [LocalSource(self._store, record)], add_places=add_places)

    async def list_page(self, operation: ops.ListObjects) -> ObjectListing | None:
        """Return a page of a view, None if the bucket is not a view. Raises S3Error."""
        view = self._view(operation.bucket)
        return None if view is None else await self._kind(view).list_page(view, operation)


class RebuiltResultSource(ReadSource):
    """A view's stored result that cannot be read, made again. `operation`: the request for it."""

    label = "made"
    failures = (S3Error,)

    def __init__(self, views: ViewDispatcher, operation: ops.GetObject, etag: str) -> None:
        self._views, self._operation, self._etag = views, operation, etag

    def __repr__(self) -> str:
        return f"<RebuiltResultSource of {self._operation.bucket}/{self._operation.key[:80]}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        data = await self._views.rebuild_result(self._operation, self._etag)
        if data is not None:
            with memory_spans(data[offset : offset + length]) as spans:
                yield spans


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
