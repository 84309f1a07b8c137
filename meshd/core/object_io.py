"""Object I/O types: request bodies and lookup results.

A body yields its bytes once and in order. Nothing may be committed before `digest` returns, because it
raises on a wrong length, checksum or signature. A lookup result depends on the record and the request
alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from meshwire.errors import S3Error, precondition_failed
from meshwire.http_values.conditional_requests import NOT_MODIFIED_CONDITIONS, failed_read_condition
from meshwire.s3.responses import not_modified_error, resolve_object_range
from meshwire.s3.results import ObjectHead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.store.records import Record
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.operations import GetObject


MAX_PUT_BYTES: Final = 5 << 30
"""Largest size of a single PUT or part, and of the source of a copy."""


class Body(Protocol):
    """The bytes that a client sends, without their transfer coding."""

    @property
    def size(self) -> int | None:
        """The declared length in bytes; None if the client did not declare one."""

    def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        """Yields the body in pieces of bounded size, checked against `digests` on the way; `also` names
        additional checksums to compute. A piece is valid until the next one is requested."""

    def digest(self) -> BodyDigest:
        """Returns the digests of the whole body once `pieces` is exhausted. Raises S3Error if anything did
        not match."""

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        """Returns all of a small body, checked. Raises S3Error MaxMessageLengthExceeded above `limit`
        bytes."""


def check_put_size(size: int | None) -> None:
    """Raises S3Error EntityTooLarge above the size that S3 accepts in one request."""
    if size is not None and size > MAX_PUT_BYTES:
        raise S3Error(
            "EntityTooLarge", extra={"ProposedSize": str(size), "MaxSizeAllowed": str(MAX_PUT_BYTES)}
        )


NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
StoredCallback = Callable[[str, str, "Record"], Awaitable[None]]
"""Called with bucket, key and record of every object that was stored."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What to send of an object: `length` bytes from `offset`; `partial` if a range or part was requested.
    `base`: where the object begins in the record, if it is a member of an archive."""

    record: Record
    head: ObjectHead
    offset: int
    length: int
    partial: bool
    base: int = 0


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
