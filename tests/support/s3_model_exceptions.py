"""Where the S3 endpoint deviates from botocore's model of S3, and why.

Law: an entry that no deviation needs any more fails the tests, so these lists can only be true.
Names are those of the wire: `x-amz-acl` (a header), `?versionId` (a parameter), `Rule/Status` (elements below
the root); "*" stands for every operation.
"""

from __future__ import annotations

Exceptions = dict[tuple[str, str], str]


def _each(names: str, why: str, *, operations: str = "*") -> Exceptions:
    """Give several members (separated by white space) one reason."""
    return {(operation, name): why for operation in operations.split() for name in names.split()}


def exception_for(table: Exceptions, operation: str, name: str) -> tuple[str, str] | None:
    """Return the key of the entry for a member: of this operation, or of all."""
    return next((key for key in ((operation, name), ("*", name)) if key in table), None)


# --- operations ---------------------------------------------------------------------------------------------

_UNBUILT = """
    CreateBucketMetadataConfiguration CreateBucketMetadataTableConfiguration CreateSession
    DeleteBucketAnalyticsConfiguration DeleteBucketIntelligentTieringConfiguration
    DeleteBucketInventoryConfiguration DeleteBucketMetadataConfiguration
    DeleteBucketMetadataTableConfiguration DeleteBucketMetricsConfiguration DeleteObjectAnnotation
    GetBucketAbac GetBucketAnalyticsConfiguration GetBucketIntelligentTieringConfiguration
    GetBucketInventoryConfiguration GetBucketMetadataConfiguration GetBucketMetadataTableConfiguration
    GetBucketMetricsConfiguration GetObjectAnnotation GetObjectLegalHold GetObjectRetention GetObjectTorrent
    ListBucketAnalyticsConfigurations ListBucketIntelligentTieringConfigurations
    ListBucketInventoryConfigurations ListBucketMetricsConfigurations ListObjectAnnotations PutBucketAbac
    PutBucketAccelerateConfiguration PutBucketAnalyticsConfiguration PutBucketEncryption
    PutBucketIntelligentTieringConfiguration PutBucketInventoryConfiguration PutBucketLogging
    PutBucketMetricsConfiguration PutBucketNotification PutBucketNotificationConfiguration
    PutBucketReplication PutBucketRequestPayment PutBucketWebsite PutObjectAnnotation PutObjectLegalHold
    PutObjectLockConfiguration PutObjectRetention RenameObject RestoreObject SelectObjectContent
    UpdateBucketMetadataAnnotationTableConfiguration UpdateBucketMetadataInventoryTableConfiguration
    UpdateBucketMetadataJournalTableConfiguration UpdateObjectEncryption
"""
NOT_SERVED: dict[str, str] = dict.fromkeys(_UNBUILT.split(), "NotImplemented") | {
    # Object Lambda: a function answers at an endpoint of its own, whose path is no bucket.
    "WriteGetObjectResponse": "InvalidBucketName",
}
"""Operations that are refused, with the error code; docs/s3.md lists them."""

OTHER_NAMES: dict[str, str] = {
    # Earlier operations with the same request as a later one; boto3 keeps both.
    "GetBucketLifecycle": "GetBucketLifecycleConfiguration",
    "GetBucketNotification": "GetBucketNotificationConfiguration",
    "PutBucketLifecycle": "PutBucketLifecycleConfiguration",
    # One operation of two versions, as in CloudTrail.
    "ListObjectsV2": "ListObjects",
    # S3 Express; only the host of the endpoint distinguishes it.
    "ListDirectoryBuckets": "ListBuckets",
}
"""Operations that metrics and audit lines have under another name."""

# --- members of requests ------------------------------------------------------------------------------------

_ENCRYPTION = "NotImplemented: objects are not encrypted at rest"
_LOCKS = "NotImplemented: objects cannot be locked"
_CLASSES = "NotImplemented: everything is STANDARD, so nothing moves to another storage class"
_DIRECTORY = "NotImplemented: a feature of directory buckets (S3 Express)"

