"""Object reader: GET and HEAD of stored objects, and the version of an object that a request names.

All code that accepts a version id looks it up in `VersionLookup`. A read keeps the files it opened, whatever
happens to the name. What is sent depends on the record and the request alone. Memory per request does not
grow with the object's size.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from meshd.core.api_errors import store_errors
from meshd.core.object_io import NOTHING, LookupResult
from meshd.objects.lifecycle_rules import expiration_header
from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.errors import ExtentGoneError
from meshd.store.records import NULL
from meshwire.errors import S3Error, precondition_failed
from meshwire.http_values import dates
from meshwire.http_values.conditional_requests import NOT_MODIFIED_CONDITIONS, failed_read_condition
from meshwire.s3.request_head import invalid_argument
from meshwire.s3.responses import not_modified_error, resolve_object_range
from meshwire.s3.result_types import ObjectHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshd.control.buckets import Bucket, BucketTable
    from meshd.store.api import StoreReader
    from meshd.store.records import Record, Span, Upload
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning
    from meshwire.s3.operations import CopySource, GetObject


class VersionLookup:
    """Looks versions up. Stateless; every lookup takes microseconds."""

    def __init__(self, store: StoreReader, buckets: BucketTable) -> None:
        self._store, self._buckets = store, buckets

    def has_bucket(self, name: str) -> bool:
        """Whether the bucket exists (still)."""
        return self._buckets.get(name) is not None

    def bucket_created(self, name: str) -> int:
        """Return the creation time, which tells a bucket from an earlier one of its name; 0 if there is
        none."""
        return self._buckets.created_at_ms(name)

    def is_of_current_bucket(self, upload: Upload) -> bool:
        """Whether an upload was begun in the bucket that has the name now. A node that was away while the
        bucket was deleted and created again still stores earlier uploads."""
        return upload.born in (0, self.bucket_created(upload.bucket))

    def require_same_bucket(self, name: str, born: int) -> None:
        """Raise S3Error NoSuchBucket if the bucket was deleted since `born`, even if the name exists
        again."""
        if self.bucket_created(name) != born:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})

    def write_settings(self, name: str, born: int, writer: str, acl: Acl | None) -> tuple[str, Versioning]:
        """Return the owner of an object that `writer` writes with this ACL, and the bucket's versioning
        status. Raises S3Error as `require_same_bucket` does."""
        bucket = self._buckets.get(name)
        if bucket is None or bucket.created_ms != born:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return _owner_in(bucket, writer, acl), bucket.versioning

    def versioning_of(self, bucket: str) -> Versioning:
        """Return the bucket's present versioning status."""
        found = self._buckets.get(bucket)
        return "" if found is None else found.versioning

    def version_header(self, bucket: str, record: Record) -> str:
        """Return x-amz-version-id of a read: the id, `null`, or empty if the bucket never had versioning. A
        write returns ids only."""
        return record.version or ("null" if self.versioning_of(bucket) else "")

    def owner_for_write(self, bucket: str, writer: str, acl: Acl | None) -> str:
        """Return the owner of an object that `writer` writes with this ACL: the bucket's owner, if its
        ownership setting says so."""
        found = self._buckets.get(bucket)
        return writer if found is None else _owner_in(found, writer, acl)

    def expiration_headers(self, bucket: str, key: str, record: Record) -> Mapping[str, str]:
        """Return x-amz-expiration of a current object, if a lifecycle rule will remove it."""
        found = self._buckets.get(bucket)
        if found is None or not found.lifecycle:
            return NOTHING
        header = expiration_header(found.lifecycle, key, record.size, record.tags, record.modified)
        return {"x-amz-expiration": header} if header else NOTHING

    def read_headers(self, operation: GetObject, record: Record) -> tuple[str, Mapping[str, str]]:
        """Return what the bucket adds to the headers of a read: `version_header`, and `expiration_headers`
        of a current object."""
        found = self._buckets.get(operation.bucket)
        if found is None:
            return record.version, NOTHING
        version = record.version or ("null" if found.versioning else "")
        if operation.version is not None or not found.lifecycle:
            return version, NOTHING
        return version, self.expiration_headers(operation.bucket, operation.key, record)

    def find_version(self, bucket: str, key: str, version: str | None = None) -> Record:
        """Return the named version, or the current one. Raises S3Error NoSuchKey, NoSuchVersion,
        InvalidArgument (a malformed id), MethodNotAllowed (a delete marker requested by its id)."""
        with store_errors():
            record = (
                self._store.get(bucket, key)
                if version is None
                else self._store.get_version(bucket, key, version)
            )
        if record is None:
            raise self._missing(bucket, key, version)
        if record.marker:
            raise _unreadable(record)
        return record

    def find_copy_source(self, source: CopySource) -> Record:
        """Return the version that a copy reads. Raises S3Error NoSuchKey, NoSuchVersion, InvalidRequest (a
        delete marker)."""
        try:
            return self.find_version(source.bucket, source.key, source.version)
        except S3Error as error:
            if error.code != "MethodNotAllowed":
                raise
            raise S3Error(
                "InvalidRequest",
                "The source of a copy request may not specifically refer to a delete marker by version id.",
            ) from error

    def _missing(self, bucket: str, key: str, version: str | None) -> S3Error:
        if version is not None:
            check_version_id(version)
            return S3Error("NoSuchVersion", extra={"Key": key, "VersionId": version})
        headers = {}
        if self.versioning_of(bucket):
            with store_errors():
                newest = self._store.newest_version(bucket, key)
            if newest is not None and newest.marker:
                headers = _marker_headers(newest)
        return S3Error("NoSuchKey", headers=headers, extra={"Key": key})


