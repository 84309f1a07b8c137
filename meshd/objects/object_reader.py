"""Object reader: GET and HEAD of stored objects: what a request gets of a record, and the bytes.

A read keeps the files it opened, whatever happens to the name. What is sent depends on the record and the
request alone. Memory per request does not grow with the object's size.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from meshd.core.object_io import NOTHING, LookupResult
from meshd.store.errors import ExtentGoneError
from meshwire.errors import S3Error, precondition_failed
from meshwire.http_values.conditional_requests import NOT_MODIFIED_CONDITIONS, failed_read_condition
from meshwire.s3.responses import not_modified_error, resolve_object_range
from meshwire.s3.result_types import ObjectHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshd.objects.version_lookup import VersionLookup
    from meshd.store.api import StoreReader
    from meshd.store.records import Record, Span
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.operations import GetObject


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
        version = self._versions.version_header(operation.bucket, record)
        extra = NOTHING
        if operation.version is None:
            extra = self._versions.expiration_headers(operation.bucket, operation.key, record)
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
    window = resolve_object_range(operation, record.size) if _range_applies(operation, record) else None
    if window is None:
        head = _object_head(record, version, extra, record.checksums, record.checksum_type)
        return LookupResult(record, head, 0, record.size, partial=False)
    return LookupResult(record, _object_head(record, version, extra), *window, partial=True)


def _range_applies(operation: GetObject, record: Record) -> bool:
    """Returns True if If-Range, when given, matches this content."""
    return operation.if_range in (None, record.etag, record.modified // 1000)


def _check_conditions(conditions: Conditions, record: Record, version: str) -> None:
    failed = failed_read_condition(conditions, record.etag, record.modified // 1000)
    if failed in NOT_MODIFIED_CONDITIONS:
        raise not_modified_error(_object_head(record, version))
    if failed:
        raise precondition_failed(failed)


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
