"""Protocol errors: S3's error codes with S3Error, and PolicyError for policy documents.

Law: an S3Error carries meaning (code, message, details); `s3.responses` turns it into a status and a body.
Invariant: every code raised is in `CODES`, so every error has S3's own status.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """An S3 error code with its HTTP status. `message` is sent when the S3Error has no more specific
    message."""

    code: str
    status: int
    message: str


# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; codes of our own are at the end.
_TABLE = (
    ("AccessDenied", 403, "Access Denied"),
    ("AccessForbidden", 403, "CORSResponse: CORS is not enabled for this bucket."),
    ("AuthorizationHeaderMalformed", 400, "The authorization header you provided is invalid."),
    (
        "AuthorizationQueryParametersError",
        400,
        "The authorization query parameters you provided are invalid.",
    ),
    ("BadDigest", 400, "The digest you specified did not match what we received."),
    ("BadRequest", 400, "The request is malformed."),
    ("BucketAlreadyExists", 409, "The requested bucket name is not available. Select a different name."),
    (
        "BucketAlreadyOwnedByYou",
        409,
        "Your previous request to create the named bucket succeeded and you own it.",
    ),
    ("BucketNotEmpty", 409, "The bucket you tried to delete is not empty."),
    ("ConditionalRequestConflict", 409, "A conflicting operation occurred during this request; try again."),
    ("EntityTooLarge", 400, "Your proposed upload exceeds the maximum allowed object size."),
    ("EntityTooSmall", 400, "Your proposed upload is smaller than the minimum allowed size."),
    ("ExpiredToken", 400, "The provided token has expired."),
    (
        "IllegalLocationConstraintException",
        400,
        "The location constraint is incompatible with this endpoint.",
    ),
    (
        "IncompleteBody",
        400,
        "You did not provide the number of bytes specified by the Content-Length HTTP header.",
    ),
    ("InternalError", 500, "We encountered an internal error. Please try again."),
    ("InvalidAccessKeyId", 403, "The AWS access key ID you provided does not exist in our records."),
    ("InvalidArgument", 400, "Invalid Argument"),
    ("InvalidBucketName", 400, "The specified bucket is not valid."),
    ("InvalidDigest", 400, "The Content-MD5 or checksum value that you specified is not valid."),
    ("InvalidLocationConstraint", 400, "The specified location (Region) constraint is not valid."),
    ("InvalidObjectState", 403, "The operation is not valid for the object's storage class."),
    (
        "InvalidPart",
        400,
        "One or more of the specified parts could not be found. The part might not have been uploaded, or "
        "the "
        "specified entity tag might not have matched the part's entity tag.",
    ),
    ("InvalidPartNumber", 416, "The requested partnumber is not satisfiable"),
    (
        "InvalidPartOrder",
        400,
        "The list of parts was not in ascending order. The parts list must be specified in order by part "
        "number.",
    ),
    ("InvalidRange", 416, "The requested range is not satisfiable"),
    (
        "InvalidRedirectLocation",
        400,
        "The website redirect location must have a prefix of 'http://' or 'https://' or '/'.",
    ),
    ("InvalidRequest", 400, "Invalid Request"),
    ("InvalidStorageClass", 400, "The storage class you specified is not valid"),
    ("InvalidTag", 400, "The tag provided was not a valid tag."),
    ("InvalidToken", 400, "The provided token is malformed or otherwise not valid."),
    ("InvalidURI", 400, "Couldn't parse the specified URI."),
    ("KeyTooLongError", 400, "Your key is too long"),
    ("MalformedTrailerError", 400, "The request contained trailing data that was not well-formed."),
    (
        "MalformedXML",
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    (
        "MaxPostPreDataLengthExceededError",
        400,
        "Your POST request fields preceding the upload file were too large.",
    ),
    ("MaxMessageLengthExceeded", 400, "Your request was too large."),
    ("MetadataTooLarge", 400, "Your metadata headers exceed the maximum allowed metadata size"),
    ("MethodNotAllowed", 405, "The specified method is not allowed against this resource."),
    ("MissingContentLength", 411, "You must provide the Content-Length HTTP header."),
    ("MissingRequestBodyError", 400, "Request body is empty."),
    ("NoSuchBucket", 404, "The specified bucket does not exist"),
    ("NoSuchKey", 404, "The specified key does not exist."),
    (
        "NoSuchUpload",
        404,
        "The specified upload does not exist. The upload ID may be invalid, or the upload may have been "
        "aborted "
        "or completed.",
    ),
    ("NoSuchVersion", 404, "The specified version does not exist."),
    ("NotImplemented", 501, "A header or query you provided implies functionality that is not implemented."),
    ("NotModified", 304, "Not Modified"),
    (
        "OperationAborted",
        409,
        "A conflicting conditional operation is in progress against this resource. Try again.",
    ),
    ("PreconditionFailed", 412, "At least one of the pre-conditions you specified did not hold"),
    ("RequestHeaderSectionTooLarge", 400, "Your request header section exceeds the maximum allowed size."),
    (
        "RequestTimeTooSkewed",
        403,
        "The difference between the request time and the current time is too large.",
    ),
    (
        "RequestTimeout",
        400,
        "Your socket connection was not read from or written to within the timeout period.",
    ),
    ("ServiceUnavailable", 503, "Service is unable to handle the request. Please try again."),
    (
        "SignatureDoesNotMatch",
        403,
        "The request signature we calculated does not match the signature you provided. Check your key and "
        "signing method.",
    ),
    ("SlowDown", 503, "Please reduce your request rate."),
    ("TooManyBuckets", 400, "You have attempted to create more buckets than allowed"),
    (
        "XAmzContentSHA256Mismatch",
        400,
        "The provided 'x-amz-content-sha256' header does not match what was computed.",
    ),
    ("AccessControlListNotSupported", 400, "The bucket does not allow ACLs"),
    (
        "IllegalVersioningConfigurationException",
        400,
        "The versioning configuration specified in the request is not valid.",
    ),
    (
        "InvalidBucketAclWithObjectOwnership",
        400,
        "Bucket cannot have ACLs set with ObjectOwnership's BucketOwnerEnforced setting",
    ),
    ("InvalidBucketState", 409, "The request is not valid for the current state of the bucket."),
    (
        "InvalidPolicyDocument",
        400,
        "The content of the form does not meet the conditions specified in the policy document.",
    ),
    (
        "MalformedACLError",
        400,
        "The ACL that you provided was not well formed or did not validate against our published schema.",
    ),
    ("MalformedPOSTRequest", 400, "The body of your POST request is not well-formed multipart/form-data."),
    ("MalformedPolicy", 400, "This policy contains invalid JSON or does not follow the policy grammar."),
    ("MissingSecurityHeader", 400, "Your request was missing a required header"),
    ("NoSuchBucketPolicy", 404, "The bucket policy does not exist"),
    ("NoSuchCORSConfiguration", 404, "The CORS configuration does not exist"),
    ("NoSuchLifecycleConfiguration", 404, "The lifecycle configuration does not exist"),
    ("NoSuchPublicAccessBlockConfiguration", 404, "The public access block configuration was not found"),
    ("NoSuchTagSet", 404, "The TagSet does not exist"),
    ("NoSuchWebsiteConfiguration", 404, "The specified bucket does not have a website configuration"),
    ("ObjectLockConfigurationNotFoundError", 404, "Object Lock configuration does not exist for this bucket"),
    ("OwnershipControlsNotFoundError", 404, "The bucket ownership controls were not found"),
    ("PolicyTooLarge", 400, "Policy exceeds the maximum allowed document size."),
    ("ReplicationConfigurationNotFoundError", 404, "The replication configuration was not found"),
    (
        "ServerSideEncryptionConfigurationNotFoundError",
        404,
        "The server side encryption configuration was not found",
    ),
    ("UnexpectedContent", 400, "This request does not support content"),
    (
        "UnresolvableGrantByEmailAddress",
        400,
        "The email address you provided does not match any account on record.",
    ),
    (
        "UserKeyMustBeSpecified",
        400,
        "The form must have this field, and have it before the file.",
    ),
    # Ours: the source object of a view cannot be transformed. The AWS SDKs do not retry a 422.
    ("UnprocessableSource", 422, "The source object cannot be transformed."),
    # Ours: a source object that the view pinned was replaced or deleted. Retrying does not help.
    ("SourceChanged", 409, "A source object of this view was replaced or deleted."),
    ("ViewOutdated", 410, "This node can no longer build this view. Create the view again."),
    # Not an S3 code: S3 never runs out of disk. The AWS SDKs do not retry a 507, so the caller sees it at
    # once.
    (
        "InsufficientStorage",
        507,
        "There is no space left on the disks of this node. Delete objects or add a disk.",
    ),
)

CODES: Mapping[str, ErrorCode] = MappingProxyType({row[0]: ErrorCode(*row) for row in _TABLE})


class S3Error(Exception):
    """An error response in S3's terms.

    `headers` are sent with the response (for example Content-Range of a 416, ETag of a 304); `extra` become
    elements of the error document. `resource` may be empty: rendering then uses the path of the request.
    """

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        resource: str = "",
        headers: Mapping[str, str] = _NOTHING,
        extra: Mapping[str, str] = _NOTHING,
    ) -> None:
        entry = CODES[code]
        self.code = code
        self.status = entry.status
        self.message = entry.message if message is None else message
        self.resource = resource
        self.headers = headers
        self.extra = extra
        super().__init__(f"{code}: {self.message}")


def precondition_failed(condition: str) -> S3Error:
    """Return the 412 error of a condition, named by its header as S3 spells it; s3fs relies on that name."""
    return S3Error("PreconditionFailed", extra={"Condition": condition} if condition else _NOTHING)


class PolicyError(ValueError):
    """A policy document that this server does not accept. `path` names the location, for example
    `Statement[0].Action`; `supported` is False when the document is valid for S3 but uses a feature that
    this server lacks."""

    def __init__(self, path: str, message: str, *, supported: bool = True) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path, self.message, self.supported = path, message, supported
