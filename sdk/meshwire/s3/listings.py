"""The listing documents of S3: buckets, objects, uploads, parts.

Law: text only; `meshwire.s3.rendering` makes responses of it. Invariant: keys come out exactly, or
percent-encoded where `encoding-type=url` was asked for. A key that XML 1.0 cannot carry makes a page that
most parsers refuse, as on S3: encoded unasked, all names of the page would be wrong for who does not expect
it, in silence.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from meshwire import httpdates, percents
from meshwire.s3 import tokens
from meshwire.s3.elements import escape, escape_key, needs_escape, optional, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshwire.s3 import operations as ops
    from meshwire.s3 import results as res

HEADER = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'

_encode = partial(percents.encode, safe="/")


def root(name: str, *pieces: str) -> str:
    """A whole document."""
    return "".join((HEADER, f"<{name}{NAMESPACE}>", *pieces, f"</{name}>"))


def owner(name: str, value: res.Owner | None) -> str:
    if value is None:
        return ""
    return f"<{name}>{tag('ID', value.id)}{tag('DisplayName', value.display_name)}</{name}>"


def checksums(values: Mapping[str, str]) -> str:
    return "".join(tag(f"Checksum{name.upper()}", value) for name, value in values.items())


def etag(value: str) -> str:
    return f"<ETag>&quot;{escape(value)}&quot;</ETag>"


def flag(name: str, value: bool) -> str:
    return f"<{name}>{'true' if value else 'false'}</{name}>"


def buckets(op: ops.ListBuckets, result: res.BucketListing) -> str:
    listed = "".join(
        f"<Bucket>{tag('Name', b.name)}{tag('CreationDate', httpdates.format_iso(b.created_ms))}"
        f"{optional('BucketRegion', b.region)}</Bucket>"
        for b in result.buckets
    )
    token = "" if result.next_after is None else tokens.write(result.next_after)
    return root(
        "ListAllMyBucketsResult",
        owner("Owner", result.owner),
        f"<Buckets>{listed}</Buckets>",
        optional("ContinuationToken", token),
        optional("Prefix", op.prefix),
    )


def objects(op: ops.ListObjects, result: res.ObjectListing) -> str:
    """ListBucketResult of version 1 or 2."""
    names = (op.prefix, op.delimiter, op.after, result.next_after, *result.common_prefixes)
    key = key_writer((*names, *[e.key for e in result.entries]), encoded=op.encode_url)
    return root(
        "ListBucketResult",
        tag("Name", op.bucket),
        f"<Prefix>{key(op.prefix)}</Prefix>",
        _page_v2(op, result, key) if op.version == 2 else _page_v1(op, result, key),
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        tag("MaxKeys", str(op.max_keys)),
        tag("EncodingType", "url") if op.encode_url else "",
        flag("IsTruncated", result.truncated),
        *_objects(result.entries, key, with_owner=op.version == 1 or op.fetch_owner),
        common_prefixes(result.common_prefixes, key),
    )


def key_writer(names: Iterable[str], *, encoded: bool) -> Callable[[str], str]:
    """How each of these names is written; `str`, which copies nothing, when none needs care."""
    if encoded:
        return _encode
    return escape_key if needs_escape("".join(names)) else str


def _page_v1(op: ops.ListObjects, result: res.ObjectListing, key: Callable[[str], str]) -> str:
    """NextMarker comes only with a delimiter: without one the last key is the marker."""
    following = result.next_after if result.truncated and op.delimiter else ""
    return f"<Marker>{key(op.after)}</Marker>" + (
        f"<NextMarker>{key(following)}</NextMarker>" if following else ""
    )


def _page_v2(op: ops.ListObjects, result: res.ObjectListing, key: Callable[[str], str]) -> str:
    return "".join(
        (
            "" if op.continuation_token is None else tag("ContinuationToken", op.continuation_token),
            tag("NextContinuationToken", tokens.write(result.next_after)) if result.truncated else "",
            f"<StartAfter>{key(op.start_after)}</StartAfter>" if op.start_after else "",
            tag("KeyCount", str(len(result.entries) + len(result.common_prefixes))),
        )
    )


def _objects(
    entries: Sequence[res.ObjectEntry], key: Callable[[str], str], *, with_owner: bool
) -> Iterable[str]:
    """The entries, in half a microsecond each: by columns, and what several share is written once."""
    if not entries:
        return ()
    keys, sizes, tags, modified, owners, classes, algorithms, types = zip(*entries, strict=True)
    if key is not str:
        keys = tuple(map(key, keys))
    if needs_escape("".join(tags)):
        tags = tuple(map(escape, tags))
    pairs = tuple(zip(algorithms, types, strict=True))
    kinds = {pair: checksum_kind(*pair) if pair[0] else "" for pair in set(pairs)}
    told = {each: owner("Owner", each) if with_owner else "" for each in set(owners)}
    return [
        f"<Contents><Key>{name}</Key><LastModified>{time}</LastModified><ETag>&quot;{tag}&quot;</ETag>"
        f"{kinds[pair]}<Size>{size}</Size>{told[who]}<StorageClass>{storage}</StorageClass></Contents>"
        for name, size, tag, time, who, storage, pair in zip(
            keys, sizes, tags, httpdates.format_isos(modified), owners, classes, pairs, strict=True
        )
    ]


@lru_cache(maxsize=64)
def checksum_kind(algorithm: str, checksum_type: str) -> str:
    return optional("ChecksumAlgorithm", algorithm.upper()) + optional("ChecksumType", checksum_type)


def common_prefixes(prefixes: Iterable[str], key: Callable[[str], str]) -> str:
    return "".join([f"<CommonPrefixes><Prefix>{key(p)}</Prefix></CommonPrefixes>" for p in prefixes])


def uploads(op: ops.ListMultipartUploads, result: res.UploadListing) -> str:
    names = (
        op.prefix,
        op.delimiter,
        op.key_marker,
        *(u.key for u in result.uploads),
        *result.common_prefixes,
    )
    key = key_writer(names, encoded=op.encode_url)
    next_id = tag("NextUploadIdMarker", result.next_upload_id)
    following = f"<NextKeyMarker>{key(result.next_key)}</NextKeyMarker>{next_id}"
    return root(
        "ListMultipartUploadsResult",
        tag("Bucket", op.bucket),
        f"<KeyMarker>{key(op.key_marker)}</KeyMarker>",
        tag("UploadIdMarker", op.upload_id_marker),
        following if result.truncated else "",
        f"<Prefix>{key(op.prefix)}</Prefix>",
        f"<Delimiter>{key(op.delimiter)}</Delimiter>" if op.delimiter else "",
        tag("EncodingType", "url") if op.encode_url else "",
        tag("MaxUploads", str(op.max_uploads)),
        flag("IsTruncated", result.truncated),
        *[_upload(u, key) for u in result.uploads],
        common_prefixes(result.common_prefixes, key),
    )


def _upload(u: res.UploadEntry, key: Callable[[str], str]) -> str:
    return (
        f"<Upload><Key>{key(u.key)}</Key>{tag('UploadId', u.upload_id)}"
        f"{owner('Initiator', u.owner)}{owner('Owner', u.owner)}<StorageClass>STANDARD</StorageClass>"
        f"{tag('Initiated', httpdates.format_iso(u.initiated_ms))}"
        f"{checksum_kind(u.checksum_algorithm, u.checksum_type)}</Upload>"
    )


def parts(op: ops.ListParts, result: res.PartList) -> str:
    last = result.parts[-1].number if result.parts else op.part_number_marker
    return root(
        "ListPartsResult",
        tag("Bucket", op.bucket),
        tag("Key", op.key),
        tag("UploadId", op.upload_id),
        tag("PartNumberMarker", str(op.part_number_marker)),
        tag("NextPartNumberMarker", str(last)),
        tag("MaxParts", str(op.max_parts)),
        flag("IsTruncated", result.truncated),
        *[_part(part) for part in result.parts],
        owner("Initiator", result.owner),
        owner("Owner", result.owner),
        "<StorageClass>STANDARD</StorageClass>",
        checksum_kind(result.checksum_algorithm, result.checksum_type),
    )


def _part(part: res.PartEntry) -> str:
    return (
        f"<Part><PartNumber>{part.number}</PartNumber>"
        f"{tag('LastModified', httpdates.format_iso(part.modified_ms))}{etag(part.etag)}"
        f"<Size>{part.size}</Size>{checksums(part.checksums)}</Part>"
    )
