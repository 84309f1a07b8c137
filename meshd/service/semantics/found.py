"""Objects as services hand them on: found for an answer, told of when they were stored.

Law: decided from a record alone; no store is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from meshwire.conditions import OF_CACHES, failed_read_condition
from meshwire.s3.errors import S3Error, precondition_failed
from meshwire.s3.rendering import not_modified, select_window
from meshwire.s3.results import ObjectHead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.store.records import Record
    from meshwire.conditions import Conditions
    from meshwire.s3.operations import GetObject

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
Stored = Callable[[str, str, "Record"], Awaitable[None]]
"""Told of every object that was stored: bucket, key and record."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object to be answered: `length` bytes from `offset`; `partial` when a range or a part was asked
    for. It begins at byte `base` of the record: that of an archive, where it is a member of one."""

    record: Record
    head: ObjectHead
    offset: int
    length: int
    partial: bool
    base: int = 0


def found_of(
    operation: GetObject, record: Record, version: str = "", extra: Mapping[str, str] = NOTHING
) -> Found:
    """What of a record GET or HEAD answers. Raises S3Error NotModified, PreconditionFailed, InvalidRange,
    InvalidPartNumber."""
    if operation.conditions is not None:
        _judge(operation.conditions, record, version)
    if operation.part_number is not None:
        return _find_part(record, version, operation, extra)
    window = select_window(operation, record.size) if _is_meant(operation, record) else None
    if window is None:
        head = _object_head(record, version, extra, record.checksums, record.checksum_type)
        return Found(record, head, 0, record.size, partial=False)
    return Found(record, _object_head(record, version, extra), *window, partial=True)


def _is_meant(operation: GetObject, record: Record) -> bool:
    """Whether the range is one of this content."""
    return operation.if_range in (None, record.etag, record.modified // 1000)


def _judge(conditions: Conditions, record: Record, version: str) -> None:
    failed = failed_read_condition(conditions, record.etag, record.modified // 1000)
    if failed in OF_CACHES:
        raise not_modified(_object_head(record, version))
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


def _find_part(record: Record, version: str, operation: GetObject, extra: Mapping[str, str]) -> Found:
    """Part `partNumber` of a multipart object; an object put at once has exactly part 1. S3 tells a part's
    checksum only where the whole's is one of its parts' (COMPOSITE)."""
    number = operation.part_number or 0
    if not record.parts and number == 1:
        head = _object_head(record, version, extra, record.checksums, record.checksum_type)
        return Found(record, head, 0, record.size, partial=record.size > 0)
    if not 1 <= number <= len(record.parts):
        raise S3Error("InvalidPartNumber", extra={"PartNumberRequested": str(number)})
    part = record.parts[number - 1]
    offset = sum(earlier.size for earlier in record.parts[: number - 1])
    sums = part.checksums if record.checksum_type == "COMPOSITE" else NOTHING
    head = _object_head(record, version, extra, sums, record.checksum_type, len(record.parts))
    return Found(record, head, offset, part.size, partial=True)
