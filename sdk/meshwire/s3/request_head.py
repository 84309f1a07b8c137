"""Head of an S3 request: method, target and headers, query parameters, and the authentication mechanism.

Law: a repeated parameter is rejected; an unknown or unsupported sub-resource answers NotImplemented. A
request signed in two ways is rejected, and so is an `x-amz-*` parameter outside a presigned URL, where it
would be neither signed nor a header.
Invariant: after `check_parameters`, the operation of (level, method) reads every sub-resource in the query.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from meshwire import names
from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.bucket_settings import BucketSetting


class RequestHead(NamedTuple):
    """The head of a request. `raw_path` and `raw_query` are as sent, still percent-encoded, the query
    without `?`; header names are lower-case, values of repeated headers joined by `,`. `host_bucket` is the
    bucket given by the host (virtual-host addressing), in which case the path is the key alone."""

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, str]
    host_bucket: str = ""


MAX_INTEGER = 2_147_483_647
MAX_VERSION = 1024

_LISTING = frozenset({"prefix", "delimiter", "encoding-type"})
# Settings that this server supports, and those that S3 supports but this server truthfully reports as not
# set.
SETTINGS = frozenset({"acl", "cors", "lifecycle", "ownershipControls", "policy", "policyStatus"}) | {
    "publicAccessBlock",
    "tagging",
    "versioning",
}
_NEVER_SET = frozenset(
    {
        "accelerate",
        "encryption",
        "logging",
        "notification",
        "object-lock",
        "replication",
        "requestPayment",
        "website",
    }
)
_REMOVABLE = frozenset(
    {"encryption", "replication", "website"}
)  # deleting one of these succeeds, because it is never set
_PARAMETERS: Mapping[tuple[str, str], frozenset[str]] = MappingProxyType(
    {
        ("service", "GET"): frozenset({"prefix", "max-buckets", "continuation-token", "bucket-region"}),
        ("bucket", "GET"): _LISTING
        | {"location", "marker", "max-keys", "list-type", "continuation-token", "start-after", "fetch-owner"}
        | {"uploads", "key-marker", "upload-id-marker", "max-uploads", "versions", "version-id-marker"}
        | SETTINGS
        | _NEVER_SET,
        ("bucket", "PUT"): SETTINGS - {"policyStatus"},
        ("bucket", "DELETE"): (SETTINGS - {"acl", "policyStatus", "versioning"}) | _REMOVABLE,
        ("bucket", "POST"): frozenset({"delete"}),
        ("object", "GET"): frozenset(
            {
                "uploadId",
                "max-parts",
                "part-number-marker",
                "partNumber",
                "versionId",
                "acl",
                "attributes",
                "tagging",
                "member",
                "members",
                "prefix",
                "start-after",
                "max-keys",
            }
        ),
        ("object", "HEAD"): frozenset({"partNumber", "versionId", "member"}),
        ("object", "PUT"): frozenset({"acl", "uploadId", "partNumber", "tagging", "versionId"}),
        ("object", "POST"): frozenset({"uploads", "uploadId"}),
        ("object", "DELETE"): frozenset({"uploadId", "versionId", "tagging"}),
    }
)
_BUILT = (
    frozenset({"attributes", "location", "uploads", "uploadId", "partNumber", "delete", "versions"})
    | {"member", "members"}
    | SETTINGS
)
# Sub-resources in S3's reference that this server does not implement.
_UNBUILT = frozenset(
    [
        "abac",
        "accelerate",
        "analytics",
        "annotation",
        "append",
        "encryption",
        "intelligent-tiering",
        "inventory",
        "legal-hold",
        "logging",
        "metadataAnnotationTable",
        "metadataConfiguration",
        "metadataInventoryTable",
        "metadataJournalTable",
        "metadataTable",
        "metrics",
        "notification",
        "object-lock",
        "renameObject",
        "replication",
        "requestPayment",
        "restore",
        "retention",
        "select",
        "select-type",
        "session",
        "tagging",
        "torrent",
        "uploadPartCopy",
        "website",
    ]
)
# Never sub-resources: SDK bookkeeping, and signatures (SigV4's and SigV2's).
_IGNORED = frozenset({"x-id", "AWSAccessKeyId", "Signature", "Expires"})
# Headers that boto3 puts into a version 2 presigned URL in addition to x-amz-*.
HOISTED_V2 = frozenset({"content-md5", "content-type"})
RESPONSE_OVERRIDES = frozenset(
    f"response-{name}"
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
)
_NO_PARAMETERS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Query:
    """Decoded query parameters; a parameter without a value is empty."""

    values: Mapping[str, str]

    def check_parameters(self, level: str, method: str, *, presigned: bool) -> None:
        """Raise S3Error unless every sub-resource is one that (level, method) supports. `presigned`: the
        query is that of a presigned URL."""
        allowed = _PARAMETERS.get((level, method), _NO_PARAMETERS)
        for name, value in self.values.items():
            if name in allowed or name in _IGNORED or name[:6].lower() == "x-amz-":
                continue
            if name in RESPONSE_OVERRIDES and level == "object":
                continue
            if name in HOISTED_V2 and presigned:
                continue
            _refuse(name, value, method)

    def bucket_setting(self) -> BucketSetting | None:
        """Return the requested bucket setting. Raises InvalidArgument if the query names two
        sub-resources."""
        named = [name for name in self.values if name in SETTINGS or name in _NEVER_SET]
        if not named:
            return None
        others = [name for name in self.values if name in _BUILT and name not in named]
        if len(named) + len(others) > 1:
            both = ", ".join((*named, *others))
            raise invalid_argument("ResourceType", named[0], f"Conflicting query string parameters: {both}")
        return cast("BucketSetting", named[0])

    def text(self, name: str) -> str:
        """Return a parameter that is compared with keys, empty if absent. Raises KeyTooLongError,
        InvalidArgument."""
        value = self.values.get(name, "")
        if value:
            try:
                names.check_key(value)
            except names.KeyTooLongError as error:
                raise key_too_long(error.size) from None
            except names.KeyNameError as error:
                raise invalid_argument(name, value, f"{name}: {error}") from None
        return value

    def integer(
        self, name: str, default: int, *, low: int = 0, high: int = MAX_INTEGER, label: str = ""
    ) -> int:
        """Return a decimal parameter. Raises InvalidArgument."""
        value = self.values.get(name)
        if value is None:
            return default
        number = int(value) if value.isascii() and value.isdigit() and len(value) <= 10 else -1
        if not low <= number <= high:
            raise invalid_argument(
                name, value, f"Argument {label or name} must be an integer between {low} and {high}"
            )
        return number

    def version_id(self) -> str | None:
        """Return versionId, or None if absent. Whether the version exists is for the store to decide.
        Raises InvalidArgument."""
        version = self.values.get("versionId")
        if version is not None:
            check_version(version)
        return version

    def encode_url(self) -> bool:
        encoding = self.values.get("encoding-type")
        if encoding is not None and encoding != "url":
            raise invalid_argument("encoding-type", encoding, "Invalid Encoding Method specified in Request")
        return encoding is not None


def _refuse(name: str, value: str, method: str) -> None:
    if name in _UNBUILT:
        raise S3Error("NotImplemented", f"The sub-resource ?{name} is not implemented.")
    if name == "partNumber":
        raise invalid_argument(name, value, "This operation does not accept a query-string.")
    if name in _BUILT:
        raise S3Error("MethodNotAllowed", extra={"Method": method, "ResourceType": name.upper()})
    # S3 ignores unknown parameters, such as the cache busters of browsers. On a write, or without a value,
    # an unknown name may be a sub-resource of a later S3, and the plain operation in its place would do
    # harm.
    if not value or method not in {"GET", "HEAD"}:
        raise S3Error("NotImplemented", f"Unknown query parameter {name[:64]!r}.")


@lru_cache(maxsize=64)  # authentication, routing and policies each parse the same query
def read_query(raw_query: str) -> Query:
    """Parse a query. Raises S3Error: InvalidURI (broken escapes, not UTF-8), InvalidArgument (a repeated
    parameter)."""
    values: dict[str, str] = {}
    try:
        parameters = percent_encoding.split_query(raw_query)
    except percent_encoding.PercentError:
        raise S3Error("InvalidURI") from None
    for name, value in parameters:
        if name in values:
            raise invalid_argument(name, value, f"The query parameter {name[:64]!r} appears twice.")
        values[name] = value
    return Query(MappingProxyType(values))


def is_subresource(name: str) -> bool:
    """Whether a parameter selects another operation, implemented or not."""
    return name in _BUILT or name in _UNBUILT


def check_version(version: str, name: str = "versionId") -> None:
    """Raise InvalidArgument for a string that cannot be a version id."""
    if not version:
        raise invalid_argument(name, version, "Version id cannot be the empty string")
    if len(version) > MAX_VERSION or not (version.isascii() and version.isprintable()):
        raise invalid_argument(name, version, "Invalid version id specified")


def invalid_argument(name: str, value: str, message: str) -> S3Error:
    """Return InvalidArgument with S3's details."""
    return S3Error(
        "InvalidArgument", message, extra={"ArgumentName": name[:64], "ArgumentValue": value[:256]}
    )


