"""ListObjectVersions: its query, and its document both ways.

Law: syntax and text only. Invariant: what `document` writes `parse_versions` reads back.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectVersions.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire import etags, httpdates
from meshwire.s3 import listings, operations, results
from meshwire.s3.documents import MAX_RESPONSE_BYTES, integer, milliseconds, owner_of, url_decoder
from meshwire.s3.elements import read, tag
from meshwire.s3.queries import check_version, invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.s3.elements import Element
    from meshwire.s3.queries import Query

MAX_KEYS = 1000


def read_operation(bucket: str, query: Query) -> operations.ListObjectVersions:
    """Raises S3Error InvalidArgument, KeyTooLongError."""
    key_marker, version_marker = query.text("key-marker"), query.values.get("version-id-marker", "")
    if version_marker and not key_marker:
        raise invalid(
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
        max_keys=min(query.integer("max-keys", MAX_KEYS, label="maxKeys"), MAX_KEYS),
        encode_url=query.encode_url(),
    )


def document(op: operations.ListObjectVersions, result: results.VersionListing) -> str:
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
        following += tag("NextVersionIdMarker", result.next_version)
    return listings.root(
        "ListVersionsResult",
        tag("Name", op.bucket),
        f"<Prefix>{key(op.prefix)}</Prefix>",
        f"<KeyMarker>{key(op.key_marker)}</KeyMarker>",
        tag("VersionIdMarker", op.version_marker),
        following if result.truncated else "",
        tag("MaxKeys", str(op.max_keys)),
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        tag("EncodingType", "url") if op.encode_url else "",
        listings.flag("IsTruncated", result.truncated),
        *[_entry(e, key) for e in result.entries],
        listings.common_prefixes(result.common_prefixes, key),
    )


def _entry(e: results.VersionEntry, key: Callable[[str], str]) -> str:
    common = (
        f"<Key>{key(e.key)}</Key>{tag('VersionId', e.version)}{listings.flag('IsLatest', e.latest)}"
        f"{tag('LastModified', httpdates.format_iso(e.modified_ms))}"
    )
    owner = listings.owner("Owner", e.owner)
    if e.marker:
        return f"<DeleteMarker>{common}{owner}</DeleteMarker>"
    checksum = listings.checksum_kind(e.checksum_algorithm, e.checksum_type) if e.checksum_algorithm else ""
    return (
        f"<Version>{common}{listings.etag(e.etag)}{checksum}<Size>{e.size}</Size>{owner}"
        "<StorageClass>STANDARD</StorageClass></Version>"
    )


def parse_versions(body: bytes) -> results.VersionListing:
    """A page. Raises S3Error MalformedXML."""
    root = read(body, root="ListVersionsResult", max_bytes=MAX_RESPONSE_BYTES)
    text = url_decoder(root)
    return results.VersionListing(
        tuple(
            _read_entry(element, text)
            for element in root.children
            if element.name in {"Version", "DeleteMarker"}
        ),
        tuple(text(element.get("Prefix")) for element in root.all("CommonPrefixes")),
        root.get("IsTruncated") == "true",
        text(root.get("NextKeyMarker")),
        root.get("NextVersionIdMarker"),
    )


def _read_entry(element: Element, text: Callable[[str], str]) -> results.VersionEntry:
    owner, marker = element.first("Owner"), element.name == "DeleteMarker"
    return results.VersionEntry(
        text(element.get("Key")),
        element.get("VersionId"),
        element.get("IsLatest") == "true",
        milliseconds(element.get("LastModified")),
        results.Owner("") if owner is None else owner_of(owner),
        marker,
        0 if marker else integer(element.get("Size")),
        etags.unquote(element.get("ETag")),
        element.get("ChecksumAlgorithm").lower(),
        element.get("ChecksumType"),
    )
