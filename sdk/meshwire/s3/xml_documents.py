"""Parsers of S3's XML bodies, for daemon and SDK, and the document of ListObjectVersions.

Law: a request's document is checked strictly against what the operation needs. Unknown elements are
rejected where they could ask for something; in lists of parts they are ignored.
Invariant: any bytes give a value or an S3Error.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from meshwire.checksums.body_checksums import ALGORITHMS, decode_checksum
from meshwire.errors import CODES, S3Error
from meshwire.http_values import conditional_requests, dates
from meshwire.s3 import listings, operations, request_headers, result_types, settings_xml
from meshwire.s3.request_head import MAX_VERSION, check_version, invalid_argument
from meshwire.s3.xml_io import parse_xml, xml_element

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.s3.request_head import Query
    from meshwire.s3.xml_io import Element


MAX_REQUEST_BYTES = 4 << 20
MAX_RESPONSE_BYTES = 64 << 20
MAX_DELETE_KEYS = 1000

_CHECKSUM_TAGS = {f"Checksum{name.upper()}": name for name in ALGORITHMS}


class DeleteKey(NamedTuple):
    """A key to delete. `version` and `etag` (a condition, without quotes) are None if absent."""

    key: str
    version: str | None = None
    etag: str | None = None


class DeleteRequest(NamedTuple):
    keys: tuple[DeleteKey, ...]
    quiet: bool = False


class CompletedPart(NamedTuple):
    number: int
    etag: str
    checksums: Mapping[str, str] = {}


# --- requests ---------------------------------------------------------------------------------------


def parse_delete(body: bytes) -> DeleteRequest:
    """Parse the body of DeleteObjects: 1–1,000 keys. Raises S3Error: MalformedXML, KeyTooLongError,
    InvalidArgument."""
    root = parse_xml(body, root="Delete", max_bytes=MAX_REQUEST_BYTES)
    root.require_known(("Quiet",), ("Object",))
    objects = root.find_all("Object")
    if not 1 <= len(objects) <= MAX_DELETE_KEYS:
        raise S3Error("MalformedXML", f"A DeleteObjects request must name 1 to {MAX_DELETE_KEYS} keys.")
    quiet = root.child_text("Quiet", "false").strip().lower()
    if quiet not in {"true", "false", "1", "0", ""}:
        raise S3Error("MalformedXML")
    return DeleteRequest(tuple(map(_delete_key, objects)), quiet in {"true", "1"})


def _delete_key(element: Element) -> DeleteKey:
    element.require_known(("Key", "VersionId", "ETag", "LastModifiedTime", "Size"))
    key, version, etag = (
        element.child_text("Key"),
        element.child_text("VersionId").strip(),
        element.child_text("ETag"),
    )
    if not key:
        raise S3Error("MalformedXML", "Every Object of a DeleteObjects request needs a Key.")
    request_headers.check_key(key)
    if len(version) > MAX_VERSION:
        raise S3Error("MalformedXML", f"A VersionId can have at most {MAX_VERSION} characters.")
    if element.find_first("LastModifiedTime") or element.find_first("Size"):
        raise S3Error(
            "NotImplemented", "Conditional deletes by LastModifiedTime or Size are not implemented."
        )
    return DeleteKey(key, version or None, conditional_requests.unquote_etag(etag) if etag else None)


def parse_complete(body: bytes) -> tuple[CompletedPart, ...]:
    """Parse the body of CompleteMultipartUpload. Raises S3Error: MalformedXML, InvalidPartOrder,
    InvalidRequest."""
    root = parse_xml(body, root="CompleteMultipartUpload", max_bytes=MAX_REQUEST_BYTES)
    parts = tuple(map(_completed_part, root.find_all("Part")))
    if not parts:
        raise S3Error("MalformedXML", "A CompleteMultipartUpload request must name at least one part.")
    for earlier, later in pairwise(parts):
        if earlier.number >= later.number:
            raise S3Error("InvalidPartOrder")
    return parts


def _completed_part(element: Element) -> CompletedPart:
    number, etag = (
        element.child_text("PartNumber").strip(),
        conditional_requests.unquote_etag(element.child_text("ETag")),
    )
    if not (number.isascii() and number.isdigit() and 1 <= len(number) <= 9) or not etag:
        raise S3Error("MalformedXML", "Every Part needs a PartNumber and an ETag.")
    if not 1 <= int(number) <= request_headers.MAX_PART_NUMBER:
        raise S3Error("InvalidArgument", "PartNumber must be between 1 and 10000")
    checksums = _checksums(element)
    for algorithm, value in checksums.items():
        if decode_checksum(algorithm, value) is None:
            raise S3Error("InvalidRequest", f"The {algorithm} of part {int(number)} is not a base64 digest.")
    return CompletedPart(int(number), etag, checksums)


class CreateBucketConfiguration(NamedTuple):
    """The body of CreateBucket."""

    location: str = ""
    tags: Mapping[str, str] = {}


def parse_create_bucket(body: bytes) -> CreateBucketConfiguration:
    """Parse the body of CreateBucket. Raises S3Error: MalformedXML, InvalidLocationConstraint, InvalidTag,
    NotImplemented (directory buckets)."""
    if not body.strip():
        return CreateBucketConfiguration()
    root = parse_xml(body, root="CreateBucketConfiguration", max_bytes=MAX_REQUEST_BYTES)
    root.require_known(("LocationConstraint", "Location", "Bucket", "Tags"))
    location = root.child_text("LocationConstraint").strip()
    if len(location) > 64 or not all(c.isalnum() or c in "-_" for c in location) or not location.isascii():
        raise S3Error("InvalidLocationConstraint", extra={"LocationConstraint": location[:64]})
    if root.find_first("Location") is not None or root.find_first("Bucket") is not None:
        raise S3Error("NotImplemented", "Directory buckets are not implemented.")
    listed = root.find_first("Tags")
    tags = () if listed is None else settings_xml.read_tags(listed)
    return CreateBucketConfiguration(location, settings_xml.checked_tags(tags, settings_xml.BUCKET_TAGS))


# --- responses, parsed by the SDK --------------------------------------------------------------------


def parse_error(body: bytes) -> S3Error:
    """Parse an error document; an unknown code becomes InternalError, with the code in the message.

    Raises S3Error MalformedXML if the body is not an error document.
    """
    root = parse_xml(body, root="Error", max_bytes=MAX_RESPONSE_BYTES)
    code, message = root.child_text("Code"), root.child_text("Message")
    extra = {e.name: e.text for e in root.children if e.name not in {"Code", "Message", "Resource"}}
    if code not in CODES:
        return S3Error(
            "InternalError", f"{code[:64]}: {message}", resource=root.child_text("Resource"), extra=extra
        )
    return S3Error(code, message, resource=root.child_text("Resource"), extra=extra)


def parse_list_result(body: bytes) -> result_types.ObjectListing:
    """Parse a page of ListObjects, either version. `next_after` is the token or marker for the next page."""
    root = parse_xml(body, root="ListBucketResult", max_bytes=MAX_RESPONSE_BYTES)
    text = key_decoder(root)
    entries = tuple(_object_entry(element, text) for element in root.find_all("Contents"))
    prefixes = tuple(text(element.child_text("Prefix")) for element in root.find_all("CommonPrefixes"))
    truncated = root.child_text("IsTruncated") == "true"
    following = root.child_text("NextContinuationToken") or text(root.child_text("NextMarker"))
    if truncated and not following:
        following = max((*(entry.key for entry in entries), *prefixes), key=str.encode, default="")
    return result_types.ObjectListing(entries, prefixes, truncated, following)


def key_decoder(root: Element) -> Callable[[str], str]:
    return unquote_plus if root.child_text("EncodingType") == "url" else str


def _object_entry(element: Element, text: Callable[[str], str]) -> result_types.ObjectEntry:
    found = {child.name: child.text for child in reversed(element.children)}.get  # of two, the first counts
    owner = element.find_first("Owner")
    return result_types.ObjectEntry(
        key=text(found("Key", "")),
        size=parse_integer(found("Size", "")),
        etag=conditional_requests.unquote_etag(found("ETag", "")),
        modified_ms=parse_milliseconds(found("LastModified", "")),
        owner=None if owner is None else parse_owner(owner),
        storage_class=found("StorageClass", "STANDARD"),
        checksum_algorithm=found("ChecksumAlgorithm", "").lower(),
        checksum_type=found("ChecksumType", ""),
    )


def parse_list_buckets(body: bytes) -> result_types.BucketListing:
    """Parse a page of ListBuckets. `next_after` is the token for the next page."""
    root = parse_xml(body, root="ListAllMyBucketsResult", max_bytes=MAX_RESPONSE_BYTES)
    owner, listed = root.find_first("Owner"), root.find_first("Buckets")
    buckets = tuple(
        result_types.BucketEntry(
            e.child_text("Name"),
            parse_milliseconds(e.child_text("CreationDate")),
            e.child_text("BucketRegion"),
        )
        for e in (listed.find_all("Bucket") if listed is not None else ())
    )
    return result_types.BucketListing(
        result_types.Owner("") if owner is None else parse_owner(owner),
        buckets,
        root.child_text("ContinuationToken") or None,
    )


def parse_create_upload_result(body: bytes) -> result_types.UploadCreated:
    root = parse_xml(body, root="InitiateMultipartUploadResult", max_bytes=MAX_RESPONSE_BYTES)
    return result_types.UploadCreated(
        root.child_text("Bucket"), root.child_text("Key"), root.child_text("UploadId")
    )


def parse_complete_result(body: bytes) -> result_types.CompleteResult:
    """Parse a CompleteMultipartUploadResult. Raises the S3Error in the body: S3 may answer 200 and fail
    afterwards."""
    if b"<Error>" in body[:512]:
        raise parse_error(body)
    root = parse_xml(body, root="CompleteMultipartUploadResult", max_bytes=MAX_RESPONSE_BYTES)
    return result_types.CompleteResult(
        root.child_text("Bucket"),
        root.child_text("Key"),
        conditional_requests.unquote_etag(root.child_text("ETag")),
        root.child_text("Location"),
        _checksums(root),
        root.child_text("ChecksumType"),
    )


def parse_copy_result(body: bytes) -> result_types.CopyResult:
    """Parse the result of CopyObject or UploadPartCopy. Raises the S3Error in the body, like
    `parse_complete_result`."""
    if b"<Error>" in body[:512]:
        raise parse_error(body)
    name = "CopyPartResult" if b"<CopyPartResult" in body[:512] else "CopyObjectResult"
    root = parse_xml(body, root=name, max_bytes=MAX_RESPONSE_BYTES)
    etag, modified = (
        conditional_requests.unquote_etag(root.child_text("ETag")),
        parse_milliseconds(root.child_text("LastModified")),
    )
    return result_types.CopyResult(etag, modified, _checksums(root), root.child_text("ChecksumType"))


def parse_delete_result(body: bytes) -> result_types.DeleteResult:
    root = parse_xml(body, root="DeleteResult", max_bytes=MAX_RESPONSE_BYTES)
    return result_types.DeleteResult(
        tuple(
            result_types.DeletedKey(
                e.child_text("Key"), e.child_text("VersionId"), e.child_text("DeleteMarkerVersionId")
            )
            for e in root.find_all("Deleted")
        ),
        tuple(
            result_types.DeleteFailure(
                e.child_text("Key"), e.child_text("Code"), e.child_text("Message"), e.child_text("VersionId")
            )
            for e in root.find_all("Error")
        ),
    )


def _checksums(element: Element) -> dict[str, str]:
    return {
        _CHECKSUM_TAGS[child.name]: child.text.strip()
        for child in element.children
        if child.name in _CHECKSUM_TAGS
    }


def parse_owner(element: Element) -> result_types.Owner:
    return result_types.Owner(element.child_text("ID"), element.child_text("DisplayName"))


def parse_integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise S3Error("MalformedXML", "The response has an element that should be a number but is not.")
    return int(text)


def parse_milliseconds(text: str) -> int:
    found = dates.parse_iso(text.strip())
    if found is None:
        raise S3Error("MalformedXML", "The response has an element that should be a time but is not.")
    return found


MAX_VERSIONS_PAGE = 1000


def read_list_versions(bucket: str, query: Query) -> operations.ListObjectVersions:
    """Parse the request. Raises S3Error InvalidArgument, KeyTooLongError."""
    key_marker, version_marker = query.text("key-marker"), query.values.get("version-id-marker", "")
    if not version_marker and "version-id-marker" in query.values:
        raise invalid_argument("version-id-marker", "", "A version-id marker cannot be empty.")
    if version_marker and not key_marker:
        raise invalid_argument(
            "version-id-marker",
            version_marker,
            "A version-id marker cannot be specified without a key marker.",
        )
    if version_marker:
        check_version(version_marker, "version-id-marker")
    return operations.ListObjectVersions(
        bucket,
        prefix=query.text("prefix"),
        delimiter=query.text("delimiter"),
        key_marker=key_marker,
        version_marker=version_marker,
        max_keys=min(query.integer("max-keys", MAX_VERSIONS_PAGE, label="maxKeys"), MAX_VERSIONS_PAGE),
        encode_url=query.encode_url(),
    )


def list_versions_document(op: operations.ListObjectVersions, result: result_types.VersionListing) -> str:
    names = (
        op.prefix,
        op.delimiter,
        op.key_marker,
        result.next_key,
        *(e.key for e in result.entries),
        *result.common_prefixes,
    )
    key = listings.key_writer(names, encoded=op.encode_url)
    following = f"<NextKeyMarker>{key(result.next_key)}</NextKeyMarker>"
    if result.next_version:
        following += xml_element("NextVersionIdMarker", result.next_version)
    return listings.root_element(
        "ListVersionsResult",
        xml_element("Name", op.bucket),
        f"<Prefix>{key(op.prefix)}</Prefix>",
        f"<KeyMarker>{key(op.key_marker)}</KeyMarker>",
        xml_element("VersionIdMarker", op.version_marker),
        following if result.truncated else "",
        xml_element("MaxKeys", str(op.max_keys)),
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        xml_element("EncodingType", "url") if op.encode_url else "",
        listings.boolean_element("IsTruncated", result.truncated),
        *[_entry(e, key) for e in result.entries],
        listings.common_prefix_elements(result.common_prefixes, key),
    )


def _entry(e: result_types.VersionEntry, key: Callable[[str], str]) -> str:
    common = (
        f"<Key>{key(e.key)}</Key>{xml_element('VersionId', e.version)}"
        f"{listings.boolean_element('IsLatest', e.latest)}"
        f"{xml_element('LastModified', dates.format_iso(e.modified_ms))}"
    )
    owner = listings.owner_element("Owner", e.owner)
    if e.marker:
        return f"<DeleteMarker>{common}{owner}</DeleteMarker>"
    checksum = (
        listings.checksum_kind_elements(e.checksum_algorithm, e.checksum_type) if e.checksum_algorithm else ""
    )
    return (
        f"<Version>{common}{listings.etag_element(e.etag)}{checksum}<Size>{e.size}</Size>{owner}"
        "<StorageClass>STANDARD</StorageClass></Version>"
    )
