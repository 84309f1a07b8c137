"""Multipart uploads: create, upload and copy parts, list, complete, abort.

Completing an upload copies nothing: the store builds the object from the extents of its parts. ETag and
checksum of the whole follow from those of the parts alone.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.core.api_errors import store_errors
from meshd.core.object_io import MAX_PUT_BYTES, check_put_size
from meshd.objects.copy_object import check_source_conditions, copy_part_range, read_chunks, retry_if_moved
from meshd.objects.multipart_completion import check_parts, completed_meta, find_completed
from meshd.store.errors import NoSuchUploadError
from meshd.store.records import INTERNAL_WRITE, Meta, Upload
from meshwire.checksums import body_checksums as sums
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.s3.result_types import (
    CompleteResult,
    CopyResult,
    Owner,
    PartEntry,
    PartList,
    PartStored,
    UploadAborted,
    UploadCreated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.auth.identity import Identity
    from meshd.core.object_io import Body
    from meshd.objects.object_reader import VersionLookup
    from meshd.objects.service import ObjectService
    from meshd.store.api import StoreReader, StoreWriter
    from meshd.store.records import Record, WriteContext
    from meshd.store.writer_api import ObjectWriter
    from meshwire.s3.operations import (
        AbortMultipartUpload,
        CompleteMultipartUpload,
        CreateMultipartUpload,
        ListParts,
        UploadPart,
        UploadPartCopy,
    )
    from meshwire.s3.xml_documents import CompletedPart

PAGE_LIMIT = 1000
# With these, whole-object checksums can be computed from those of the parts; with the SHA family only a
# checksum of checksums can.
_COMBINABLE = ("crc32", "crc32c", "crc64nvme")


class UploadService:
    """The use cases of multipart uploads. One per process. `owner` returns the Owner of a user id."""

    def __init__(
        self,
        store: StoreReader,
        replicated: StoreWriter,
        objects: ObjectService,
        versions: VersionLookup,
        owner: Callable[[str], Owner] = Owner,
    ) -> None:
        self._owner = owner
        self._store, self._replicated = store, replicated
        self._objects, self._versions = objects, versions

    async def create_upload(
        self, operation: CreateMultipartUpload, identity: Identity, *, context: WriteContext = INTERNAL_WRITE
    ) -> UploadCreated:
        """Create an upload. Raises S3Error AccessDenied (unsigned request), InvalidRequest if the algorithm
        does not support the requested type of checksum."""
        if identity is ANONYMOUS_IDENTITY:
            raise S3Error(
                "AccessDenied", "Anonymous users cannot initiate multipart uploads. Please authenticate."
            )
        algorithm, kind = _checksum_plan(operation.checksum_algorithm, operation.checksum_type)
        born = self._versions.bucket_created(operation.bucket)
        with store_errors():
            draft = Upload(
                "",
                operation.bucket,
                operation.key,
                headers=dict(operation.headers.system),
                metadata=dict(operation.headers.metadata),
                checksum_algorithm=algorithm,
                checksum_type=kind,
                owner=self._versions.owner_for_write(operation.bucket, identity.user_id, operation.acl),
                tags=dict(operation.tags),
                acl=operation.acl,
                born=born,
            )
            upload = await self._replicated.create_upload(draft, context=context)
            if not self._versions.has_bucket(operation.bucket) or not self._versions.is_of_current_bucket(
                upload
            ):
                # the bucket was deleted, and perhaps created again
                await self._replicated.abort_upload(upload, context=context)
                raise S3Error("NoSuchBucket", extra={"BucketName": operation.bucket})
        told = algorithm if operation.checksum_algorithm else ""
        return UploadCreated(upload.bucket, upload.key, upload.upload_id, told, kind if told else "")

    async def put_part(
        self, operation: UploadPart, body: Body, *, context: WriteContext = INTERNAL_WRITE
    ) -> PartStored:
        """Store one part. A part that is sent again replaces the earlier one."""
        check_put_size(body.size)
        upload = await self._require_for_write(operation.bucket, operation.key, operation.upload_id)
        _check_algorithm(upload, operation.digests)
        with store_errors():
            writer = self._replicated.part_writer(upload, operation.part_number, body.size)
            try:
                await _receive_part(writer, body, operation.digests, upload.checksum_algorithm)
                digest = body.digest()
                meta = Meta(digest.md5_hex, checksums=dict(digest.checksums))
                record = await writer.commit(meta, context=context)
            except BaseException:
                await writer.abort()
                raise
        return PartStored(record.etag, record.checksums)

    async def copy_part(
        self, operation: UploadPartCopy, *, context: WriteContext = INTERNAL_WRITE
    ) -> CopyResult:
        """Store (a range of) an object as a part. Raises S3Error NoSuchKey, InvalidArgument."""
        upload = await self._require_for_write(operation.bucket, operation.key, operation.upload_id)
        source, record = await retry_if_moved(
            lambda: self._copy_part(operation, upload, context), operation.source
        )
        version = self._versions.version_header(operation.source.bucket, source)
        return CopyResult(record.etag, record.modified, record.checksums, "", "", version)

    async def _copy_part(
        self, operation: UploadPartCopy, upload: Upload, context: WriteContext
    ) -> tuple[Record, Record]:
        source = self._versions.find_copy_source(operation.source)
        check_source_conditions(operation.source_conditions, source)
        offset, length = copy_part_range(operation.range, source.size)
        check_put_size(length)
        writer = self._replicated.part_writer(upload, operation.part_number, length)
        try:
            meta = await self._fill(writer, upload, source, offset, length)
            record = await writer.commit(meta, context=context)
        except BaseException:
            await writer.abort()
            raise
        return source, record

    async def _fill(
        self, writer: ObjectWriter, upload: Upload, source: Record, offset: int, length: int
    ) -> Meta:
        algorithm = upload.checksum_algorithm or sums.DEFAULT_ALGORITHM
        verifier = sums.BodyVerifier(BodyDigests(), extra=(algorithm,))
        async with aclosing(read_chunks(self._store, source, offset, length)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(verifier.update, piece)
                await writer.write(piece)
        digest = verifier.finish()
        return Meta(digest.md5_hex, checksums=dict(digest.checksums))

    async def complete_upload(
        self,
        operation: CompleteMultipartUpload,
        parts: Sequence[CompletedPart],
        *,
        context: WriteContext = INTERNAL_WRITE,
    ) -> CompleteResult:
        """Create the object from its parts. Completing a completed upload again succeeds, because clients
        retry.

        Raises S3Error NoSuchUpload, InvalidPart, InvalidPartOrder, EntityTooSmall, BadDigest, InvalidRequest,
        PreconditionFailed.
        """
        with store_errors():
            found = self._in_progress(operation.bucket, operation.key, operation.upload_id)
            if found is None:
                await self._replicated.wait_upload_end_replicated(
                    operation.bucket, operation.key, operation.upload_id
                )
                record = self._become(operation, parts)
                await self._replicated.wait_replicated(operation.bucket, operation.key, record)
                return self._complete_result(operation, record)
            upload, arrived = found
            stored = check_parts(arrived, parts)
            through = self._objects.writes_through(operation.bucket)
            meta = completed_meta(upload, stored, operation, through=through)
            try:
                record = await self._replicated.complete_upload(
                    upload,
                    [part.number for part in stored],
                    meta,
                    operation.conditions,
                    etags=[part.etag for part in stored],
                    versioning=self._versions.versioning_of(operation.bucket),
                    context=context,
                )
            except NoSuchUploadError:  # another request completed or aborted it meanwhile
                return self._complete_result(operation, self._become(operation, parts))
        await self._objects.finish_write(operation.bucket, operation.key, record, context=context)
        return self._complete_result(operation, record)

    def _become(self, operation: CompleteMultipartUpload, parts: Sequence[CompletedPart]) -> Record:
        """Return the object that the upload became: the newest version of its key with that ETag."""
        bucket, key = operation.bucket, operation.key
        if not self._versions.versioning_of(bucket):
            return find_completed([self._store.get(bucket, key)], operation.upload_id, parts)
        page = self._store.list_versions(bucket, prefix=key, limit=PAGE_LIMIT)
        versions = [record for name, record in page.entries if name == key]
        return find_completed(versions, operation.upload_id, parts)

    def _complete_result(self, operation: CompleteMultipartUpload, record: Record) -> CompleteResult:
        bucket, key = operation.bucket, operation.key
        sums, kind = record.checksums, record.checksum_type
        extra = self._versions.expiration_headers(bucket, key, record)
        return CompleteResult(bucket, key, record.etag, "", sums, kind, record.version, extra)

    async def abort_upload(
        self, operation: AbortMultipartUpload, *, context: WriteContext = INTERNAL_WRITE
    ) -> UploadAborted:
        upload = await self._require_for_write(operation.bucket, operation.key, operation.upload_id)
        with store_errors():
            await self._replicated.abort_upload(upload, context=context)
        return UploadAborted()

    def list_parts(self, operation: ListParts) -> PartList:
        """Return a page of the parts received so far."""
        upload = self.require_upload(operation.bucket, operation.key, operation.upload_id)
        limit = min(operation.max_parts, PAGE_LIMIT)
        if limit <= 0:
            return PartList(owner=self._owner(upload.owner))
        with store_errors():
            page = self._store.list_parts(upload, operation.part_number_marker, limit)
        # The end of the upload removes its parts.
        self.require_upload(operation.bucket, operation.key, operation.upload_id)
        parts = tuple(PartEntry(p.number, p.size, p.etag, p.modified, p.checksums) for p in page.parts)
        return PartList(
            parts, page.truncated, self._owner(upload.owner), upload.checksum_algorithm, upload.checksum_type
        )

    def require_upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        """Return the upload in progress. Raises S3Error NoSuchUpload, also for one of an earlier bucket of
        that name."""
        with store_errors():
            upload = self._store.get_upload(bucket, key, upload_id)
        if upload is None or not self._versions.is_of_current_bucket(upload):
            raise S3Error("NoSuchUpload", extra={"UploadId": upload_id})
        return upload

    async def _require_for_write(self, bucket: str, key: str, upload_id: str) -> Upload:
        """Return the upload in progress, as `require_upload`. If it has ended, every node has the end before
        the client is told. Raises S3Error NoSuchUpload, SlowDown."""
        try:
            return self.require_upload(bucket, key, upload_id)
        except S3Error:
            with store_errors():
                await self._replicated.wait_upload_end_replicated(bucket, key, upload_id)
            raise

    def _in_progress(
        self, bucket: str, key: str, upload_id: str
    ) -> tuple[Upload, dict[int, PartEntry]] | None:
        """Return an upload with its parts, or None when it has ended. Another process may end it, and so
        remove its parts, between two reads here; so the upload must still exist after the parts were read."""
        upload = self._store.get_upload(bucket, key, upload_id)
        if upload is None or not self._versions.is_of_current_bucket(upload):
            return None
        parts = self._all_parts(upload)
        return None if self._store.get_upload(bucket, key, upload_id) is None else (upload, parts)

    def _all_parts(self, upload: Upload) -> dict[int, PartEntry]:
        found: dict[int, PartEntry] = {}
        after, more = 0, True
        while more:
            page = self._store.list_parts(upload, after, PAGE_LIMIT)
            for part in page.parts:
                found[part.number] = PartEntry(
                    part.number, part.size, part.etag, part.modified, part.checksums
                )
            after, more = page.next_after, page.truncated
        return found


async def _receive_part(writer: ObjectWriter, body: Body, digests: BodyDigests, algorithm: str) -> None:
    total = 0
    async for piece in body.pieces(digests, (algorithm,) if algorithm else ()):
        total += len(piece)
        if total > MAX_PUT_BYTES:
            check_put_size(total)
        await writer.write(piece)


def _checksum_plan(algorithm: str | None, kind: str | None) -> tuple[str, str]:
    """Return the (algorithm, type) of an upload's checksum; S3's defaults where the client names none."""
    if algorithm is None:
        if kind == "COMPOSITE":
            raise S3Error("InvalidRequest", "The COMPOSITE checksum type needs x-amz-checksum-algorithm.")
        return sums.DEFAULT_ALGORITHM, "FULL_OBJECT"
    if kind is None:
        kind = "FULL_OBJECT" if algorithm == "crc64nvme" else "COMPOSITE"
    fits = algorithm in _COMBINABLE if kind == "FULL_OBJECT" else algorithm != "crc64nvme"
    if not fits:
        name = algorithm.upper()
        raise S3Error(
            "InvalidRequest", f"The {kind} checksum type cannot be used with the {name} checksum algorithm."
        )
    return algorithm, kind


def _check_algorithm(upload: Upload, digests: BodyDigests) -> None:
    """Require that a part brings the checksum algorithm of its upload. Any algorithm is accepted where the
    upload named none and so has S3's default."""
    given = set(digests.checksums) | set(digests.trailer)
    named = upload.checksum_algorithm != sums.DEFAULT_ALGORITHM
    if named and upload.checksum_algorithm and given and upload.checksum_algorithm not in given:
        raise S3Error(
            "InvalidRequest",
            f"Checksum Type mismatch occurred, expected checksum Type: {upload.checksum_algorithm}, "
            f"actual checksum Type: {sorted(given)[0]}",
        )