REQUEST_MEMBERS: Exceptions = {
    # Refused: what the client asks for would not happen.
    **_each(
        """x-amz-server-side-encryption x-amz-server-side-encryption-aws-kms-key-id
        x-amz-server-side-encryption-bucket-key-enabled x-amz-server-side-encryption-context
        x-amz-server-side-encryption-customer-algorithm x-amz-server-side-encryption-customer-key
        x-amz-server-side-encryption-customer-key-md5
        x-amz-copy-source-server-side-encryption-customer-algorithm
        x-amz-copy-source-server-side-encryption-customer-key
        x-amz-copy-source-server-side-encryption-customer-key-md5""",
        _ENCRYPTION,
    ),
    **_each(
        """x-amz-bucket-object-lock-enabled x-amz-object-lock-legal-hold x-amz-object-lock-mode
        x-amz-object-lock-retain-until-date x-amz-object-lock-event-hold
        x-amz-object-lock-event-hold-duration-days x-amz-object-lock-event-hold-duration-years""",
        _LOCKS,
    ),
    **_each(
        """x-amz-write-offset-bytes x-amz-if-match-size x-amz-if-match-last-modified-time
        x-amz-if-match-initiated-time Object/LastModifiedTime Object/Size
        Location/Name Location/Type Bucket/DataRedundancy Bucket/Type""",
        _DIRECTORY,
    ),
    **_each(
        """Rule/Transition/Date Rule/Transition/Days Rule/Transition/StorageClass
        Rule/NoncurrentVersionTransition/NoncurrentDays Rule/NoncurrentVersionTransition/StorageClass
        Rule/NoncurrentVersionTransition/NewerNoncurrentVersions""",
        _CLASSES,
    ),
    ("CreateBucket", "x-amz-bucket-namespace"): "NotImplemented: all names of buckets are in one namespace",
    ("PutBucketVersioning", "MfaDelete"): "NotImplemented: users have no second factor",
    # Without effect, which the client can rely on or does not notice.
    (
        "*",
        "x-amz-expected-bucket-owner",
    ): "ignored: meshd.auth.authorizer compares it with the bucket's owner",
    ("*", "x-amz-source-expected-bucket-owner"): "ignored: the same, for the source of a copy",
    ("*", "x-amz-request-payer"): "ignored: nobody pays for requests",
    ("*", "x-amz-mfa"): "ignored: MFA delete cannot be enabled, so no deletion needs it",
    ("*", "x-amz-bypass-governance-retention"): "ignored: there are no locks to bypass",
    (
        "*",
        "x-amz-optional-object-attributes",
    ): "ignored: RestoreStatus is of archived objects, which do not exist",
    ("*", "content-length"): "ignored: the HTTP server frames the body and checks its length",
    ("CopyObject", "x-amz-object-annotation-directive"): "ignored: objects have no annotations to copy",
    ("CreateMultipartUpload", "x-amz-storage-class"): "ignored: checked for its name; everything is STANDARD",
    ("PutObject", "x-amz-storage-class"): "ignored: checked for its name; everything is STANDARD",
    ("PutBucketLifecycleConfiguration", "x-amz-transition-default-minimum-object-size"): (
        "ignored: about transitions, which are refused"
    ),
    ("PutBucketPolicy", "x-amz-confirm-remove-self-bucket-access"): (
        "ignored: no policy can keep the bucket's owner from changing the policy"
    ),
    (
        "ListDirectoryBuckets",
        "?max-directory-buckets",
    ): "ignored: an unknown parameter of ListBuckets, as on S3",
    **_each(
        "AccessControlList/Grant/Grantee/xsi:type",
        "ignored: the element inside (ID, URI, EmailAddress) says which kind of grantee it is",
        operations="PutBucketAcl PutObjectAcl",
    ),
    **_each(
        "AccessControlList/Grant/Grantee/DisplayName Owner/DisplayName",
        "ignored: the name of an existing user is looked up by its ID",
        operations="PutBucketAcl PutObjectAcl",
    ),
}
"""Members of a request that are not understood: the error code, or `ignored`, and the reason."""

REQUEST_VALUES: Exceptions = {
    ("x-amz-acl", "aws-exec-read"): "NotImplemented: grants EC2 access to a machine image",
    ("x-amz-checksum-mode", "bogus"): "accepted: anything but ENABLED asks for no checksum",
    ("LocationConstraint", "bogus"): "accepted: any location is kept, because nodes may be anywhere",
}
"""Values that are refused though the model has them, or accepted though it has not. `bogus`: any other."""

OPTIONAL_HERE: Exceptions = {
    ("CopyObject", "x-amz-copy-source"): "without it, the request is a PutObject",
    ("UploadPartCopy", "x-amz-copy-source"): "without it, the request is an UploadPart",
    ("AbortMultipartUpload", "?uploadId"): "without it, the request is a DeleteObject",
    ("ListParts", "?uploadId"): "without it, the request is a GetObject",
    **_each(
        "AccessControlList/Grant/Grantee/xsi:type",
        "the element inside (ID, URI, EmailAddress) says which kind of grantee it is",
        operations="PutBucketAcl PutObjectAcl",
    ),
}
"""Members that the model requires and that a request may omit here."""

# --- responses ----------------------------------------------------------------------------------------------

