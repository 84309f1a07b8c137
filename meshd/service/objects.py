"""Objects: found, read, stored, copied, deleted.

Law: a read holds what it opened, whatever happens to the name meanwhile; a write is visible when it is
durable, and only if every digest matched. Invariant: memory a request does not grow with the object.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.service.copying import checked_source, checksums_of, copied_meta
from meshd.service.translation import store_errors, translate
from meshd.store.errors import ExtentGoneError, StoreError
from meshd.store.records import Meta
from meshwire.conditions import Conditions, judge_read, judge_write
from meshwire.names import KeyNameError, check_key
from meshwire.s3.errors import S3Error
from meshwire.s3.rendering import not_modified, select_window
from meshwire.s3.results import (
    CopyResult,
    DeletedKey,
    DeleteFailure,
    DeleteResult,
    ObjectDeleted,
    ObjectHead,
    ObjectStored,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshd.control.buckets import BucketTable
    from meshd.service.access import Identity
    from meshd.service.bodies import Body
    from meshd.store.interface import ObjectStore, ObjectWriter
    from meshd.store.records import Record, Span
    from meshwire.s3.documents import DeleteKey, DeleteRequest
    from meshwire.s3.operations import CopyObject, DeleteObject, DeleteObjects, GetObject, PutObject

MAX_PUT_BYTES = 5 << 30  # a single PUT or part, and the source of a copy


@dataclass(frozen=True, slots=True)
class Found:
    """An object to be answered: `length` bytes from `offset`; `partial` when a range or a part was asked
    for."""

    record: Record
    head: ObjectHead
    offset: int
    length: int
    partial: bool


class ObjectService:
    """The use cases of whole objects. One per process."""

    def __init__(self, store: ObjectStore, buckets: BucketTable) -> None:
        self._store, self._buckets = store, buckets

    # --- reading ------------------------------------------------------------------------------------

    def find(self, operation: GetObject) -> Found:
        """What GET or HEAD answers. Raises S3Error NoSuchKey, NotModified, PreconditionFailed, InvalidRange,
        InvalidPartNumber."""
        if operation.version not in (None, "null"):
            raise S3Error("NoSuchVersion", extra={"Key": operation.key, "VersionId": operation.version or ""})
        record = self.record(operation.bucket, operation.key)
        if operation.conditions is not None:
            _judge(operation.conditions, record)
        if operation.part_number is not None:
            return _find_part(record, operation)
        window = select_window(operation, record.size)
        if window is None:
            head = _object_head(record, record.checksums, record.checksum_type)
            return Found(record, head, 0, record.size, partial=False)
        return Found(record, _object_head(record), *window, partial=True)

    def record(self, bucket: str, key: str) -> Record:
        """The object's record. Raises S3Error NoSuchKey."""
        try:
            record = self._store.get(bucket, key)
        except StoreError as error:
            raise translate(error) from error
        if record is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return record

    def read(self, operation: GetObject, found: Found) -> bytes:
        """The bytes of a small answer. An object replaced a moment ago is looked up once more."""
        try:
            return self._store.read(found.record, found.offset, found.length)
        except ExtentGoneError:
            again = self._find_again(operation, found)
            with store_errors():
                return self._store.read(again.record, again.offset, again.length)
        except StoreError as error:
            raise translate(error) from error

    def _find_again(self, operation: GetObject, found: Found) -> Found:
        """The object was replaced (or moved) since it was found. Its headers are made already, so only the
        same content will do; else the client is told to ask again."""
        again = self.find(operation)
        if (again.record.etag, again.record.size) != (found.record.etag, found.record.size):
            raise S3Error("ServiceUnavailable")
        return again

    @contextmanager
    def reading(self, operation: GetObject, found: Found) -> Iterator[Sequence[Span]]:
        """Open files and ranges of an answer, valid inside the `with`. Raises StoreError on entering."""
        with ExitStack() as stack:
            try:
                spans = stack.enter_context(self._store.reading(found.record, found.offset, found.length))
            except ExtentGoneError:
                again = self._find_again(operation, found)
                spans = stack.enter_context(self._store.reading(again.record, again.offset, again.length))
            yield spans

    # --- writing ------------------------------------------------------------------------------------

    async def put(self, operation: PutObject, identity: Identity, body: Body) -> ObjectStored:
        """Store the body. Raises S3Error EntityTooLarge, PreconditionFailed and whatever the body raises."""
        check_size(body.size)
        self._precheck(operation.bucket, operation.key, operation.conditions)
        with store_errors():
            writer = self._store.writer(operation.bucket, operation.key, size=body.size)
            try:
                await receive(writer, body, operation)
                digest = body.digest()
                meta = Meta(
                    etag=digest.md5_hex,
                    headers=dict(operation.headers.system),
                    metadata=dict(operation.headers.metadata),
                    checksums=dict(digest.checksums),
                    checksum_type="FULL_OBJECT",
                    owner=identity.user_id,
                )
                record = await writer.commit(meta, conditions=operation.conditions)
            except BaseException:
                await writer.abort()
                raise
        await self.settle(operation.bucket, operation.key, record)
        return ObjectStored(record.etag, record.checksums, record.checksum_type)

    def _precheck(self, bucket: str, key: str, conditions: Conditions | None) -> None:
        """Refuse early what the commit would refuse anyway: the body need not be sent then."""
        if conditions is None:
            return
        existing = self._store.get(bucket, key)
        if existing is None:
            verdict = judge_write(conditions, None)
        else:
            verdict = judge_write(conditions, existing.etag, existing.modified // 1000)
        if verdict == "missing":
            raise S3Error("NoSuchKey", extra={"Key": key})
        if verdict != "proceed":
            raise S3Error("PreconditionFailed")

    async def settle(self, bucket: str, key: str, record: Record) -> None:
        """The bucket may have been deleted while the body arrived; then what was written must go again."""
        if not self.has_bucket(bucket):
            with store_errors():
                await self._store.delete(bucket, key, conditions=Conditions(if_match=(record.etag,)))
            raise S3Error("NoSuchBucket", extra={"BucketName": bucket})

    def has_bucket(self, name: str) -> bool:
        """Whether the bucket is (still) there."""
        return self._buckets.get(name) is not None

    async def copy(self, operation: CopyObject, identity: Identity) -> CopyResult:
        """A copy that shares the source's extents. Raises S3Error NoSuchKey, InvalidRequest,
        PreconditionFailed."""
        source = self.record(operation.source.bucket, operation.source.key)
        checked_source(source, operation, MAX_PUT_BYTES)
        checksums, kind = await checksums_of(self._store, source, operation.checksum_algorithm)
        meta = copied_meta(source, operation, identity.user_id, checksums, kind)
        with store_errors():
            record = await self._store.link(
                operation.bucket, operation.key, source, meta, operation.conditions
            )
        await self.settle(operation.bucket, operation.key, record)
        return CopyResult(record.etag, record.modified, record.checksums, record.checksum_type)

    # --- deleting -----------------------------------------------------------------------------------

    async def delete(self, operation: DeleteObject) -> ObjectDeleted:
        """A missing object is a success, unless If-Match asks for it."""
        with store_errors():
            await self._store.delete(operation.bucket, operation.key, conditions=operation.conditions)
        return ObjectDeleted()

    async def delete_many(self, operation: DeleteObjects, request: DeleteRequest) -> DeleteResult:
        """Every key is answered for itself; missing ones are successes."""
        failures = {entry.key: refusal for entry in request.keys if (refusal := _refuse(entry))}
        plain = [e.key for e in request.keys if e.etag is None and e.key not in failures]
        with store_errors():
            await self._store.delete_many(operation.bucket, plain)
        for entry in request.keys:
            if entry.etag is not None and entry.key not in failures:
                await self._delete_if(operation.bucket, entry.key, entry.etag, failures)
        deleted = () if request.quiet else _others(request.keys, failures)
        return DeleteResult(deleted, tuple(failures.values()))

    async def _delete_if(self, bucket: str, key: str, etag: str, failures: dict[str, DeleteFailure]) -> None:
        try:
            await self._store.delete(bucket, key, conditions=Conditions(if_match=(etag,)))
        except StoreError as error:
            refusal = translate(error)
            failures[key] = DeleteFailure(key, refusal.code, refusal.message)


async def receive(writer: ObjectWriter, body: Body, operation: PutObject) -> None:
    """Pass the body on, piece by piece. The cap holds for bodies of undeclared length, too."""
    total = 0
    async for piece in body.pieces(operation.digests):
        total += len(piece)
        check_size(total)
        await writer.write(piece)


def check_size(size: int | None) -> None:
    """Raise S3Error EntityTooLarge above what S3 takes in one request."""
    if size is not None and size > MAX_PUT_BYTES:
        raise S3Error(
            "EntityTooLarge", extra={"ProposedSize": str(size), "MaxSizeAllowed": str(MAX_PUT_BYTES)}
        )


def _judge(conditions: Conditions, record: Record) -> None:
    verdict = judge_read(conditions, record.etag, record.modified // 1000)
    if verdict == "not_modified":
        raise not_modified(_object_head(record))
    if verdict != "proceed":
        raise S3Error("PreconditionFailed")


def _object_head(
    record: Record,
    checksums: Mapping[str, str] | None = None,
    checksum_type: str = "",
    parts_count: int | None = None,
) -> ObjectHead:
    return ObjectHead(
        record.size,
        record.etag,
        record.modified,
        record.headers,
        record.metadata,
        checksums or {},
        checksum_type,
        parts_count,
    )


def _find_part(record: Record, operation: GetObject) -> Found:
    """Part `partNumber` of a multipart object; an object put at once has exactly part 1."""
    number = operation.part_number or 0
    if not record.parts and number == 1:
        head = _object_head(record, record.checksums, record.checksum_type)
        return Found(record, head, 0, record.size, partial=record.size > 0)
    if not 1 <= number <= len(record.parts):
        raise S3Error("InvalidPartNumber", extra={"PartNumberRequested": str(number)})
    part = record.parts[number - 1]
    offset = sum(earlier.size for earlier in record.parts[: number - 1])
    head = _object_head(record, part.checksums, record.checksum_type, parts_count=len(record.parts))
    return Found(record, head, offset, part.size, partial=True)


def _refuse(entry: DeleteKey) -> DeleteFailure | None:
    if entry.version not in (None, "null"):
        return DeleteFailure(entry.key, "NoSuchVersion", "The specified version does not exist.")
    try:
        check_key(entry.key)
    except KeyNameError as error:
        return DeleteFailure(entry.key, "InvalidArgument", str(error))
    return None


def _others(entries: Iterable[DeleteKey], failures: Mapping[str, DeleteFailure]) -> tuple[DeletedKey, ...]:
    return tuple(DeletedKey(entry.key) for entry in entries if entry.key not in failures)
