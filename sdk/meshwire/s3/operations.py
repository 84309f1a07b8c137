"""S3 operations as frozen values: what a request asks for.

Law: data only. `s3.parse_request` builds these from method, target and headers; the daemon executes them.
Invariant: whatever a client may omit is None or empty here, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.checksums.body_checksums import BodyDigests
    from meshwire.http_values.conditional_requests import Conditions, RangeSpec
    from meshwire.s3.bucket_settings import Acl, BucketSetting


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """System headers stored with an object (lower-case names, values as given) and user metadata without
    its prefix."""

    system: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopySource:
    """The source of a copy. `member`: member of the archive that the object is."""

    bucket: str
    key: str
    version: str | None = None
    member: str | None = None


# --- service and buckets ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListBuckets:
    """ListBuckets. `region` selects the buckets with this location constraint; None selects all."""

    prefix: str = ""
    max_buckets: int = 10_000
    continuation: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class CreateBucket:
    """CreateBucket. `acl` is from x-amz-acl or the x-amz-grant-* headers, `ownership` from
    x-amz-object-ownership; None if absent."""

    bucket: str
    acl: Acl | None = None
    ownership: str | None = None


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
class GetBucketSetting:
    """GET of a sub-resource with a bucket's configuration (`?versioning`, `?policy`, `?acl`, …)."""

    bucket: str
    setting: BucketSetting


@dataclass(frozen=True, slots=True)
class PutBucketSetting:
    """PUT of such a sub-resource; the document is in the body (an ACL may be in headers instead: `acl`)."""

    bucket: str
    setting: BucketSetting
    digests: BodyDigests
    acl: Acl | None = None


@dataclass(frozen=True, slots=True)
class DeleteBucketSetting:
    bucket: str
    setting: BucketSetting


@dataclass(frozen=True, slots=True)
class Preflight:
    """OPTIONS: whether a page from `origin` may send `method` with these headers (lower-case). `key` may be
    empty."""

    bucket: str
    key: str
    origin: str
    method: str
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListObjects:
    """ListObjectsV2 (`version` 2) or ListObjects (1). `after` is the marker, start-after or decoded token:
    the last key or common prefix already returned."""

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


