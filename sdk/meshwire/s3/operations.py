"""What an S3 request asks for, as frozen values.

Law: data only. `meshwire.s3.parsing` makes these from (method, target, headers); `meshd.service`
executes them. Invariant: whatever a client may leave out is None or empty here, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.conditions import Conditions
    from meshwire.ranges import RangeSpec


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """System headers kept with an object (lower-case names, as given) and user metadata without its
    prefix."""

    system: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BodyDigests:
    """Digests the client declares for the body it sends.

    `content_md5` is base64; `checksums` maps algorithm (`crc32`, `crc32c`, `crc64nvme`, `sha1`,
    `sha256`) to base64;
    `trailer` names the algorithms whose value follows in the chunked trailer; `wanted` those to compute
    and store because `x-amz-sdk-checksum-algorithm` names them.
    """

    content_md5: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    trailer: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CopySource:
    bucket: str
    key: str
    version: str | None = None


# --- service and buckets ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListBuckets:
    prefix: str = ""
    max_buckets: int = 10_000
    continuation: str | None = None


@dataclass(frozen=True, slots=True)
class CreateBucket:
    bucket: str


@dataclass(frozen=True, slots=True)
class HeadBucket:
    bucket: str


@dataclass(frozen=True, slots=True)
class DeleteBucket:
    bucket: str


@dataclass(frozen=True, slots=True)
class GetBucketLocation:
    bucket: str


@dataclass(frozen=True, slots=True)
class ListObjects:
    """ListObjectsV2 (`version` 2) or ListObjects (1). `after` is the marker, start-after or decoded
    token: the last key or common prefix already returned."""

    bucket: str
    version: Literal[1, 2]
    prefix: str = ""
    delimiter: str = ""
    max_keys: int = 1000
    after: str = ""
    continuation_token: str | None = None
    start_after: str | None = None
    encode_url: bool = False
    fetch_owner: bool = False


# --- objects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetObject:
    """GET, or HEAD with `head` set. `overrides` are the response-* parameters (header name, lower-case
    → value)."""

    bucket: str
    key: str
    head: bool = False
    range: RangeSpec | None = None
    conditions: Conditions | None = None
    part_number: int | None = None
    checksum_mode: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PutObject:
    bucket: str
    key: str
    headers: ObjectHeaders
    digests: BodyDigests
    conditions: Conditions | None = None


@dataclass(frozen=True, slots=True)
class CopyObject:
    """`replace` is the metadata directive REPLACE; `source_conditions` are the x-amz-copy-source-if-*
    headers."""

    bucket: str
    key: str
    source: CopySource
    replace: bool
    headers: ObjectHeaders
    conditions: Conditions | None = None
    source_conditions: Conditions | None = None
    checksum_algorithm: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteObject:
    bucket: str
    key: str
    conditions: Conditions | None = None


@dataclass(frozen=True, slots=True)
class DeleteObjects:
    """The keys come in the XML body, read by `meshwire.s3.documents.parse_delete`."""

    bucket: str
    digests: BodyDigests


# --- multipart --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateMultipartUpload:
    bucket: str
    key: str
    headers: ObjectHeaders
    checksum_algorithm: str | None = None
    checksum_type: str | None = None


@dataclass(frozen=True, slots=True)
class UploadPart:
    bucket: str
    key: str
    upload_id: str
    part_number: int
    digests: BodyDigests


@dataclass(frozen=True, slots=True)
class UploadPartCopy:
    """`range` is (first, last) inclusive, from x-amz-copy-source-range."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    source: CopySource
    range: tuple[int, int] | None = None
    source_conditions: Conditions | None = None


@dataclass(frozen=True, slots=True)
class CompleteMultipartUpload:
    """The part list comes in the XML body, read by `meshwire.s3.documents.parse_complete`. `digests` and
    `object_size` (bytes) are what the client expects of the assembled object."""

    bucket: str
    key: str
    upload_id: str
    digests: BodyDigests
    conditions: Conditions | None = None
    checksum_type: str | None = None
    object_size: int | None = None


@dataclass(frozen=True, slots=True)
class AbortMultipartUpload:
    bucket: str
    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class ListParts:
    bucket: str
    key: str
    upload_id: str
    max_parts: int = 1000
    part_number_marker: int = 0


@dataclass(frozen=True, slots=True)
class ListMultipartUploads:
    bucket: str
    prefix: str = ""
    delimiter: str = ""
    key_marker: str = ""
    upload_id_marker: str = ""
    max_uploads: int = 1000
    encode_url: bool = False


Operation = (
    ListBuckets
    | CreateBucket
    | HeadBucket
    | DeleteBucket
    | GetBucketLocation
    | ListObjects
    | GetObject
    | PutObject
    | CopyObject
    | DeleteObject
    | DeleteObjects
    | CreateMultipartUpload
    | UploadPart
    | UploadPartCopy
    | CompleteMultipartUpload
    | AbortMultipartUpload
    | ListParts
    | ListMultipartUploads
)
