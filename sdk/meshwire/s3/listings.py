"""Listing documents: buckets, objects, uploads, parts, object attributes, archive members; page tokens.

Law: text only; `s3.responses` makes responses of it. An attribute that was not requested is not returned.
Invariant: keys are written exactly, or percent-encoded if `encoding-type=url` was requested. A key that XML
1.0 cannot carry makes a page most parsers reject, as on S3; encoding it without a request would corrupt
names silently.
Invariant: a continuation token decodes to the name it was made from; anything else is rejected.
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.s3 import operations
from meshwire.s3.request_head import MAX_INTEGER, invalid_argument
from meshwire.s3.result_types import MemberEntry, MemberListing
from meshwire.s3.xml_io import escape_key, escape_xml, needs_escape, optional_element, xml_element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshwire.s3 import operations as ops
    from meshwire.s3 import result_types as res
    from meshwire.s3.request_head import Query


_VERSION = b"1"


class ContinuationTokenError(ValueError):
    """The token was not issued by this server."""


def write_continuation_token(after: str) -> str:
    return base64.urlsafe_b64encode(_VERSION + after.encode()).decode()


def read_continuation_token(token: str) -> str:
    """Decode a token into the name it stands for. Raises ContinuationTokenError."""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        after = raw[1:].decode()
    except (binascii.Error, UnicodeError):
        raise ContinuationTokenError(token) from None
    if raw[:1] != _VERSION or write_continuation_token(after) != token:
        raise ContinuationTokenError(token)
    return after


XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
XML_NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'

_encode = partial(percent_encoding.encode, safe="/")


def root_element(name: str, *pieces: str) -> str:
    """Return a complete document."""
    return "".join((XML_DECLARATION, f"<{name}{XML_NAMESPACE}>", *pieces, f"</{name}>"))


def owner_element(name: str, value: res.Owner | None) -> str:
    if value is None:
        return ""
    return f"<{name}>{xml_element('ID', value.id)}{xml_element('DisplayName', value.display_name)}</{name}>"


def checksum_elements(values: Mapping[str, str]) -> str:
    return "".join(xml_element(f"Checksum{name.upper()}", value) for name, value in values.items())


def etag_element(value: str) -> str:
    return f"<ETag>&quot;{escape_xml(value)}&quot;</ETag>"


def boolean_element(name: str, value: bool) -> str:
    return f"<{name}>{'true' if value else 'false'}</{name}>"


def list_buckets_document(op: ops.ListBuckets, result: res.BucketListing) -> str:
    listed = "".join(
        f"<Bucket>{xml_element('Name', b.name)}{xml_element('CreationDate', dates.format_iso(b.created_ms))}"
        f"{optional_element('BucketRegion', b.region)}</Bucket>"
        for b in result.buckets
    )
    token = "" if result.next_after is None else write_continuation_token(result.next_after)
    return root_element(
        "ListAllMyBucketsResult",
        owner_element("Owner", result.owner),
        f"<Buckets>{listed}</Buckets>",
        optional_element("ContinuationToken", token),
        optional_element("Prefix", op.prefix),
    )


def list_objects_document(op: ops.ListObjects, result: res.ObjectListing) -> str:
    """Write a ListBucketResult of version 1 or 2."""
    names = (op.prefix, op.delimiter, op.after, result.next_after, *result.common_prefixes)
    key = key_writer((*names, *[e.key for e in result.entries]), encoded=op.encode_url)
    return root_element(
        "ListBucketResult",
        xml_element("Name", op.bucket),
        f"<Prefix>{key(op.prefix)}</Prefix>",
        _page_v2(op, result, key) if op.version == 2 else _page_v1(op, result, key),
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        xml_element("MaxKeys", str(op.max_keys)),
        xml_element("EncodingType", "url") if op.encode_url else "",
        boolean_element("IsTruncated", result.truncated),
        *_objects(result.entries, key, with_owner=op.version == 1 or op.fetch_owner),
        common_prefix_elements(result.common_prefixes, key),
    )


def key_writer(names: Iterable[str], *, encoded: bool) -> Callable[[str], str]:
    """Return the function that writes these names: `str`, which copies nothing, if none needs escaping."""
    if encoded:
        return _encode
    return escape_key if needs_escape("".join(names)) else str


def _page_v1(op: ops.ListObjects, result: res.ObjectListing, key: Callable[[str], str]) -> str:
    """Write the paging elements. NextMarker appears only with a delimiter: without one, the last key is the
    marker."""
    following = result.next_after if result.truncated and op.delimiter else ""
    return f"<Marker>{key(op.after)}</Marker>" + (
        f"<NextMarker>{key(following)}</NextMarker>" if following else ""
    )


def _page_v2(op: ops.ListObjects, result: res.ObjectListing, key: Callable[[str], str]) -> str:
    return "".join(
        (
            "" if op.continuation_token is None else xml_element("ContinuationToken", op.continuation_token),
            xml_element("NextContinuationToken", write_continuation_token(result.next_after))
            if result.truncated
            else "",
            f"<StartAfter>{key(op.start_after)}</StartAfter>" if op.start_after else "",
            xml_element("KeyCount", str(len(result.entries) + len(result.common_prefixes))),
        )
    )


def _objects(
    entries: Sequence[res.ObjectEntry], key: Callable[[str], str], *, with_owner: bool
) -> Iterable[str]:
    """Write the entries, in half a microsecond each: by columns, with shared parts written once."""
    if not entries:
        return ()
    keys, sizes, tags, modified, owners, classes, algorithms, types = zip(*entries, strict=True)
    if key is not str:
        keys = tuple(map(key, keys))
    if needs_escape("".join(tags)):
        tags = tuple(map(escape_xml, tags))
    pairs = tuple(zip(algorithms, types, strict=True))
    kinds = {pair: checksum_kind_elements(*pair) if pair[0] else "" for pair in set(pairs)}
    told = {each: owner_element("Owner", each) if with_owner else "" for each in set(owners)}
    return [
        f"<Contents><Key>{name}</Key><LastModified>{time}</LastModified><ETag>&quot;{tag}&quot;</ETag>"
        f"{kinds[pair]}<Size>{size}</Size>{told[who]}<StorageClass>{storage}</StorageClass></Contents>"
        for name, size, tag, time, who, storage, pair in zip(
            keys, sizes, tags, dates.format_iso_many(modified), owners, classes, pairs, strict=True
        )
    ]


@lru_cache(maxsize=64)
def checksum_kind_elements(algorithm: str, checksum_type: str) -> str:
    return optional_element("ChecksumAlgorithm", algorithm.upper()) + optional_element(
        "ChecksumType", checksum_type
    )


def common_prefix_elements(prefixes: Iterable[str], key: Callable[[str], str]) -> str:
    return "".join([f"<CommonPrefixes><Prefix>{key(p)}</Prefix></CommonPrefixes>" for p in prefixes])


def list_uploads_document(op: ops.ListMultipartUploads, result: res.UploadListing) -> str:
    names = (
        op.prefix,
        op.delimiter,
        op.key_marker,
        *(u.key for u in result.uploads),
        *result.common_prefixes,
    )
    key = key_writer(names, encoded=op.encode_url)
    next_id = xml_element("NextUploadIdMarker", result.next_upload_id)
    following = f"<NextKeyMarker>{key(result.next_key)}</NextKeyMarker>{next_id}"
    return root_element(
        "ListMultipartUploadsResult",
        xml_element("Bucket", op.bucket),
        f"<KeyMarker>{key(op.key_marker)}</KeyMarker>",
        xml_element("UploadIdMarker", op.upload_id_marker),
        following if result.truncated else "",
        f"<Prefix>{key(op.prefix)}</Prefix>",
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        xml_element("EncodingType", "url") if op.encode_url else "",
        xml_element("MaxUploads", str(op.max_uploads)),
        boolean_element("IsTruncated", result.truncated),
        *[_upload(u, key) for u in result.uploads],
        common_prefix_elements(result.common_prefixes, key),
    )


def _upload(u: res.UploadEntry, key: Callable[[str], str]) -> str:
    return (
        f"<Upload><Key>{key(u.key)}</Key>{xml_element('UploadId', u.upload_id)}"
        f"{owner_element('Initiator', u.owner)}{owner_element('Owner', u.owner)}"
        "<StorageClass>STANDARD</StorageClass>"
        f"{xml_element('Initiated', dates.format_iso(u.initiated_ms))}"
        f"{checksum_kind_elements(u.checksum_algorithm, u.checksum_type)}</Upload>"
    )


def list_parts_document(op: ops.ListParts, result: res.PartList) -> str:
    last = result.parts[-1].number if result.parts else op.part_number_marker
    return root_element(
        "ListPartsResult",
        xml_element("Bucket", op.bucket),
        xml_element("Key", op.key),
        xml_element("UploadId", op.upload_id),
        xml_element("PartNumberMarker", str(op.part_number_marker)),
        xml_element("NextPartNumberMarker", str(last)),
        xml_element("MaxParts", str(op.max_parts)),
        boolean_element("IsTruncated", result.truncated),
        *[_part(part) for part in result.parts],
        owner_element("Initiator", result.owner),
        owner_element("Owner", result.owner),
        "<StorageClass>STANDARD</StorageClass>",
        checksum_kind_elements(result.checksum_algorithm, result.checksum_type),
    )


def _part(part: res.PartEntry) -> str:
    return (
        f"<Part><PartNumber>{part.number}</PartNumber>"
        f"{xml_element('LastModified', dates.format_iso(part.modified_ms))}{etag_element(part.etag)}"
        f"<Size>{part.size}</Size>{checksum_elements(part.checksums)}</Part>"
    )


MAX_PARTS = 1000
ATTRIBUTES = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


def read_get_object_attributes(
    bucket: str, key: str, version: str | None, headers: Mapping[str, str]
) -> operations.GetObjectAttributes:
    """Parse the request. Raises S3Error InvalidArgument."""
    asked = headers.get("x-amz-object-attributes", "")
    names = frozenset(name.strip() for name in asked.split(",") if name.strip())
    if not names or not names <= set(ATTRIBUTES):
        raise invalid_argument("x-amz-object-attributes", asked, "Invalid attribute name specified.")
    return operations.GetObjectAttributes(
        bucket,
        key,
        names,
        version,
        max_parts=min(_integer(headers, "x-amz-max-parts", MAX_PARTS), MAX_PARTS),
        part_number_marker=_integer(headers, "x-amz-part-number-marker", 0),
    )


def _integer(headers: Mapping[str, str], name: str, default: int) -> int:
    text = headers.get(name)
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not 0 <= number <= MAX_INTEGER:
        raise invalid_argument(name, text, f"{name} must be an integer between 0 and {MAX_INTEGER}")
    return number


def object_attributes_document(op: operations.GetObjectAttributes, result: res.ObjectAttributes) -> str:
    """Write the document. Unlike everywhere else in S3, the ETag has no quotes here."""
    pieces = {
        "ETag": xml_element("ETag", result.etag),
        "Checksum": _checksum(result),
        "ObjectParts": _parts(op, result) if result.parts_count else "",
        "StorageClass": xml_element("StorageClass", "STANDARD"),
        "ObjectSize": xml_element("ObjectSize", str(result.size)),
    }
    return root_element(
        "GetObjectAttributesResponse", *[pieces[name] for name in ATTRIBUTES if name in op.attributes]
    )


def _checksum(result: res.ObjectAttributes) -> str:
    """Write the checksum. Unlike everywhere else in S3, the number of parts (`-2`) is omitted here."""
    if not result.checksums:
        return ""
    values = {name: value.partition("-")[0] for name, value in result.checksums.items()}
    kind = optional_element("ChecksumType", result.checksum_type)
    return f"<Checksum>{checksum_elements(values)}{kind}</Checksum>"


def _parts(op: operations.GetObjectAttributes, result: res.ObjectAttributes) -> str:
    listed = "".join(
        f"<Part><PartNumber>{part.number}</PartNumber><Size>{part.size}</Size>"
        f"{checksum_elements(part.checksums)}</Part>"
        for part in result.parts
    )
    return (
        f"<ObjectParts>{xml_element('PartsCount', str(result.parts_count))}"
        f"{xml_element('PartNumberMarker', str(op.part_number_marker))}"
        f"{xml_element('NextPartNumberMarker', str(result.next_part))}"
        f"{xml_element('MaxParts', str(op.max_parts))}"
        f"{boolean_element('IsTruncated', result.parts_truncated)}{listed}</ObjectParts>"
    )


MAX_MEMBER_NAME_BYTES: Final = 4096
MAX_MEMBERS_PAGE: Final = 10_000
_PAGE: Final = 1000


def read_member(query: Query) -> str | None:
    """Return the requested member, or None if the whole object is requested. Raises S3Error
    InvalidArgument."""
    return _name(query, "member") if "member" in query.values else None


def read_list_members(bucket: str, key: str, query: Query) -> operations.ListMembers:
    """Parse the request. Raises S3Error InvalidArgument, InvalidRequest."""
    if "member" in query.values or "partNumber" in query.values:
        raise S3Error(
            "InvalidRequest",
            "members cannot be combined with member or partNumber: members lists, member reads one.",
        )
    return operations.ListMembers(
        bucket,
        key,
        _name(query, "prefix"),
        _name(query, "start-after"),
        query.integer("max-keys", _PAGE, low=1, high=MAX_MEMBERS_PAGE),
        query.version_id(),
    )


def _name(query: Query, parameter: str) -> str:
    value = query.values.get(parameter, "")
    if len(value.encode()) > MAX_MEMBER_NAME_BYTES or "\0" in value or (parameter == "member" and not value):
        raise invalid_argument(
            parameter, value, f"A member name must have 1 to {MAX_MEMBER_NAME_BYTES} bytes."
        )
    return value


def parse_list_members(body: bytes) -> MemberListing:
    """Parse a document of `list_members_document`. Raises S3Error InternalError for anything else."""
    try:
        found = json.loads(body)
        entries = tuple(
            MemberEntry(str(each["name"]), int(each["size"]), str(each["etag"]), each.get("offset"))
            for each in found["members"]
        )
        kind, etag, size, count = found["kind"], found["etag"], found["size"], found["count"]
        return MemberListing(str(kind), str(etag), int(size), int(count), entries, found.get("next"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise S3Error("InternalError", "The response is not a listing of archive members.") from None


def list_members_document(listing: MemberListing) -> bytes:
    """Write the response to `?members`."""
    found: dict[str, Any] = {
        "kind": listing.kind,
        "etag": listing.etag,
        "size": listing.size,
        "count": listing.count,
        "members": [
            {"name": entry.name, "size": entry.size, "etag": entry.etag}
            | ({} if entry.offset is None else {"offset": entry.offset})
            for entry in listing.entries
        ],
    }
    if listing.next_after is not None:
        found["next"] = listing.next_after
    return json.dumps(found, ensure_ascii=False).encode()
