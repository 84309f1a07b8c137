"""Dispatches each S3 operation to its service.

One table maps the operation's type to a few lines. XML request bodies are parsed here, because further down
they are no longer bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from meshd.core.api_errors import retry_if_written_back
from meshd.objects.archive_upload import MAX_ARCHIVE_BYTES, OBJECTS_HEADER, unpack_options
from meshd.objects.object_metadata import attributes_from_record, object_attributes
from meshd.server.proxy.fan_out import AIM_KEYS
from meshd.server.s3.post_object import PostObjectHandler
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3 import xml_documents
from meshwire.s3.result_types import CopyResult, ObjectStored
from meshwire.s3.settings_xml import parse_tagging

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from meshd.objects.archive_upload import UnpackOptions
    from meshd.reads.copy_source import RemoteCopySources
    from meshd.server.s3.request_auth import Authenticator, RequestAdmission, S3Call
    from meshd.server.services import ServerServices
    from meshd.store.records import Record
    from meshwire.s3.result_types import DeleteResult, Result

_NO_DIGESTS = BodyDigests()
_ABOUT_BUCKETS = (ops.CreateBucket, ops.DeleteBucket, ops.PutBucketSetting, ops.DeleteBucketSetting)


class OperationDispatcher:
    """Executes operations. One per process; stateless."""

    def __init__(
        self, deps: ServerServices, admission: RequestAdmission, authenticator: Authenticator
    ) -> None:
        self._deps, self._admission = deps, admission
        self._forms = PostObjectHandler(deps, authenticator)
        self._table: Mapping[type, Callable[[S3Call], Awaitable[Result]]] = {
            ops.ListBuckets: self._list_buckets,
            ops.CreateBucket: self._create_bucket,
            ops.HeadBucket: self._head_bucket,
            ops.DeleteBucket: self._delete_bucket,
            ops.GetBucketLocation: self._bucket_location,
            ops.GetBucketSetting: self._get_setting,
            ops.PutBucketSetting: self._put_setting,
            ops.DeleteBucketSetting: self._delete_setting,
            ops.Preflight: self._preflight,
            ops.ListObjects: self._list_objects,
            ops.ListObjectVersions: self._list_versions,
            ops.ListMembers: self._list_members,
            ops.PutObject: self._put,
            ops.PostObject: self._post,
            ops.CopyObject: self._copy,
            ops.DeleteObject: self._delete,
            ops.DeleteObjects: self._delete_many,
            ops.GetObjectTagging: self._get_tags,
            ops.GetObjectAcl: self._get_object_acl,
            ops.PutObjectAcl: self._put_object_acl,
            ops.PutObjectTagging: self._put_tags,
            ops.DeleteObjectTagging: self._delete_tags,
            ops.GetObjectAttributes: self._attributes,
            ops.CreateMultipartUpload: self._create_upload,
            ops.UploadPart: self._put_part,
            ops.UploadPartCopy: self._copy_part,
            ops.CompleteMultipartUpload: self._complete,
            ops.AbortMultipartUpload: self._abort,
            ops.ListParts: self._list_parts,
            ops.ListMultipartUploads: self._list_uploads,
        }

    @property
    def _single_node(self) -> bool:
        return self._deps.mesh.single_node

    async def __call__(self, call: S3Call) -> Result:
        """Execute the operation and return its result. Raises S3Error."""
        call.born = self._deps.versions.bucket_created(getattr(call.operation, "bucket", ""))
        call.operation = await self._deps.views.redirect(self._deps.acls.resolve_operation(call.operation))
        if self._deps.backed is not None:
            self._deps.backed.check(call.operation)
        carry_out = self._table.get(type(call.operation))
        if carry_out is None:
            raise S3Error("NotImplemented", f"{ops.operation_name(call.operation)} is not implemented.")
        result = await carry_out(call)
        if (
            not self._single_node
            and self._deps.bucket_changes is not None
            and isinstance(call.operation, _ABOUT_BUCKETS)
        ):
            await self._deps.bucket_changes.broadcast()
        return result

    async def _document(self, call: S3Call, digests: BodyDigests, limit: int = 0) -> bytes:
        """Return the whole body. The signer is admitted again afterwards, since it may have taken hours to
        arrive."""
        document = await call.body.whole(digests, limit or self._deps.http.max_xml_bytes)
        call.signer = self._admission.readmit(call.head, call.admitted, call.signer, call.context)
        return document

    # --- buckets ------------------------------------------------------------------------------------

    async def _list_buckets(self, call: S3Call) -> Result:
        return self._deps.buckets.list_buckets(cast("ops.ListBuckets", call.operation), call.identity)

    async def _create_bucket(self, call: S3Call) -> Result:
        document = await self._document(call, _NO_DIGESTS)
        new = xml_documents.parse_create_bucket(document)
        operation = cast("ops.CreateBucket", call.operation)
        return await self._deps.buckets.create_bucket(operation, call.identity, new)

    async def _head_bucket(self, call: S3Call) -> Result:
        return self._deps.buckets.head_bucket(cast("ops.HeadBucket", call.operation))

    async def _delete_bucket(self, call: S3Call) -> Result:
        operation = cast("ops.DeleteBucket", call.operation)
        return await self._deps.buckets.delete_bucket(operation, context=call.write_context)

    async def _bucket_location(self, call: S3Call) -> Result:
        return self._deps.buckets.get_location(cast("ops.GetBucketLocation", call.operation))

    async def _get_setting(self, call: S3Call) -> Result:
        return self._deps.settings.get_setting(cast("ops.GetBucketSetting", call.operation))

    async def _put_setting(self, call: S3Call) -> Result:
        operation = cast("ops.PutBucketSetting", call.operation)
        document = await self._document(call, operation.digests)
        return await self._deps.settings.put_setting(operation, document)

    async def _delete_setting(self, call: S3Call) -> Result:
        return await self._deps.settings.delete_setting(cast("ops.DeleteBucketSetting", call.operation))

    async def _preflight(self, call: S3Call) -> Result:
        return self._deps.buckets.preflight(cast("ops.Preflight", call.operation))

    async def _list_objects(self, call: S3Call) -> Result:
        operation = cast("ops.ListObjects", call.operation)
        if self._deps.backed is not None and (backed := await self._deps.backed.list_objects(operation)):
            return backed
        page = await self._deps.views.list_page(operation)
        if page is None:
            page = await self._deps.members.list_member_keys(
                operation, partial(self._may_read, call, operation.bucket)
            )
        if page is not None:
            return page
        return await self._deps.listings.list_objects(operation)

    def _may_read(self, call: S3Call, bucket: str, key: str) -> bool:
        access = self._deps.access
        return access.allows(call.identity, "s3:GetObject", bucket, key, context=call.context)

    async def _list_members(self, call: S3Call) -> Result:
        return await self._deps.members.list_members(cast("ops.ListMembers", call.operation))

    async def _list_versions(self, call: S3Call) -> Result:
        return await self._deps.listings.list_versions(cast("ops.ListObjectVersions", call.operation))

    # --- objects ------------------------------------------------------------------------------------

    async def _put(self, call: S3Call) -> Result:
        call.body.require_length()
        operation = cast("ops.PutObject", call.operation)
        options = unpack_options(operation.headers.metadata)
        if options is not None:
            return await self._put_archive(call, operation, options)
        return await self._deps.objects.put_object(
            operation, call.identity, call.body, context=call.write_context
        )

    async def _put_archive(self, call: S3Call, operation: ops.PutObject, options: UnpackOptions) -> Result:
        def authorize(put: ops.PutObject) -> None:
            self._deps.access.authorize(call.identity, put, call.context)

        uploads = self._deps.archive_uploads
        uploads.check(operation, call.body.size)
        data = await self._document(call, operation.digests, MAX_ARCHIVE_BYTES)
        call.trace.keys = await uploads.put_archive(
            operation,
            options,
            call.identity,
            data,
            authorize,
            born=call.born,
            context=call.write_context,
        )
        digest = call.body.digest()
        made = {OBJECTS_HEADER: str(len(call.trace.keys))}
        return ObjectStored(digest.md5_hex, dict(digest.checksums), extra=made)

    async def _post(self, call: S3Call) -> Result:
        return await self._forms(call, cast("ops.PostObject", call.operation))

    async def _copy(self, call: S3Call) -> Result:
        return await retry_if_written_back(partial(self._copy_found, call))

    async def _copy_found(self, call: S3Call) -> Result:
        operation = cast("ops.CopyObject", call.operation)
        if call.remote_source is not None and self._deps.copy_sources is not None:
            return await self._copy_remote(call, operation, call.remote_source, self._deps.copy_sources)
        made = None if self._deps.backed is None else await self._deps.backed.copy_as_upload(operation)
        if made is None:
            made = await self._deps.members.member_as_upload(operation) or await self._deps.views.plan_copy(
                operation
            )
        self._deps.versions.require_same_bucket(operation.bucket, call.born)
        if made is None:
            return await self._deps.objects.copy_object(operation, call.identity, context=call.write_context)
        stored = await self._deps.objects.put_object(
            made[0], call.identity, made[1], context=call.write_context
        )
        now = self._deps.clock.now_ms()
        return CopyResult(
            stored.etag, now, stored.checksums, stored.checksum_type, stored.version, extra=stored.extra
        )

    async def _copy_remote(
        self, call: S3Call, operation: ops.CopyObject, record: Record, far: RemoteCopySources
    ) -> Result:
        put, body = await far.copy_as_upload(operation, record)
        self._deps.versions.require_same_bucket(operation.bucket, call.born)
        stored = await self._deps.objects.put_object(put, call.identity, body, context=call.write_context)
        return CopyResult(
            stored.etag,
            self._deps.clock.now_ms(),
            stored.checksums,
            stored.checksum_type,
            stored.version,
            self._deps.versions.version_header(operation.source.bucket, record),
            stored.extra,
        )

    async def _delete(self, call: S3Call) -> Result:
        operation = cast("ops.DeleteObject", call.operation)
        return await self._deps.deleter.delete_object(operation, context=call.write_context)

    async def _delete_many(self, call: S3Call) -> Result:
        operation = cast("ops.DeleteObjects", call.operation)
        document = await self._document(call, operation.digests)
        request, hop, scatterer = xml_documents.parse_delete(document), call.hop, self._deps.fan_out
        here = partial(self._delete_here, call, operation)
        if self._single_node or scatterer is None:
            return await here(request)
        if hop is not None and hop.aim == AIM_KEYS:
            return await here(scatterer.local_keys(operation.bucket, request, hop))
        return await scatterer.delete_keys(call.request, operation, request, here, call.write_context)

    async def _delete_here(
        self, call: S3Call, operation: ops.DeleteObjects, request: xml_documents.DeleteRequest
    ) -> DeleteResult:
        call.trace.keys = tuple(key.key for key in request.keys)
        allowed, refused = await self._deps.access.filter_deletions(
            call.identity, operation.bucket, request.keys, call.context
        )
        request = request._replace(keys=allowed)
        done = await self._deps.deleter.delete_objects(operation, request, context=call.write_context)
        return replace(done, failures=done.failures + refused)

    async def _get_tags(self, call: S3Call) -> Result:
        return self._deps.tagging.get_tags(cast("ops.GetObjectTagging", call.operation))

    async def _put_tags(self, call: S3Call) -> Result:
        operation = cast("ops.PutObjectTagging", call.operation)
        document = await self._document(call, operation.digests)
        tags = parse_tagging(document)
        # Now that the tags are known.
        self._deps.access.authorize(call.identity, operation, call.context, tags)
        return await self._deps.tagging.put_tags(operation, tags, context=call.write_context)

    async def _delete_tags(self, call: S3Call) -> Result:
        operation = cast("ops.DeleteObjectTagging", call.operation)
        return await self._deps.tagging.delete_tags(operation, context=call.write_context)

    async def _attributes(self, call: S3Call) -> Result:
        operation = cast("ops.GetObjectAttributes", call.operation)
        record = await self._deps.views.find_record(operation)
        if record is None and self._deps.backed is not None:
            record = await self._deps.backed.head_record(operation.bucket, operation.key)
        return (
            object_attributes(self._deps.versions, operation)
            if record is None
            else attributes_from_record(record, operation)
        )

    async def _get_object_acl(self, call: S3Call) -> Result:
        return self._deps.object_acls.get_acl(cast("ops.GetObjectAcl", call.operation))

    async def _put_object_acl(self, call: S3Call) -> Result:
        operation = cast("ops.PutObjectAcl", call.operation)
        document = await self._document(call, operation.digests)
        return await self._deps.object_acls.put_acl(operation, document, context=call.write_context)

    # --- multipart ----------------------------------------------------------------------------------

    async def _create_upload(self, call: S3Call) -> Result:
        operation = cast("ops.CreateMultipartUpload", call.operation)
        return await self._deps.uploads.create_upload(operation, call.identity, context=call.write_context)

    async def _put_part(self, call: S3Call) -> Result:
        call.body.require_length()
        operation = cast("ops.UploadPart", call.operation)
        return await self._deps.uploads.put_part(operation, call.body, context=call.write_context)

    async def _copy_part(self, call: S3Call) -> Result:
        return await retry_if_written_back(partial(self._copy_part_found, call))

    async def _copy_part_found(self, call: S3Call) -> Result:
        operation = cast("ops.UploadPartCopy", call.operation)
        if call.remote_source is not None and self._deps.copy_sources is not None:
            part = await self._deps.copy_sources.copy_as_part(operation, call.remote_source)
            done = await self._deps.uploads.put_part(*part, context=call.write_context)
            version = self._deps.versions.version_header(operation.source.bucket, call.remote_source)
            return CopyResult(done.etag, self._deps.clock.now_ms(), done.checksums, "", "", version)
        made = None if self._deps.backed is None else await self._deps.backed.copy_as_part(operation)
        if made is None:
            made = await self._deps.members.member_as_part(operation)
        if made is None:
            made = await self._deps.views.plan_part_copy(operation)
        if made is None:
            return await self._deps.uploads.copy_part(operation, context=call.write_context)
        stored = await self._deps.uploads.put_part(*made, context=call.write_context)
        return CopyResult(stored.etag, self._deps.clock.now_ms(), stored.checksums)

    async def _complete(self, call: S3Call) -> Result:
        operation = cast("ops.CompleteMultipartUpload", call.operation)
        # x-amz-checksum-* of a completion belong to the object, not to this document.
        document = await self._document(call, _NO_DIGESTS)
        parts = xml_documents.parse_complete(document)
        done = await self._deps.uploads.complete_upload(operation, parts, context=call.write_context)
        return replace(done, location=call.url(operation.bucket, operation.key))

    async def _abort(self, call: S3Call) -> Result:
        operation = cast("ops.AbortMultipartUpload", call.operation)
        return await self._deps.uploads.abort_upload(operation, context=call.write_context)

    async def _list_parts(self, call: S3Call) -> Result:
        return self._deps.uploads.list_parts(cast("ops.ListParts", call.operation))

    async def _list_uploads(self, call: S3Call) -> Result:
        return await self._deps.listings.list_uploads(cast("ops.ListMultipartUploads", call.operation))
