"""GetObjectAttributes: what is known of an object without its bytes, a page of its parts included.

Law: reads the record alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.s3.results import ObjectAttributes, PartEntry

if TYPE_CHECKING:
    from meshd.service.semantics.versions import Versions
    from meshd.store.records import Record
    from meshwire.s3.operations import GetObjectAttributes


def attributes(versions: Versions, operation: GetObjectAttributes) -> ObjectAttributes:
    """Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete marker)."""
    record = versions.find(operation.bucket, operation.key, operation.version)
    return attributes_of(record, operation, versions.name(operation.bucket, record))


def attributes_of(record: Record, operation: GetObjectAttributes, version: str = "") -> ObjectAttributes:
    """The same of a record that was found elsewhere."""
    first = operation.part_number_marker
    page = record.parts[first : first + operation.max_parts]
    last = first + len(page)
    return ObjectAttributes(
        record.size,
        record.etag,
        record.modified,
        record.checksums,
        record.checksum_type,
        version,
        len(record.parts),
        tuple(
            PartEntry(number, part.size, part.etag, record.modified, part.checksums)
            for number, part in enumerate(page, first + 1)
        ),
        parts_truncated=last < len(record.parts) and operation.max_parts > 0,
        next_part=last,
    )