_NEVER_SET = "a bucket here never has one: the error that S3 gives for that"
NO_RESPONSE: dict[str, str] = {
    "GetBucketEncryption": _NEVER_SET,
    "GetBucketReplication": _NEVER_SET,
    "GetBucketWebsite": _NEVER_SET,
    "GetObjectLockConfiguration": _NEVER_SET,
    "GetBucketLifecycle": "an earlier model of GetBucketLifecycleConfiguration's response",
    "GetBucketNotification": "an earlier model of GetBucketNotificationConfiguration's response",
    "PutBucketLifecycle": "an earlier model of PutBucketLifecycleConfiguration",
    "ListDirectoryBuckets": "another endpoint's (S3 Express)",
}
"""Operations that are served and whose responses are not compared."""

STATUSES: dict[str, tuple[int, str]] = {
    "GetObject": (206, "the request has a range"),
    "HeadObject": (206, "the request has a range"),
    "PutBucketPolicy": (204, "S3 answers so, whatever the model says; minio-js and others depend on it"),
    "PutBucketTagging": (204, "S3 answers so, whatever the model says"),
}
"""Statuses that the model does not have: it has one for an operation, and 200 where it has none."""

_NO_ENCRYPTION = "objects are not encrypted at rest"
_NO_LOCKS = "objects cannot be locked"
_NO_ARCHIVE = "no storage class needs a restore"
_NO_DIRECTORY = "directory buckets (S3 Express), access points and ARNs do not exist"
_NO_UPLOAD_VERSION = "an object gets its version when the upload is completed, not before"
RESPONSE_MEMBERS: Exceptions = {
    **_each(
        """x-amz-server-side-encryption x-amz-server-side-encryption-aws-kms-key-id
        x-amz-server-side-encryption-bucket-key-enabled x-amz-server-side-encryption-context
        x-amz-server-side-encryption-customer-algorithm x-amz-server-side-encryption-customer-key-md5""",
        _NO_ENCRYPTION,
    ),
    **_each(
        """x-amz-object-lock-mode x-amz-object-lock-retain-until-date x-amz-object-lock-legal-hold
        x-amz-object-lock-event-hold x-amz-object-lock-event-hold-duration-days
        x-amz-object-lock-event-hold-duration-years""",
        _NO_LOCKS,
    ),
    **_each(
        """x-amz-restore x-amz-archive-status Contents/RestoreStatus/IsRestoreInProgress
        Contents/RestoreStatus/RestoreExpiryDate Version/RestoreStatus/IsRestoreInProgress
        Version/RestoreStatus/RestoreExpiryDate""",
        _NO_ARCHIVE,
    ),
    **_each(
        """x-amz-access-point-alias x-amz-bucket-arn x-amz-bucket-location-name x-amz-bucket-location-type
        Buckets/Bucket/BucketArn""",
        _NO_DIRECTORY,
    ),
    **_each(
        "x-amz-version-id",
        _NO_UPLOAD_VERSION,
        operations="AbortMultipartUpload CreateMultipartUpload ListParts UploadPart UploadPartCopy",
    ),
    ("ListMultipartUploads", "Upload/VersionId"): _NO_UPLOAD_VERSION,
    ("*", "x-amz-request-charged"): "nobody pays for requests",
    ("*", "x-amz-replication-status"): "replicas within the mesh are no replication between buckets",
    ("*", "x-amz-storage-class"): "omitted for STANDARD, as on S3, and everything is STANDARD",
    ("*", "x-amz-missing-meta"): "all metadata fits into headers: it came in headers",
    **_each(
        "x-amz-delete-marker",
        "a delete marker is an error (404 or 405), which has this header and no members",
        operations="GetObject GetObjectAttributes HeadObject",
    ),
    **_each(
        "x-amz-abort-date x-amz-abort-rule-id",
        "not told in advance; a lifecycle rule aborts the upload all the same",
        operations="CreateMultipartUpload ListParts",
    ),
    ("PutObject", "x-amz-object-size"): "the size after an append, which is refused",
    (
        "GetBucketLocation",
        "LocationConstraint",
    ): "the root itself is the location; botocore has a handler for it",
    ("GetBucketVersioning", "MfaDelete"): "users have no second factor",
    ("GetBucketAccelerateConfiguration", "Status"): "never configured, so empty, as on S3",
    **_each(
        "AccessControlList/Grant/Grantee/EmailAddress",
        "a grant by address is stored as one to the user who has it",
        operations="GetBucketAcl GetObjectAcl",
    ),
    **_each(
        "x-amz-transition-default-minimum-object-size",
        "about transitions, which are refused",
        operations="GetBucketLifecycleConfiguration PutBucketLifecycleConfiguration",
    ),
    **_each(
        """Rule/Transition/Date Rule/Transition/Days Rule/Transition/StorageClass
        Rule/NoncurrentVersionTransition/NoncurrentDays Rule/NoncurrentVersionTransition/StorageClass
        Rule/NoncurrentVersionTransition/NewerNoncurrentVersions""",
        "everything is STANDARD, so nothing moves to another storage class",
        operations="GetBucketLifecycleConfiguration",
    ),
    **_each(
        """LoggingEnabled/TargetBucket LoggingEnabled/TargetPrefix
        LoggingEnabled/TargetGrants/Grant/Permission
        LoggingEnabled/TargetGrants/Grant/Grantee/DisplayName LoggingEnabled/TargetGrants/Grant/Grantee/ID
        LoggingEnabled/TargetGrants/Grant/Grantee/EmailAddress LoggingEnabled/TargetGrants/Grant/Grantee/URI
        LoggingEnabled/TargetGrants/Grant/Grantee/xsi:type
        LoggingEnabled/TargetObjectKeyFormat/PartitionedPrefix/PartitionDateSource""",
        "never configured, so empty, as on S3",
        operations="GetBucketLogging",
    ),
    **_each(
        """CloudFunctionConfiguration/CloudFunction CloudFunctionConfiguration/Event
        CloudFunctionConfiguration/Filter/S3Key/FilterRule/Name
        CloudFunctionConfiguration/Filter/S3Key/FilterRule/Value CloudFunctionConfiguration/Id
        QueueConfiguration/Event QueueConfiguration/Filter/S3Key/FilterRule/Name
        QueueConfiguration/Filter/S3Key/FilterRule/Value QueueConfiguration/Id QueueConfiguration/Queue
        TopicConfiguration/Event TopicConfiguration/Filter/S3Key/FilterRule/Name
        TopicConfiguration/Filter/S3Key/FilterRule/Value TopicConfiguration/Id TopicConfiguration/Topic""",
        "never configured, so empty, as on S3",
        operations="GetBucketNotificationConfiguration",
    ),
}
"""Members of a response that are never sent."""