def check_version_id(version: str) -> None:
    """Raise S3Error InvalidArgument for a text that cannot be a version id here."""
    if version != NULL and stamp_of_version_id(version) is None:
        raise invalid_argument("versionId", version, "Invalid version id specified")


def _unreadable(marker: Record) -> S3Error:
    modified = dates.format_http(marker.modified // 1000)
    return S3Error(
        "MethodNotAllowed",
        headers={**_marker_headers(marker), "allow": "DELETE", "last-modified": modified},
        extra={"Method": "GET", "ResourceType": "DeleteMarker"},
    )


def _marker_headers(marker: Record) -> dict[str, str]:
    return {"x-amz-delete-marker": "true", "x-amz-version-id": marker.version or NULL}


class ReplacedError(S3Error):
    """The object was replaced after the lookup: repeat the lookup. A caller that cannot answers 503."""

    def __init__(self) -> None:
        super().__init__("ServiceUnavailable")


class ObjectReader:
    """Reads whole objects and ranges of them. One per process."""

    def __init__(self, store: StoreReader, versions: VersionLookup) -> None:
        self._store, self._versions = store, versions

    def __repr__(self) -> str:
        return f"<ObjectReader of {self._store!r}>"

    def find_object(self, operation: GetObject) -> LookupResult:
        """Return the result of a GET or HEAD. Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed,
        NotModified, PreconditionFailed, InvalidRange, InvalidPartNumber."""
        record = self._versions.find_version(operation.bucket, operation.key, operation.version)
        version, extra = self._versions.read_headers(operation, record)
        return lookup_result(operation, record, version, extra)

    def read_range(self, operation: GetObject, found: LookupResult) -> bytes:
        """Return the bytes of a small response. An object that was just moved is looked up once more. Raises
        ReplacedError, CorruptExtentError, DiskFailedError."""
        try:
            return self._store.read_range(found.record, found.base + found.offset, found.length)
        except ExtentGoneError:
            again = self._find_again(operation, found)
            return self._store.read_range(again.record, again.offset, again.length)

    def read_range_now(self, found: LookupResult) -> bytes | None:
        """Return the bytes of a small response if that needs no wait for a disk. Raises StoreError."""
        return self._store.try_read_range(found.record, found.base + found.offset, found.length)

    def span_now(self, found: LookupResult) -> Span | None:
        """Return the only span of a response, valid until the caller next awaits. Raises StoreError."""
        return self._store.try_open_span(found.record, found.offset, found.length)

    def _find_again(self, operation: GetObject, found: LookupResult) -> LookupResult:
        """Look up an object that was replaced (or moved) since the first lookup. Its headers are already
        built, so only the same content is accepted. Raises ReplacedError."""
        if operation.member is not None:  # its bytes are in an archive or in a copy of one: repeat the lookup
            raise ReplacedError
        again = self.find_object(operation)
        if (again.record.etag, again.record.size) != (found.record.etag, found.record.size):
            raise ReplacedError
        return again

    @contextmanager
    def open_range(self, operation: GetObject, found: LookupResult) -> Iterator[Sequence[Span]]:
        """Return the open files and ranges of a response, valid inside the `with`. Raises StoreError and
        ReplacedError on entering."""
        with ExitStack() as stack:
            try:
                at = found.base + found.offset
                spans = stack.enter_context(self._store.open_spans(found.record, at, found.length))
            except ExtentGoneError:
                again = self._find_again(operation, found)
                spans = stack.enter_context(self._store.open_spans(again.record, again.offset, again.length))
            yield spans


def lookup_result(
    operation: GetObject, record: Record, version: str = "", extra: Mapping[str, str] = NOTHING
) -> LookupResult:
    """Returns what a GET or HEAD request gets of a record. Raises S3Error NotModified, PreconditionFailed,
    InvalidRange, InvalidPartNumber."""
    if operation.conditions is not None:
        _check_conditions(operation.conditions, record, version)
    if operation.part_number is not None:
        return _find_part(record, version, operation, extra)
    ranged = operation.range is not None and _range_applies(operation, record)
    window = resolve_object_range(operation, record.size) if ranged else None
    if window is None:
        head = _object_head(record, version, extra, record.checksums, record.checksum_type)
        return LookupResult(record, head, 0, record.size, partial=False)
    sums = record.checksums if operation.checksum_mode else NOTHING
    head = _object_head(record, version, extra, sums, record.checksum_type)
    return LookupResult(record, head, *window, partial=True)


def _range_applies(operation: GetObject, record: Record) -> bool:
    """Returns True if If-Range, when given, matches this content."""
    return operation.if_range in (None, record.etag, record.modified // 1000)


def _check_conditions(conditions: Conditions, record: Record, version: str) -> None:
    failed = failed_read_condition(conditions, record.etag, record.modified // 1000)
    if failed in NOT_MODIFIED_CONDITIONS:
        raise not_modified_error(_object_head(record, version))
    if failed:
        raise precondition_failed(failed)


def _owner_in(bucket: Bucket, writer: str, acl: Acl | None) -> str:
    if bucket.ownership in {"", "ObjectWriter"}:
        return writer
    given = acl is not None and acl.canned == "bucket-owner-full-control"
    return bucket.owner if given or bucket.ownership == "BucketOwnerEnforced" else writer


def _object_head(
    record: Record,
    version: str,
    extra: Mapping[str, str] = NOTHING,
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
        version,
        len(record.tags),
        extra,
    )


def _find_part(record: Record, version: str, operation: GetObject, extra: Mapping[str, str]) -> LookupResult:
    """Returns part `partNumber` of a multipart object; an object put at once has exactly part 1. Like S3, it
    shows a part's checksum only if the object's is composed of its parts' (COMPOSITE)."""
    number = operation.part_number or 0
    if not record.parts and number == 1:
        head = _object_head(record, version, extra, record.checksums, record.checksum_type)
        return LookupResult(record, head, 0, record.size, partial=record.size > 0)
    if not 1 <= number <= len(record.parts):
        raise S3Error("InvalidPartNumber", extra={"PartNumberRequested": str(number)})
    part = record.parts[number - 1]
    offset = sum(earlier.size for earlier in record.parts[: number - 1])
    sums = part.checksums if record.checksum_type == "COMPOSITE" else NOTHING
    head = _object_head(record, version, extra, sums, record.checksum_type, len(record.parts))
    return LookupResult(record, head, offset, part.size, partial=True)
