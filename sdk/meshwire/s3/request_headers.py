"""Headers of an S3 request, parsed into the values of operations.

Law: a header that asks for an unsupported feature (encryption, locks) is rejected, never ignored, because
the client would assume it took effect.
Invariant: no value returned contains control characters.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from meshwire import names
from meshwire.errors import S3Error
from meshwire.http_values import conditional_requests, dates, percent_encoding
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3.bucket_settings import OWNERSHIPS
from meshwire.s3.checksum_headers import is_checksum_value_header
from meshwire.s3.operations import CopySource, ObjectHeaders
from meshwire.s3.request_head import HOISTED_V2, AuthMechanism, check_version, invalid_argument, key_too_long

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.request_head import Query


MAX_METADATA_BYTES = 2048
MAX_PART_NUMBER = 10_000

_META = "x-amz-meta-"
_REDIRECT = "x-amz-website-redirect-location"
_SYSTEM = (
    "content-type",
    "content-encoding",
    "content-disposition",
    "content-language",
    "cache-control",
    "expires",
    _REDIRECT,
)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_COPY_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})\Z", re.A)
_STORAGE_CLASSES = frozenset(
    [
        "STANDARD",
        "REDUCED_REDUNDANCY",
        "STANDARD_IA",
        "ONEZONE_IA",
        "INTELLIGENT_TIERING",
        "GLACIER",
        "GLACIER_IR",
        "DEEP_ARCHIVE",
        "EXPRESS_ONEZONE",
        "OUTPOSTS",
        "SNOW",
        "FSX_OPENZFS",
        "FSX_ONTAP",
        "AWS_BACKUP_WARM",
        "AWS_BACKUP_LOW_COST_WARM",
    ]
)
_AUTHENTICATION = frozenset(
    f"x-amz-{name}"
    for name in (
        "algorithm",
        "credential",
        "date",
        "expires",
        "signedheaders",
        "signature",
        "security-token",
        "content-sha256",
    )
)

# Headers of unsupported features, with the values that request nothing.
_NONE: frozenset[str] = frozenset()
_UNBUILT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x-amz-bucket-namespace": frozenset({"global"}),
        "x-amz-bucket-object-lock-enabled": frozenset({"false", "False"}),
        "x-amz-object-lock-event-hold": frozenset({"OFF"}),
        "x-amz-object-lock-legal-hold": frozenset({"OFF"}),
        "x-amz-server-side-encryption-bucket-key-enabled": frozenset({"false", "False"}),
    }
    | dict.fromkeys(
        (
            "x-amz-copy-source-server-side-encryption-customer-algorithm",
            "x-amz-copy-source-server-side-encryption-customer-key",
            "x-amz-copy-source-server-side-encryption-customer-key-md5",
            "x-amz-if-match-initiated-time",
            "x-amz-if-match-last-modified-time",
            "x-amz-if-match-size",
            "x-amz-object-lock-event-hold-duration-days",
            "x-amz-object-lock-event-hold-duration-years",
            "x-amz-object-lock-mode",
            "x-amz-object-lock-retain-until-date",
            "x-amz-rename-source",
            "x-amz-server-side-encryption",
            "x-amz-server-side-encryption-aws-kms-key-id",
            "x-amz-server-side-encryption-context",
            "x-amz-server-side-encryption-customer-algorithm",
            "x-amz-server-side-encryption-customer-key",
            "x-amz-server-side-encryption-customer-key-md5",
            "x-amz-write-offset-bytes",
        ),
        _NONE,
    )
)


_UNBUILT_NAMES = frozenset(_UNBUILT)


def reject_unsupported_headers(headers: Mapping[str, str]) -> None:
    """Raise NotImplemented for a header whose meaning would be lost."""
    if _UNBUILT_NAMES.isdisjoint(headers):
        return
    for name in _UNBUILT_NAMES.intersection(headers):
        if headers[name] not in _UNBUILT[name]:
            raise S3Error(
                "NotImplemented",
                f"The header {name} implies functionality that is not implemented.",
                extra={"Header": name},
            )


def with_presigned_headers(
    headers: Mapping[str, str], query: Query, mechanism: AuthMechanism
) -> Mapping[str, str]:
    """Add the x-amz-* parameters of a presigned URL to `headers`, since S3 treats them as headers.

    Checksum values are excluded: a URL is created before its body is known, and the JavaScript SDK puts the
    checksum of an empty body into it. S3 ignores them.
    """
    if not mechanism.presigned:
        return headers
    also = HOISTED_V2 if mechanism is AuthMechanism.PRESIGNED_V2 else _NONE
    hoisted = {
        name.lower(): value.strip(" \t")  # stripped like a header value
        for name, value in query.values.items()
        if name[:6].lower() == "x-amz-" or name.lower() in also
    }
    kept = {n: v for n, v in hoisted.items() if n not in _AUTHENTICATION and not is_checksum_value_header(n)}
    return {**kept, **headers}


def check_bucket(bucket: str) -> None:
    try:
        names.check_bucket_name(bucket)
    except names.BucketNameError as error:
        raise S3Error(
            "InvalidBucketName",
            f"The specified bucket is not valid: {error}.",
            extra={"BucketName": bucket[:256]},
        ) from None


def check_key(key: str) -> None:
    try:
        names.check_key(key)
    except names.KeyTooLongError as error:
        raise key_too_long(error.size) from None
    except names.KeyNameError as error:
        raise S3Error("InvalidURI", f"Couldn't parse the specified URI: {error}.") from None


def checked_header_value(name: str, value: str) -> str:
    """Return a header value fit to be stored and sent: bytes that are not UTF-8 are decoded as Latin-1 (as
    in older HTTP, RFC 9110 §5.5)."""
    value = value.strip(" \t")
    if not value.isascii():
        try:
            raw = percent_encoding.to_bytes(value)
        except percent_encoding.PercentError:
            raise invalid_argument(name, "", f"{name} is not text.") from None
        try:
            value = raw.decode()
        except UnicodeDecodeError:
            value = raw.decode("latin-1")
    if _CONTROL.search(value):
        raise invalid_argument(name, "", f"{name} must not contain control characters.")
    return value


# --- stored with an object ----------------------------------------------------------------------------


def object_headers(headers: Mapping[str, str]) -> ObjectHeaders:
    """Parse the headers stored with an object. Raises S3Error: MetadataTooLarge, InvalidArgument,
    InvalidRedirectLocation, InvalidStorageClass."""
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class not in _STORAGE_CLASSES:
        raise S3Error("InvalidStorageClass", extra={"StorageClassRequested": storage_class[:64]})
    system = {name: checked_header_value(name, headers[name]) for name in _SYSTEM if name in headers}
    if "content-encoding" in system:
        _strip_chunked(system)
    if not system.get(_REDIRECT, "/").startswith(("/", "http://", "https://")):
        raise S3Error("InvalidRedirectLocation")
    metadata = {
        name[len(_META) :]: checked_header_value(name, value)
        for name, value in headers.items()
        if name.startswith(_META)
    }
    if metadata:
        _check_metadata(metadata)
    return ObjectHeaders(system, metadata)


def _strip_chunked(system: dict[str, str]) -> None:
    """Remove `aws-chunked`, which describes the transfer, not the content (`gzip,aws-chunked` is stored as
    `gzip`)."""
    codings = system["content-encoding"].split(",")
    others = [coding for coding in codings if coding.strip().lower() != "aws-chunked"]
    if len(others) == len(codings):
        return
    kept = ",".join(coding for coding in others if coding.strip()).strip()
    del system["content-encoding"]
    if kept:
        system["content-encoding"] = kept


def _check_metadata(metadata: Mapping[str, str]) -> None:
    size = 0
    for name, value in metadata.items():
        if _TOKEN.match(name) is None:
            raise invalid_argument(
                "x-amz-meta-", name, "A metadata name must consist of header token characters."
            )
        size += len(name) + len(value.encode())
    if size > MAX_METADATA_BYTES:
        raise S3Error(
            "MetadataTooLarge", extra={"Size": str(size), "MaxSizeAllowed": str(MAX_METADATA_BYTES)}
        )


def response_overrides(query: Query) -> dict[str, str]:
    """Return the response-* parameters: header name → value."""
    return {
        name[9:]: checked_header_value(name, value)
        for name, value in query.values.items()
        if name.startswith("response-") and name[9:] in _SYSTEM
    }


# --- conditions -------------------------------------------------------------------------------------------

_CONDITIONAL = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
_CONDITIONAL_NAMES = frozenset(_CONDITIONAL)
_COPY_CONDITIONAL = tuple(f"x-amz-copy-source-{name}" for name in _CONDITIONAL)


def read_conditions(headers: Mapping[str, str]) -> Conditions | None:
    """Parse the conditional headers; None if there are none."""
    return None if _CONDITIONAL_NAMES.isdisjoint(headers) else _conditions(headers, _CONDITIONAL)


def read_copy_source_conditions(headers: Mapping[str, str]) -> Conditions | None:
    """Parse the x-amz-copy-source-if-* headers."""
    return _conditions(headers, _COPY_CONDITIONAL)


def _conditions(headers: Mapping[str, str], names_: tuple[str, ...]) -> Conditions | None:
    """Parse conditions. An If-Match without a tag matches nothing: the client expects a certain content but
    did not name it."""
    match, none_match, modified, unmodified = [headers.get(name) for name in names_]
    if match is None and none_match is None and modified is None and unmodified is None:
        return None
    return Conditions(
        () if match is None else conditional_requests.parse_etag_list(match) or ("",),
        conditional_requests.parse_etag_list(none_match) if none_match else (),
        dates.parse_http(modified) if modified else None,
        dates.parse_http(unmodified) if unmodified else None,
    )


def if_range(headers: Mapping[str, str]) -> str | int | None:
    """Parse If-Range (RFC 9110 §13.1.5): an ETag, or a time in seconds since the epoch; a weak tag matches
    nothing."""
    value = headers.get("if-range")
    if value is None:
        return None
    seconds = dates.parse_http(value)
    if seconds is not None:
        return seconds
    return "" if value.startswith("W/") else conditional_requests.unquote_etag(value)


# --- copies ---------------------------------------------------------------------------------------------


def copy_source(headers: Mapping[str, str]) -> CopySource:
    """Parse `[/]bucket/key[?versionId=…]`, decoded with `+` as a space, as S3 does and s5cmd relies on."""
    value = headers["x-amz-copy-source"].strip()
    path, marked, version = value.partition("?versionId=")
    try:
        decoded = unquote_to_bytes(percent_encoding.to_bytes(path.replace("+", " "))).decode()
    except (percent_encoding.PercentError, UnicodeDecodeError):
        decoded = ""
    bucket, _, key = decoded.removeprefix("/").partition("/")
    if not bucket or not key:
        raise invalid_argument(
            "x-amz-copy-source",
            "",
            "Copy Source must mention the source bucket and key: sourcebucket/sourcekey",
        )
    check_bucket(bucket)
    check_key(key)
    return CopySource(bucket, key, _source_version(version) if marked else None)


def _source_version(text: str) -> str:
    try:
        version = percent_encoding.decode(text)
    except percent_encoding.PercentError:
        raise invalid_argument("x-amz-copy-source", "", "Invalid version id specified") from None
    check_version(version)
    return version


def copy_range(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (first, last), both inclusive."""
    value = headers.get("x-amz-copy-source-range")
    if value is None:
        return None
    match = _COPY_RANGE.match(value.strip())
    if match is None or int(match[1]) > int(match[2]):
        raise invalid_argument(
            "x-amz-copy-source-range",
            value,
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last "
            "are the zero-based offsets of the first and last bytes to copy",
        )
    return int(match[1]), int(match[2])


def replaces_metadata(headers: Mapping[str, str]) -> bool:
    directive = headers.get("x-amz-metadata-directive", "COPY")
    if directive not in {"COPY", "REPLACE"}:
        raise invalid_argument("x-amz-metadata-directive", directive, "Unknown metadata directive.")
    return directive == "REPLACE"


def read_object_ownership(headers: Mapping[str, str]) -> str | None:
    """Return x-amz-object-ownership of a new bucket."""
    value = headers.get("x-amz-object-ownership")
    if value is not None and value not in OWNERSHIPS:
        raise invalid_argument(
            "x-amz-object-ownership", value, "Invalid x-amz-object-ownership header: " + value[:64]
        )
    return value


def part_number(query: Query) -> int | None:
    text = query.values.get("partNumber")
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= number <= MAX_PART_NUMBER:
        raise invalid_argument(
            "partNumber", text, "Part number must be an integer between 1 and 10000, inclusive"
        )
    return number


def object_size(headers: Mapping[str, str]) -> int | None:
    """Return the required size of a multipart upload."""
    text = headers.get("x-amz-mp-object-size")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid_argument(
            "x-amz-mp-object-size", text, "x-amz-mp-object-size must be a number of bytes."
        )
    return int(text)