RESPONSE_EXTRAS: Exceptions = {
    ("*", "content-length"): "HTTP",
    ("*", "content-type"): "HTTP",
    ("*", "x-amz-request-id"): "every response of S3 has it",
    ("GetObjectAcl", "x-amz-version-id"): "S3 sends it (samples of the reference); the model leaves it out",
    ("PutObjectAcl", "x-amz-version-id"): "S3 sends it (samples of the reference); the model leaves it out",
}
"""Headers and elements of a response that the model does not have there."""

ERRORS: dict[str, str] = {
    "EncryptionTypeMismatch": _NO_ENCRYPTION,
    "InvalidWriteOffset": "of an append, which is refused",
    "ObjectNotInActiveTierError": _NO_ARCHIVE,
    "TooManyParts": "of an append, which is refused",
}
"""Error codes of the model that are never sent."""

# --- names in our source ------------------------------------------------------------------------------------

_SIGNATURE = "of a signature, which the model does not describe"
OTHER_HEADERS: dict[str, str] = {
    "x-amz-algorithm": _SIGNATURE,
    "x-amz-content-sha256": _SIGNATURE,
    "x-amz-credential": _SIGNATURE,
    "x-amz-date": _SIGNATURE,
    "x-amz-expires": _SIGNATURE,
    "x-amz-security-token": _SIGNATURE,
    "x-amz-signature": _SIGNATURE,
    "x-amz-signedheaders": _SIGNATURE,
    "x-amz-decoded-content-length": "of an aws-chunked body",
    "x-amz-trailer": "of an aws-chunked body",
    "x-amz-trailer-signature": "of an aws-chunked body",
    "x-amz-request-id": "every response of S3 has it",
    "x-amz-user-agent": "the User-Agent of browsers",
}
"""Headers that our source names and the model does not."""

_ROOT = "the root of a response; the model has the name of a root only where it is a member"
_ERROR = "of an error document, which the model does not describe"
OTHER_ELEMENTS: dict[str, str] = {
    "CompleteMultipartUploadResult": _ROOT,
    "DeleteResult": _ROOT,
    "GetObjectAttributesResponse": _ROOT,
    "InitiateMultipartUploadResult": _ROOT,
    "ListAllMyBucketsResult": _ROOT,
    "ListBucketResult": _ROOT,
    "ListMultipartUploadsResult": _ROOT,
    "ListPartsResult": _ROOT,
    "ListVersionsResult": _ROOT,
    "PostResponse": "of an upload by HTML form, which the model does not describe",
    "HostId": _ERROR,
    "RequestId": _ERROR,
    "Resource": _ERROR,
}
"""Elements that our source names and the model does not."""
