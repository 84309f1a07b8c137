"""The actions that a policy may name, of S3 and the node's own, and what each is about: an object, a bucket,
or neither.

Law: a list from S3's service authorization reference; what this server does not carry out may be named all
the same, for a policy that denies it is right. Invariant: names are compared without regard to case.
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
"""

from __future__ import annotations

from typing import Final, Literal

Level = Literal["object", "bucket", "account"]

_OBJECT = [
    "AbortMultipartUpload",
    "BypassGovernanceRetention",
    "DeleteObject",
    "DeleteObjectTagging",
    "DeleteObjectVersion",
    "DeleteObjectVersionTagging",
    "GetObject",
    "GetObjectAcl",
    "GetObjectAttributes",
    "GetObjectLegalHold",
    "GetObjectRetention",
    "GetObjectTagging",
    "GetObjectTorrent",
    "GetObjectVersion",
    "GetObjectVersionAcl",
    "GetObjectVersionAttributes",
    "GetObjectVersionForReplication",
    "GetObjectVersionTagging",
    "GetObjectVersionTorrent",
    "InitiateReplication",
    "ListMultipartUploadParts",
    "ObjectOwnerOverrideToBucketOwner",
    "PutObject",
    "PutObjectAcl",
    "PutObjectLegalHold",
    "PutObjectRetention",
    "PutObjectTagging",
    "PutObjectVersionAcl",
    "PutObjectVersionTagging",
    "ReplicateDelete",
    "ReplicateObject",
    "ReplicateTags",
    "RestoreObject",
    "UpdateObjectEncryption",
]
_BUCKET = [
    "CreateBucket",
    "CreateBucketMetadataTableConfiguration",
    "DeleteBucket",
    "DeleteBucketMetadataTableConfiguration",
    "DeleteBucketPolicy",
    "DeleteBucketWebsite",
    "GetAccelerateConfiguration",
    "GetAnalyticsConfiguration",
    "GetBucketAbac",
    "GetBucketAcl",
    "GetBucketCORS",
    "GetBucketLocation",
    "GetBucketLogging",
    "GetBucketMetadataTableConfiguration",
    "GetBucketNotification",
    "GetBucketObjectLockConfiguration",
    "GetBucketOwnershipControls",
    "GetBucketPolicy",
    "GetBucketPolicyStatus",
    "GetBucketPublicAccessBlock",
    "GetBucketRequestPayment",
    "GetBucketTagging",
    "GetBucketVersioning",
    "GetBucketWebsite",
    "GetEncryptionConfiguration",
    "GetIntelligentTieringConfiguration",
    "GetInventoryConfiguration",
    "GetLifecycleConfiguration",
    "GetMetricsConfiguration",
    "GetReplicationConfiguration",
    "ListBucket",
    "ListBucketMultipartUploads",
    "ListBucketVersions",
    "PauseReplication",
    "PutAccelerateConfiguration",
    "PutAnalyticsConfiguration",
    "PutBucketAbac",
    "PutBucketAcl",
    "PutBucketCORS",
    "PutBucketLogging",
    "PutBucketNotification",
    "PutBucketObjectLockConfiguration",
    "PutBucketOwnershipControls",
    "PutBucketPolicy",
    "PutBucketPublicAccessBlock",
    "PutBucketRequestPayment",
    "PutBucketTagging",
    "PutBucketVersioning",
    "PutBucketWebsite",
    "PutEncryptionConfiguration",
    "PutIntelligentTieringConfiguration",
    "PutInventoryConfiguration",
    "PutLifecycleConfiguration",
    "PutMetricsConfiguration",
    "PutReplicationConfiguration",
    "UpdateBucketMetadataInventoryTableConfiguration",
    "UpdateBucketMetadataJournalTableConfiguration",
    "ListTagsForResource",
    "TagResource",
    "UntagResource",
]
_ACCOUNT = [
    "CreateAccessPoint",
    "CreateJob",
    "DeleteAccessPoint",
    "DeleteAccessPointPolicy",
    "GetAccessPoint",
    "GetAccessPointPolicy",
    "GetAccountPublicAccessBlock",
    "ListAccessPoints",
    "ListAllMyBuckets",
    "ListJobs",
    "PutAccessPointPolicy",
    "PutAccountPublicAccessBlock",
]
_NODE = [
    "DeleteOp",
    "ListOps",
    "PushOp",
]
"""The node's own: who may change which ops it has; which modules a bounded key may list."""

ACTIONS: Final[dict[str, Level]] = {
    **dict.fromkeys((f"s3:{name}" for name in _OBJECT), "object"),
    **dict.fromkeys((f"s3:{name}" for name in _BUCKET), "bucket"),
    **dict.fromkeys((f"s3:{name}" for name in _ACCOUNT), "account"),
    **dict.fromkeys((f"mesh:{name}" for name in _NODE), "account"),
}
"""Action → what it is about."""

FOLDED: Final[dict[str, Level]] = {name.lower(): level for name, level in ACTIONS.items()}
