"""GetObjectAttributes: what is asked in headers, and the document it answers.

Law: syntax and text only. Invariant: an attribute that was not asked for is not told.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObjectAttributes.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.s3 import listings, operations
from meshwire.s3.elements import optional, tag
from meshwire.s3.queries import MAX_INTEGER, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3 import results as res

MAX_PARTS = 1000
ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


def read_operation(
    bucket: str, key: str, version: str | None, headers: Mapping[str, str]
) -> operations.GetObjectAttributes:
    """Raises S3Error InvalidArgument."""
    asked = headers.get("x-amz-object-attributes", "")
    names = frozenset(name.strip() for name in asked.split(",") if name.strip())
    if not names or not names <= set(ATTRIBUTES):
        raise invalid("x-amz-object-attributes", asked, "Invalid attribute name specified.")
    return operations.GetObjectAttributes(
        bucket,
        key,
        names,
        version,
        max_parts=min(_integer(headers, "x-amz-max-parts", MAX_PARTS), MAX_PARTS),
        part_number_marker=_integer(headers, "x-amz-part-number-marker", 0),
    )


def _integer(headers: Mapping[str, str], name: str, default: int) -> int:
    text = headers.get(name)
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not 0 <= number <= MAX_INTEGER:
        raise invalid(name, text, f"{name} must be an integer between 0 and {MAX_INTEGER}")
    return number


def document(op: operations.GetObjectAttributes, result: res.ObjectAttributes) -> str:
    """The ETag has no quotes here, other than everywhere else in S3."""
    pieces = {
        "ETag": tag("ETag", result.etag),
        "Checksum": _checksum(result),
        "ObjectParts": _parts(op, result) if result.parts_count else "",
        "StorageClass": tag("StorageClass", "STANDARD"),
        "ObjectSize": tag("ObjectSize", str(result.size)),
    }
    return listings.root(
        "GetObjectAttributesResponse", *[pieces[name] for name in ATTRIBUTES if name in op.attributes]
    )


def _checksum(result: res.ObjectAttributes) -> str:
    """The number of parts (`-2`) is not told here, other than everywhere else in S3."""
    if not result.checksums:
        return ""
    values = {name: value.partition("-")[0] for name, value in result.checksums.items()}
    kind = optional("ChecksumType", result.checksum_type)
    return f"<Checksum>{listings.checksums(values)}{kind}</Checksum>"


def _parts(op: operations.GetObjectAttributes, result: res.ObjectAttributes) -> str:
    listed = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><Size>{part.size}</Size>"
        f"{listings.checksums(part.checksums)}</Part>"
        for part in result.parts
    )
    return (
        f"<ObjectParts>{tag('PartsCount', str(result.parts_count))}"
        f"{tag('PartNumberMarker', str(op.part_number_marker))}"
        f"{tag('NextPartNumberMarker', str(result.next_part))}{tag('MaxParts', str(op.max_parts))}"
        f"{listings.flag('IsTruncated', result.parts_truncated)}{listed}</ObjectParts>"
    )
