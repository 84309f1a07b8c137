"""Results of S3 operations as frozen values.

Law: data only. The daemon builds these, `s3.responses` renders them, and `s3.xml_documents` parses the
listed ones back for the SDK.
Invariant: ETags carry no quotes, times are milliseconds since the epoch, sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.bucket_settings import Acl, CorsRule


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Owner:
    id: str
    display_name: str = ""


# --- service and buckets --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketEntry:
    name: str
    created_ms: int
    region: str = ""


@dataclass(frozen=True, slots=True)
class BucketListing:
    """A page of buckets. `next_after` is the last bucket name of a truncated page (it becomes the
    continuation token), else None."""

    owner: Owner
    buckets: tuple[BucketEntry, ...]
    next_after: str | None = None


@dataclass(frozen=True, slots=True)
class BucketCreated:
    bucket: str


@dataclass(frozen=True, slots=True)
class BucketFound:
    """Response to HeadBucket."""

    region: str = "us-east-1"


@dataclass(frozen=True, slots=True)
class BucketDeleted:
    pass


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Response to GetBucketLocation. `us-east-1` is rendered as the empty constraint, as in S3."""

    region: str = "us-east-1"


class ObjectEntry(NamedTuple):
    """One object of a listing. `checksum_algorithm` is the lower-case name; rendering converts it to S3's
    spelling.

    A tuple because pages have a thousand of them: constructing a frozen dataclass takes four times as long.
    """

    key: str
    size: int
    etag: str
    modified_ms: int
    owner: Owner | None = None
    storage_class: str = "STANDARD"
    checksum_algorithm: str = ""
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class ObjectListing:
    """A page of objects. `next_after` is the last key or common prefix returned, from which rendering makes
    the continuation token or NextMarker. When parsed by the SDK it is the raw token (or marker) to send
    next."""

    entries: tuple[ObjectEntry, ...] = ()
    common_prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_after: str = ""


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """One version of a listing; a delete marker has neither size nor ETag. `version` is `null` for the null
    version."""

    key: str
    version: str
    latest: bool
    modified_ms: int
    owner: Owner = Owner("")
    marker: bool = False
    size: int = 0
    etag: str = ""
    checksum_algorithm: str = ""
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class VersionListing:
    """A page of versions. `next_key` and `next_version` are the last version (or the last common prefix,
    with an empty version) returned."""

    entries: tuple[VersionEntry, ...] = ()
    common_prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_version: str = ""


@dataclass(frozen=True, slots=True)
class SettingDocument:
    """Response to GetBucketSetting: the whole body and its type."""

    body: bytes
    content_type: str = "application/xml"


@dataclass(frozen=True, slots=True)
class SettingStored:
    """Response to PutBucketSetting (200) and DeleteBucketSetting (204)."""


@dataclass(frozen=True, slots=True)
class PreflightAllowed:
    """Response to a preflight: the rule that allows the page's request."""

    origin: str
    rule: CorsRule


# --- objects --------------------------------------------------------------------------------------


class ObjectHead(NamedTuple):
    """The metadata of an object in GET and HEAD: `headers` are the stored system headers, `metadata`
    without its prefix.

    `checksums` maps algorithm to base64 for what is sent (the whole object, or the requested part);
    `parts_count` is set only if a part number was requested. `version` is empty if the bucket never had
    versioning. `extra` are further headers, such as x-amz-expiration.
    """

    size: int
    etag: str
    modified_ms: int
    headers: Mapping[str, str] = _NOTHING
    metadata: Mapping[str, str] = _NOTHING
    checksums: Mapping[str, str] = _NOTHING
    checksum_type: str = ""
    parts_count: int | None = None
    version: str = ""
    tag_count: int = 0
    extra: Mapping[str, str] = _NOTHING


