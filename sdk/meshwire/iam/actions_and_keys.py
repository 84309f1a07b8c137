"""Actions and condition keys that a policy may name, from AWS's service authorization reference.

Law: a policy may name an action that this server does not implement, since denying it is legitimate. A
condition key is computed by the server, absent by nature (no request comes through a VPC), or rejected when
the policy is stored: a deny that silently never applies would be a hole.
Invariant: actions are compared without regard to case.
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
"""Actions of our own: changing a node's ops, and listing modules with a restricted key."""

ACTIONS: Final[dict[str, Level]] = {
    **dict.fromkeys((f"s3:{name}" for name in _OBJECT), "object"),
    **dict.fromkeys((f"s3:{name}" for name in _BUCKET), "bucket"),
    **dict.fromkeys((f"s3:{name}" for name in _ACCOUNT), "account"),
    **dict.fromkeys((f"mesh:{name}" for name in _NODE), "account"),
}
"""Action → level it applies to."""

ACTIONS_LOWERCASE: Final[dict[str, Level]] = {name.lower(): level for name, level in ACTIONS.items()}


KNOWN_KEYS: Final = frozenset(
    [
        "aws:currenttime",
        "aws:epochtime",
        "aws:principalarn",
        "aws:principaltype",
        "aws:referer",
        "aws:securetransport",
        "aws:sourceip",
        "aws:tokenissuetime",
        "aws:useragent",
        "aws:userid",
        "aws:username",
        "s3:authtype",
        "s3:delimiter",
        "s3:max-keys",
        "s3:prefix",
        "s3:requestobjecttagkeys",
        "s3:resourceaccount",
        "aws:resourceaccount",
        "s3:signatureage",
        "s3:signatureversion",
        "s3:tlsversion",
        "s3:versionid",
        "s3:x-amz-acl",
        "s3:x-amz-content-sha256",
        "s3:x-amz-copy-source",
        "s3:x-amz-grant-full-control",
        "s3:x-amz-grant-read",
        "s3:x-amz-grant-read-acp",
        "s3:x-amz-grant-write",
        "s3:x-amz-grant-write-acp",
        "s3:x-amz-metadata-directive",
        "s3:x-amz-object-ownership",
        "s3:x-amz-server-side-encryption",
        "s3:x-amz-server-side-encryption-aws-kms-key-id",
        "s3:x-amz-server-side-encryption-customer-algorithm",
        "s3:x-amz-storage-class",
        "s3:x-amz-website-redirect-location",
        "s3:if-match",
        "s3:if-none-match",
        "s3:objectcreationoperation",
    ]
)
KNOWN_KEY_PREFIXES: Final = ("s3:existingobjecttag/", "s3:requestobjecttag/", "s3:buckettag/")

# Keys that requests to this server never have, so evaluating them as absent is correct.
ABSENT_KEYS: Final = frozenset(
    [
        "aws:calledvia",
        "aws:calledviafirst",
        "aws:calledvialast",
        "aws:federatedprovider",
        "aws:multifactorauthage",
        "aws:multifactorauthpresent",
        "aws:principalisawsservice",
        "aws:principalorgid",
        "aws:principalorgpaths",
        "aws:principalservicename",
        "aws:sourceaccount",
        "aws:sourcearn",
        "aws:sourceorgid",
        "aws:sourceorgpaths",
        "aws:sourceowner",
        "aws:sourcevpc",
        "aws:sourcevpcarn",
        "aws:sourcevpce",
        "aws:viaawsservice",
        "aws:vpcsourceip",
        "s3:accessgrantsinstancearn",
        "s3:accesspointnetworkorigin",
        "s3:dataaccesspointaccount",
        "s3:dataaccesspointarn",
        "s3:inventoryaccessibleoptionalfields",
        "s3:object-lock-legal-hold",
        "s3:object-lock-mode",
        "s3:object-lock-remaining-retention-days",
        "s3:object-lock-retain-until-date",
    ]
)
ABSENT_KEY_PREFIXES: Final = ("aws:principaltag/",)


# Valid in S3 but not computed by this server.
UNSUPPORTED_KEYS: Final = frozenset(
    ["aws:requestedregion", "aws:tagkeys", "s3:jobsuspendedcause", "s3:locationconstraint"]
)
UNSUPPORTED_KEY_PREFIXES: Final = ("aws:requesttag/", "aws:resourcetag/")


def is_known_key(key: str) -> bool:
    """Whether a policy may refer to `key` (lower case)."""
    return key in KNOWN_KEYS or key in ABSENT_KEYS or key.startswith(KNOWN_KEY_PREFIXES + ABSENT_KEY_PREFIXES)


def is_unsupported_key(key: str) -> bool:
    """Whether S3 has `key` (lower case) and this server does not support it."""
    return key in UNSUPPORTED_KEYS or key.startswith(UNSUPPORTED_KEY_PREFIXES)
