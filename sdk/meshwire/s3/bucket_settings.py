"""Settings of buckets and objects as values: ACLs, CORS and lifecycle rules, public access blocks.

Law: data only, as the documents state it. `s3.acl_xml`, `s3.settings_xml` and `s3.lifecycle_xml` convert it
to and from XML; `meshd.control` stores it.
Invariant: whatever a document may omit is None or empty here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BucketSetting = Literal[
    "accelerate",
    "acl",
    "cors",
    "encryption",
    "lifecycle",
    "logging",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "tagging",
    "versioning",
    "website",
]

Versioning = Literal["", "Enabled", "Suspended"]
CannedAcl = Literal[
    "private",
    "public-read",
    "public-read-write",
    "authenticated-read",
    "bucket-owner-read",
    "bucket-owner-full-control",
]
Permission = Literal["FULL_CONTROL", "READ", "WRITE", "READ_ACP", "WRITE_ACP"]
OWNERSHIPS = frozenset({"BucketOwnerEnforced", "BucketOwnerPreferred", "ObjectWriter"})
ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
AUTHENTICATED_USERS = "http://acs.amazonaws.com/groups/global/AuthenticatedUsers"


@dataclass(frozen=True)
class Grant:
    """A grant of an ACL. `grantee`: a user id, or the URI of a group (ALL_USERS, AUTHENTICATED_USERS)."""

    grantee: str
    permission: Permission


@dataclass(frozen=True)
class Acl:
    """A canned ACL by name, or individual grants; never both."""

    canned: CannedAcl | Literal[""] = "private"
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True)
class PublicAccessBlock:
    block_public_acls: bool = False
    ignore_public_acls: bool = False
    block_public_policy: bool = False
    restrict_public_buckets: bool = False


@dataclass(frozen=True)
class CorsRule:
    """A CORS rule. Each origin and header may contain one `*`. `headers` are lower-case, for comparison;
    `spelled` are the same as the client wrote them, for reading back."""

    origins: tuple[str, ...]
    methods: tuple[str, ...]
    headers: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    max_age: int | None = None
    id: str = ""
    spelled: tuple[str, ...] = ()


@dataclass(frozen=True)
class LifecycleRule:
    """A lifecycle rule. Ages in days, dates in seconds since the epoch (midnight UTC), sizes in bytes.

    `form` is how the document selects objects: `prefix` (the old form), `filter`, or an `empty` filter;
    `keep_markers` means that it has ExpiredObjectDeleteMarker false, which has no effect.
    """

    id: str
    enabled: bool
    prefix: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    larger_than: int | None = None
    smaller_than: int | None = None
    expire_days: int | None = None
    expire_date: int | None = None
    expire_markers: bool = False
    noncurrent_days: int | None = None
    noncurrent_keep: int | None = None
    abort_uploads_days: int | None = None
    form: Literal["prefix", "filter", "empty"] = "filter"
    keep_markers: bool = False