class MemberEntry(NamedTuple):
    """A file of an archive. `offset`: of its bytes in the archive; None if they are compressed."""

    name: str
    size: int
    etag: str
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class MemberListing:
    """A page of an archive's files. `etag` and `size` are the archive's, `count` the number of all files;
    `next_after` is the last name of a truncated page, else None."""

    kind: str
    etag: str
    size: int
    count: int
    entries: tuple[MemberEntry, ...]
    next_after: str | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class ObjectStored:
    """Response to PutObject. `extra`, here and below, are further headers."""

    etag: str
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"
    version: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectDeleted:
    """Response to DeleteObject. `version`: the removed version, or the delete marker created or removed
    (then `marker`); empty without versioning."""

    version: str = ""
    marker: bool = False


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Response to CopyObject and UploadPartCopy."""

    etag: str
    modified_ms: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""
    version: str = ""
    source_version: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectTags:
    """Response to GetObjectTagging."""

    tags: Mapping[str, str]
    version: str = ""


@dataclass(frozen=True, slots=True)
class ObjectTagged:
    """Response to PutObjectTagging (200) and DeleteObjectTagging (204)."""

    version: str = ""


@dataclass(frozen=True, slots=True)
class ObjectAcl:
    """Response to GetObjectAcl; `names` are the display names of user ids."""

    owner: Owner
    acl: Acl
    bucket_owner: Owner
    version: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectAclStored:
    version: str = ""


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """Response to GetObjectAttributes; rendering writes the requested ones. `parts` is a page."""

    size: int
    etag: str
    modified_ms: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""
    version: str = ""
    parts_count: int = 0
    parts: tuple[PartEntry, ...] = ()
    parts_truncated: bool = False
    next_part: int = 0


@dataclass(frozen=True, slots=True)
class PostStored:
    """Response to PostObject: `status` 200, 201 (with a document) or 204, or a redirect."""

    bucket: str
    key: str
    etag: str
    location: str
    status: int = 204
    redirect: str = ""
    version: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    key: str
    code: str
    message: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class DeletedKey:
    """A deleted key. `version`: the requested version; `marker_version`: the delete marker created or
    removed."""

    key: str
    version: str = ""
    marker_version: str = ""


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """Response to DeleteObjects. Pass `deleted` empty for a quiet request, whose document omits it."""

    deleted: tuple[DeletedKey, ...] = ()
    failures: tuple[DeleteFailure, ...] = ()


# --- multipart ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UploadCreated:
    bucket: str
    key: str
    upload_id: str
    checksum_algorithm: str = ""
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class PartStored:
    """Response to UploadPart."""

    etag: str
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompleteResult:
    bucket: str
    key: str
    etag: str
    location: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""
    version: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UploadAborted:
    pass


@dataclass(frozen=True, slots=True)
class PartEntry:
    number: int
    size: int
    etag: str
    modified_ms: int
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartList:
    parts: tuple[PartEntry, ...] = ()
    truncated: bool = False
    owner: Owner = Owner("")
    checksum_algorithm: str = ""
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class UploadEntry:
    key: str
    upload_id: str
    initiated_ms: int
    owner: Owner = Owner("")
    checksum_algorithm: str = ""
    checksum_type: str = ""


@dataclass(frozen=True, slots=True)
class UploadListing:
    """A page of uploads. `next_key` and `next_upload_id` are the last upload (or the last common prefix,
    with an empty id) returned."""

    uploads: tuple[UploadEntry, ...] = ()
    common_prefixes: tuple[str, ...] = ()
    truncated: bool = False
    next_key: str = ""
    next_upload_id: str = ""


Result = (
    BucketListing
    | BucketCreated
    | BucketFound
    | BucketDeleted
    | BucketLocation
    | SettingDocument
    | SettingStored
    | PreflightAllowed
    | ObjectListing
    | VersionListing
    | ObjectHead
    | MemberListing
    | ObjectStored
    | ObjectDeleted
    | ObjectTags
    | ObjectTagged
    | ObjectAcl
    | ObjectAclStored
    | ObjectAttributes
    | PostStored
    | CopyResult
    | DeleteResult
    | UploadCreated
    | PartStored
    | CompleteResult
    | UploadAborted
    | PartList
    | UploadListing
)