def key_too_long(size: int) -> S3Error:
    return S3Error("KeyTooLongError", extra={"Size": str(size), "MaxSizeAllowed": str(names.MAX_KEY_BYTES)})


class AuthMechanism(Enum):
    """Where a request carries its signature, and in which version."""

    ANONYMOUS = "anonymous"
    HEADER_V4 = "header, version 4"
    HEADER_V2 = "header, version 2"
    PRESIGNED_V4 = "query, version 4"
    PRESIGNED_V2 = "query, version 2"

    @property
    def presigned(self) -> bool:
        return self is AuthMechanism.PRESIGNED_V4 or self is AuthMechanism.PRESIGNED_V2


_BY_PARAMETER = {
    "X-Amz-Algorithm": AuthMechanism.PRESIGNED_V4,
    "X-Amz-Credential": AuthMechanism.PRESIGNED_V4,
    "X-Amz-Signature": AuthMechanism.PRESIGNED_V4,
    "AWSAccessKeyId": AuthMechanism.PRESIGNED_V2,
    "Signature": AuthMechanism.PRESIGNED_V2,
}


def read_auth_mechanism(headers: Mapping[str, str], query: Query) -> AuthMechanism:
    """Return how a request with these headers and this query is signed, without verifying the signature.

    Raises S3Error InvalidArgument: two mechanisms; an x-amz-* parameter in a request that is not presigned.
    """
    mechanism, amz = _header_mechanism(headers), ""
    for name in query.values:
        presigned = _BY_PARAMETER.get(name)
        if presigned is None:
            amz = name if name[:6].lower() == "x-amz-" else amz
        elif mechanism is AuthMechanism.ANONYMOUS:
            mechanism = presigned
        elif mechanism is not presigned:
            raise S3Error("InvalidArgument", _ONE_MECHANISM)
    if amz and not mechanism.presigned:
        message = f"The query parameter {amz[:64]!r} is only allowed in a presigned URL. "
        raise invalid_argument(amz, query.values[amz], message + "Send it as a header, and sign it.")
    return mechanism


_ONE_MECHANISM = (
    "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature query string "
    "parameter or the Authorization header should be specified"
)


def _header_mechanism(headers: Mapping[str, str]) -> AuthMechanism:
    authorization = headers.get("authorization")
    if authorization is None:
        return AuthMechanism.ANONYMOUS
    return AuthMechanism.HEADER_V2 if authorization.startswith("AWS ") else AuthMechanism.HEADER_V4
