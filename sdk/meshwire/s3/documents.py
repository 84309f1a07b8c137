"""The XML documents of S3: those clients send, and those the SDK reads back.

Law: a request's document is checked strictly against what the operation needs; elements that are unknown are
refused where they could ask for something, and overlooked in lists of keys and parts. Invariant: any bytes
give a value or an S3Error.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from meshwire import etags, httpdates
from meshwire.checksums import ALGORITHMS, decode
from meshwire.s3 import fields, results, tagging
from meshwire.s3.elements import read
from meshwire.s3.errors import CODES, S3Error
from meshwire.s3.queries import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.s3.elements import Element

MAX_REQUEST_BYTES = 4 << 20
MAX_RESPONSE_BYTES = 64 << 20
MAX_DELETE_KEYS = 1000

_CHECKSUM_TAGS = {f"Checksum{name.upper()}": name for name in ALGORITHMS}


class DeleteKey(NamedTuple):
    """`version` and `etag` (a condition, without quotes) are None when absent."""

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
    """The body of DeleteObjects: 1–1,000 keys. Raises S3Error: MalformedXML, KeyTooLongError,
    InvalidArgument."""
    root = read(body, root="Delete", max_bytes=MAX_REQUEST_BYTES)
    objects = root.all("Object")
    if not 1 <= len(objects) <= MAX_DELETE_KEYS:
        raise S3Error("MalformedXML", f"A DeleteObjects request names 1 to {MAX_DELETE_KEYS} keys.")
    quiet = root.get("Quiet", "false").strip().lower()
    if quiet not in {"true", "false", "1", "0", ""}:
        raise S3Error("MalformedXML")
    return DeleteRequest(tuple(map(_delete_key, objects)), quiet in {"true", "1"})


def _delete_key(element: Element) -> DeleteKey:
    key, version, etag = element.get("Key"), element.get("VersionId").strip(), element.get("ETag")
    if not key:
        raise S3Error("MalformedXML", "Every Object of a DeleteObjects request has a Key.")
    fields.check_key(key)
    if len(version) > MAX_VERSION:
        raise S3Error("MalformedXML", f"A VersionId has at most {MAX_VERSION} characters.")
    if element.first("LastModifiedTime") or element.first("Size"):
        raise S3Error(
            "NotImplemented", "Deleting on condition of LastModifiedTime or Size is not implemented."
        )
    return DeleteKey(key, version or None, etags.unquote(etag) if etag else None)


def parse_complete(body: bytes) -> tuple[CompletedPart, ...]:
    """The body of CompleteMultipartUpload. Raises S3Error: MalformedXML, InvalidPartOrder, InvalidRequest."""
    root = read(body, root="CompleteMultipartUpload", max_bytes=MAX_REQUEST_BYTES)
    parts = tuple(map(_completed_part, root.all("Part")))
    if not parts:
        raise S3Error("MalformedXML", "A CompleteMultipartUpload request names at least one part.")
    for earlier, later in pairwise(parts):
        if earlier.number >= later.number:
            raise S3Error("InvalidPartOrder")
    return parts


def _completed_part(element: Element) -> CompletedPart:
    number, etag = element.get("PartNumber").strip(), etags.unquote(element.get("ETag"))
    if not (number.isascii() and number.isdigit() and 1 <= len(number) <= 9) or not etag:
        raise S3Error("MalformedXML", "Every Part has a PartNumber and an ETag.")
    if not 1 <= int(number) <= fields.MAX_PART_NUMBER:
        raise S3Error("InvalidArgument", "PartNumber must be between 1 and 10000")
    checksums = _checksums(element)
    for algorithm, value in checksums.items():
        if decode(algorithm, value) is None:
            raise S3Error("InvalidRequest", f"The {algorithm} of part {int(number)} is no base64 digest.")
    return CompletedPart(int(number), etag, checksums)


class NewBucket(NamedTuple):
    """What the body of CreateBucket says."""

    location: str = ""
    tags: Mapping[str, str] = {}


def parse_create_bucket(body: bytes) -> NewBucket:
    """Raises S3Error: MalformedXML, InvalidLocationConstraint, InvalidTag, NotImplemented (directory
    buckets)."""
    if not body.strip():
        return NewBucket()
    root = read(body, root="CreateBucketConfiguration", max_bytes=MAX_REQUEST_BYTES)
    root.require_known(("LocationConstraint", "Location", "Bucket", "Tags"))
    location = root.get("LocationConstraint").strip()
    if len(location) > 64 or not all(c.isalnum() or c in "-_" for c in location) or not location.isascii():
        raise S3Error("InvalidLocationConstraint", extra={"LocationConstraint": location[:64]})
    if root.first("Location") is not None or root.first("Bucket") is not None:
        raise S3Error("NotImplemented", "Directory buckets are not implemented.")
    listed = root.first("Tags")
    tags = () if listed is None else [(e.get("Key"), e.get("Value")) for e in listed.all("Tag")]
    return NewBucket(location, tagging.checked(tags, tagging.BUCKET_TAGS))


# --- answers, read by the SDK ------------------------------------------------------------------------


def parse_error(body: bytes) -> S3Error:
    """The error of an error document; a code we do not know becomes InternalError, its name kept in the
    message.

    Raises S3Error MalformedXML when the body is no error document.
    """
    root = read(body, root="Error", max_bytes=MAX_RESPONSE_BYTES)
    code, message = root.get("Code"), root.get("Message")
    extra = {e.name: e.text for e in root.children if e.name not in {"Code", "Message", "Resource"}}
    if code not in CODES:
        return S3Error("InternalError", f"{code[:64]}: {message}", resource=root.get("Resource"), extra=extra)
    return S3Error(code, message, resource=root.get("Resource"), extra=extra)


def parse_list_result(body: bytes) -> results.ObjectListing:
    """A page of ListObjects, either version. `next_after` is the token or marker to send for the next
    page."""
    root = read(body, root="ListBucketResult", max_bytes=MAX_RESPONSE_BYTES)
    text = url_decoder(root)
    entries = tuple(_object_entry(element, text) for element in root.all("Contents"))
    prefixes = tuple(text(element.get("Prefix")) for element in root.all("CommonPrefixes"))
    truncated = root.get("IsTruncated") == "true"
    following = root.get("NextContinuationToken") or text(root.get("NextMarker"))
    if truncated and not following:
        following = max((*(entry.key for entry in entries), *prefixes), key=str.encode, default="")
    return results.ObjectListing(entries, prefixes, truncated, following)


def url_decoder(root: Element) -> Callable[[str], str]:
    return unquote_plus if root.get("EncodingType") == "url" else str


def _object_entry(element: Element, text: Callable[[str], str]) -> results.ObjectEntry:
    owner = element.first("Owner")
    return results.ObjectEntry(
        key=text(element.get("Key")),
        size=integer(element.get("Size")),
        etag=etags.unquote(element.get("ETag")),
        modified_ms=milliseconds(element.get("LastModified")),
        owner=None if owner is None else owner_of(owner),
        storage_class=element.get("StorageClass", "STANDARD"),
        checksum_algorithm=element.get("ChecksumAlgorithm").lower(),
        checksum_type=element.get("ChecksumType"),
    )


def parse_list_buckets(body: bytes) -> results.BucketListing:
    """`next_after` is the token to send for the next page."""
    root = read(body, root="ListAllMyBucketsResult", max_bytes=MAX_RESPONSE_BYTES)
    owner, listed = root.first("Owner"), root.first("Buckets")
    buckets = tuple(
        results.BucketEntry(e.get("Name"), milliseconds(e.get("CreationDate")), e.get("BucketRegion"))
        for e in (listed.all("Bucket") if listed is not None else ())
    )
    return results.BucketListing(
        results.Owner("") if owner is None else owner_of(owner),
        buckets,
        root.get("ContinuationToken") or None,
    )


def parse_location(body: bytes) -> results.BucketLocation:
    root = read(body, root="LocationConstraint", max_bytes=MAX_RESPONSE_BYTES)
    return results.BucketLocation(root.text.strip() or "us-east-1")


def parse_initiate(body: bytes) -> results.UploadCreated:
    root = read(body, root="InitiateMultipartUploadResult", max_bytes=MAX_RESPONSE_BYTES)
    return results.UploadCreated(root.get("Bucket"), root.get("Key"), root.get("UploadId"))


def parse_complete_result(body: bytes) -> results.CompleteResult:
    """Raises the S3Error in the body: S3 may answer 200 and fail afterwards."""
    if b"<Error>" in body[:512]:
        raise parse_error(body)
    root = read(body, root="CompleteMultipartUploadResult", max_bytes=MAX_RESPONSE_BYTES)
    return results.CompleteResult(
        root.get("Bucket"),
        root.get("Key"),
        etags.unquote(root.get("ETag")),
        root.get("Location"),
        _checksums(root),
        root.get("ChecksumType"),
    )


def parse_copy_result(body: bytes) -> results.CopyResult:
    """Of CopyObject and of UploadPartCopy. Raises the S3Error in the body, as `parse_complete_result`
    does."""
    if b"<Error>" in body[:512]:
        raise parse_error(body)
    name = "CopyPartResult" if b"<CopyPartResult" in body[:512] else "CopyObjectResult"
    root = read(body, root=name, max_bytes=MAX_RESPONSE_BYTES)
    etag, modified = etags.unquote(root.get("ETag")), milliseconds(root.get("LastModified"))
    return results.CopyResult(etag, modified, _checksums(root), root.get("ChecksumType"))


def parse_delete_result(body: bytes) -> results.DeleteResult:
    root = read(body, root="DeleteResult", max_bytes=MAX_RESPONSE_BYTES)
    return results.DeleteResult(
        tuple(
            results.DeletedKey(e.get("Key"), e.get("VersionId"), e.get("DeleteMarkerVersionId"))
            for e in root.all("Deleted")
        ),
        tuple(
            results.DeleteFailure(e.get("Key"), e.get("Code"), e.get("Message"), e.get("VersionId"))
            for e in root.all("Error")
        ),
    )


def parse_parts(body: bytes) -> results.PartList:
    root = read(body, root="ListPartsResult", max_bytes=MAX_RESPONSE_BYTES)
    owner = root.first("Owner")
    return results.PartList(
        tuple(map(_part_entry, root.all("Part"))),
        root.get("IsTruncated") == "true",
        results.Owner("") if owner is None else owner_of(owner),
        root.get("ChecksumAlgorithm").lower(),
        root.get("ChecksumType"),
    )


def _part_entry(e: Element) -> results.PartEntry:
    return results.PartEntry(
        integer(e.get("PartNumber")),
        integer(e.get("Size")),
        etags.unquote(e.get("ETag")),
        milliseconds(e.get("LastModified")),
        _checksums(e),
    )


def _checksums(element: Element) -> dict[str, str]:
    return {
        _CHECKSUM_TAGS[child.name]: child.text.strip()
        for child in element.children
        if child.name in _CHECKSUM_TAGS
    }


def owner_of(element: Element) -> results.Owner:
    return results.Owner(element.get("ID"), element.get("DisplayName"))


def integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise S3Error("MalformedXML", "The answer has no number where one belongs.")
    return int(text)


def milliseconds(text: str) -> int:
    found = httpdates.parse_iso(text.strip())
    if found is None:
        raise S3Error("MalformedXML", "The answer has no time where one belongs.")
    return found