@dataclass(frozen=True, slots=True)
class ListObjectVersions:
    """ListObjectVersions: versions after (`key_marker`, `version_marker`), newest first within a key;
    without a version marker, after all versions of `key_marker`."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    key_marker: str = ""
    version_marker: str = ""
    max_keys: int = 1000
    encode_url: bool = False


# --- objects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetObject:
    """GET, or HEAD with `head` set. `overrides` are the response-* parameters (lower-case header name →
    value); `member` is a file of the archive that the object is. `if_range`: the content that the range
    applies to, by its ETag or its time in seconds since the epoch; for other content the whole object is
    sent."""

    bucket: str
    key: str
    head: bool = False
    range: RangeSpec | None = None
    conditions: Conditions | None = None
    part_number: int | None = None
    checksum_mode: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None
    member: str | None = None
    if_range: str | int | None = None


@dataclass(frozen=True, slots=True)
class ListMembers:
    """List the files of the archive that the object is, in order of their names; `after`: the last name
    already returned."""

    bucket: str
    key: str
    prefix: str = ""
    after: str = ""
    limit: int = 1000
    version: str | None = None


@dataclass(frozen=True, slots=True)
class PutObject:
    bucket: str
    key: str
    headers: ObjectHeaders
    digests: BodyDigests
    conditions: Conditions | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    acl: Acl | None = None


@dataclass(frozen=True, slots=True)
class CopyObject:
    """CopyObject. `replace` is the metadata directive REPLACE, `tags` replaces the source's tags (None:
    they are copied); `source_conditions` are the x-amz-copy-source-if-* headers, `reclass` whether a
    storage class is given."""

    bucket: str
    key: str
    source: CopySource
    replace: bool
    headers: ObjectHeaders
    conditions: Conditions | None = None
    source_conditions: Conditions | None = None
    checksum_algorithm: str | None = None
    tags: Mapping[str, str] | None = None
    acl: Acl | None = None
    reclass: bool = False


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """DeleteObject. Without `version`, a bucket with versioning gets a delete marker."""

    bucket: str
    key: str
    conditions: Conditions | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteObjects:
    """DeleteObjects. The keys are in the XML body, parsed by `meshwire.s3.xml_documents.parse_delete`."""

    bucket: str
    digests: BodyDigests


@dataclass(frozen=True, slots=True)
class PostObject:
    """An upload by HTML form (multipart/form-data); key, policy and file are in the body."""

    bucket: str
    content_type: str


@dataclass(frozen=True, slots=True)
class GetObjectTagging:
    bucket: str
    key: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class PutObjectTagging:
    bucket: str
    key: str
    digests: BodyDigests
    version: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteObjectTagging:
    bucket: str
    key: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class GetObjectAcl:
    bucket: str
    key: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class PutObjectAcl:
    """PutObjectAcl. `acl` from the headers; None if it is in the body."""

    bucket: str
    key: str
    digests: BodyDigests
    acl: Acl | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class GetObjectAttributes:
    """GetObjectAttributes. `attributes`: a subset of ETag, Checksum, ObjectParts, StorageClass,
    ObjectSize."""

    bucket: str
    key: str
    attributes: frozenset[str]
    version: str | None = None
    max_parts: int = 1000
    part_number_marker: int = 0


# --- multipart --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateMultipartUpload:
    bucket: str
    key: str
    headers: ObjectHeaders
    checksum_algorithm: str | None = None
    checksum_type: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    acl: Acl | None = None


@dataclass(frozen=True, slots=True)
class UploadPart:
    bucket: str
    key: str
    upload_id: str
    part_number: int
    digests: BodyDigests


@dataclass(frozen=True, slots=True)
class UploadPartCopy:
    """UploadPartCopy. `range` is (first, last) inclusive, from x-amz-copy-source-range."""

    bucket: str
    key: str
    upload_id: str
    part_number: int
    source: CopySource
    range: tuple[int, int] | None = None
    source_conditions: Conditions | None = None


@dataclass(frozen=True, slots=True)
class CompleteMultipartUpload:
    """CompleteMultipartUpload. The part list is in the XML body, parsed by
    `meshwire.s3.xml_documents.parse_complete`. `digests` and `object_size` (bytes) are what the client
    expects of the assembled object."""

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
    | GetBucketSetting
    | PutBucketSetting
    | DeleteBucketSetting
    | Preflight
    | ListObjects
    | ListObjectVersions
    | GetObject
    | ListMembers
    | PutObject
    | CopyObject
    | DeleteObject
    | DeleteObjects
    | PostObject
    | GetObjectTagging
    | PutObjectTagging
    | DeleteObjectTagging
    | GetObjectAcl
    | PutObjectAcl
    | GetObjectAttributes
    | CreateMultipartUpload
    | UploadPart
    | UploadPartCopy
    | CompleteMultipartUpload
    | AbortMultipartUpload
    | ListParts
    | ListMultipartUploads
)

_SETTING_NAMES: Mapping[str, str] = {
    "acl": "Acl",
    "accelerate": "AccelerateConfiguration",
    "lifecycle": "LifecycleConfiguration",
    "notification": "NotificationConfiguration",
    "object-lock": "ObjectLockConfiguration",
    "ownershipControls": "OwnershipControls",
    "policyStatus": "PolicyStatus",
    "publicAccessBlock": "PublicAccessBlock",
    "requestPayment": "RequestPayment",
}
_SETTINGS = (GetBucketSetting, PutBucketSetting, DeleteBucketSetting)
_VERBS = {GetBucketSetting: "Get", PutBucketSetting: "Put", DeleteBucketSetting: "Delete"}


def operation_name(operation: Operation) -> str:
    """Return the operation's name in S3's reference: `HeadObject`, `PutBucketPolicy`,
    `GetObjectLockConfiguration`, …"""
    if isinstance(operation, GetObject):
        return "HeadObject" if operation.head else "GetObject"
    if isinstance(operation, _SETTINGS):
        if isinstance(operation, DeleteBucketSetting) and operation.setting == "lifecycle":
            return "DeleteBucketLifecycle"  # the only name without the Configuration of its Get and Put
        name = _SETTING_NAMES.get(operation.setting, operation.setting.capitalize())
        level = "" if operation.setting in {"object-lock", "publicAccessBlock"} else "Bucket"
        return f"{_VERBS[type(operation)]}{level}{name}"
    return type(operation).__name__
