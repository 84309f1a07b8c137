"""Results and errors as S3's responses: status, headers, body.

Law: pure; bodies of objects are streamed by the caller, everything else is complete here. Invariant: every
answer names its request id, ETags are quoted, and every XML body is well-formed whatever the keys are.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwire import etags, httpdates, percents
from meshwire.ranges import UnsatisfiableRangeError, resolve_range
from meshwire.s3 import acls, attributes, cors, listings, memberlistings, tagging, versionlistings
from meshwire.s3 import operations as ops
from meshwire.s3.elements import escape, escape_message, optional, tag
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.s3 import results as res

_NOTHING: Mapping[str, str] = MappingProxyType({})
_XML = ("content-type", "application/xml")

Headers = list[tuple[str, str]]


class Rendered(NamedTuple):
    """`body` is empty for HEAD, 204 and 304; Content-Length is among the headers wherever HTTP allows it."""

    status: int
    headers: Headers
    body: bytes = b""


def render(op: ops.Operation, result: res.Result, request_id: str) -> Rendered:
    """The response to an operation. For GetObject (HEAD included) it has the status and headers; its bytes,
    and the conditions that decide on them, are the caller's. Raises S3Error InvalidRange."""
    status, headers, body = _RENDERERS[type(op)](op, result)
    headers.append(("x-amz-request-id", request_id))
    if body and not isinstance(op, ops.GetBucketSetting | ops.ListMembers):
        headers.append(_XML)
    if status != 204 and not isinstance(op, ops.GetObject):
        headers.append(("content-length", str(len(body))))
    return Rendered(status, headers, body)


def render_error(error: S3Error, request_id: str, resource: str = "", *, head: bool = False) -> Rendered:
    """The error document; HEAD (`head`) and 304 have none."""
    headers = [("x-amz-request-id", request_id), *error.headers.items()]
    if error.status == 304:
        return Rendered(304, headers)
    if head:
        return Rendered(error.status, [*headers, _XML])
    body = "".join(
        (
            listings.HEADER,
            "<Error>",
            tag("Code", error.code),
            f"<Message>{escape_message(error.message)}</Message>",
            *(tag(name, value) for name, value in error.extra.items()),
            tag("Resource", error.resource or resource),
            tag("RequestId", request_id),
            tag("HostId", request_id),
            "</Error>",
        )
    ).encode()
    return Rendered(error.status, [*headers, _XML, ("content-length", str(len(body)))], body)


# --- objects -------------------------------------------------------------------------------------------


def object_headers(
    info: res.ObjectHead,
    *,
    window: tuple[int, int] | None = None,
    checksum_mode: bool = False,
    overrides: Mapping[str, str] = _NOTHING,
) -> Headers:
    """Headers of GET and HEAD. `window` is (offset, length) of a partial answer.

    The whole object's checksum never goes with a 206: boto3, the JavaScript SDK and pyarrow would
    compare. A part asked for by its number comes with its own.
    """
    length = info.size if window is None else window[1]
    headers = [
        ("content-length", str(length)),
        ("etag", f'"{info.etag}"'),
        ("last-modified", httpdates.format_http(info.modified_ms // 1000)),
        ("accept-ranges", "bytes"),
    ]
    system = {**info.headers, **overrides} if overrides else info.headers
    if "content-type" not in system:
        headers.append(("content-type", "binary/octet-stream"))
    headers.extend(system.items())
    headers.extend([(f"x-amz-meta-{name}", value) for name, value in info.metadata.items()])
    if window is not None:
        last = window[0] + window[1] - 1
        headers.append(("content-range", f"bytes {window[0]}-{last}/{info.size}"))
    if info.parts_count is not None:
        headers.append(("x-amz-mp-parts-count", str(info.parts_count)))
    if checksum_mode and (window is None or info.parts_count is not None):
        headers.extend(_checksum_headers(info.checksums, info.checksum_type))
    if info.version:
        headers.append(("x-amz-version-id", info.version))
    if info.tag_count:
        headers.append(("x-amz-tagging-count", str(info.tag_count)))
    if info.extra:
        headers.extend(info.extra.items())
    return headers


def select_window(op: ops.GetObject, size: int) -> tuple[int, int] | None:
    """(offset, length) the operation asks for; None is the whole object.

    Raises S3Error InvalidRange, which carries `Content-Range: bytes */SIZE`: CRT clients learn sizes from it.
    """
    if op.range is None or (size == 0 and op.range.is_suffix):
        return None  # the last bytes of an empty object are all of it, which no Content-Range can say
    try:
        return resolve_range(op.range, size)
    except UnsatisfiableRangeError:
        first, last = (str(end) if end is not None else "" for end in (op.range.first, op.range.last))
        raise S3Error(
            "InvalidRange",
            headers={"content-range": f"bytes */{size}"},
            extra={"RangeRequested": f"bytes={first}-{last}", "ActualObjectSize": str(size)},
        ) from None


def not_modified(info: res.ObjectHead) -> S3Error:
    """The 304 for a condition that did not hold; it carries what a cache refreshes (RFC 9110 §15.4.5)."""
    headers = {
        "etag": etags.quote(info.etag),
        "last-modified": httpdates.format_http(info.modified_ms // 1000),
    }
    headers.update(
        (name, info.headers[name]) for name in ("cache-control", "expires") if name in info.headers
    )
    return S3Error("NotModified", headers=headers)


def _get_object(op: ops.GetObject, info: res.ObjectHead) -> Rendered:
    window = select_window(op, info.size)
    headers = object_headers(info, window=window, checksum_mode=op.checksum_mode, overrides=op.overrides)
    return Rendered(200 if window is None else 206, headers)


def _checksum_headers(checksums: Mapping[str, str], checksum_type: str) -> Headers:
    headers = [(f"x-amz-checksum-{name}", value) for name, value in checksums.items()]
    if headers and checksum_type:
        headers.append(("x-amz-checksum-type", checksum_type))
    return headers


def _put_object(op: ops.PutObject, result: res.ObjectStored) -> Rendered:
    checksums = _checksum_headers(result.checksums, result.checksum_type)
    told = (*_version(result.version), *result.extra.items())
    return Rendered(200, [("etag", etags.quote(result.etag)), *checksums, *told])


def _post_object(op: ops.PostObject, result: res.PostStored) -> Rendered:
    checksums = _checksum_headers(result.checksums, result.checksum_type)
    headers = [("etag", etags.quote(result.etag)), *checksums, *_version(result.version)]
    if result.redirect:
        return Rendered(303, [("location", redirect_location(result)), *headers])
    headers.append(("location", result.location))
    if result.status != 201:
        return Rendered(result.status, headers)
    pieces = (
        tag("Location", result.location),
        tag("Bucket", result.bucket),
        tag("Key", result.key),
        tag("ETag", etags.quote(result.etag)),
    )
    document = f"{listings.HEADER}<PostResponse>{''.join(pieces)}</PostResponse>"  # S3 has no namespace here
    return Rendered(201, headers, document.encode())


def _version(version: str, name: str = "x-amz-version-id") -> Headers:
    return [(name, version)] if version else []


def _copy_document(name: str, result: res.CopyResult) -> Rendered:
    return _document(
        listings.root(
            name,
            tag("LastModified", httpdates.format_iso(result.modified_ms)),
            listings.etag(result.etag),
            optional("ChecksumType", result.checksum_type),
            listings.checksums(result.checksums),
        ),
        [
            *_version(result.version),
            *_version(result.source_version, "x-amz-copy-source-version-id"),
            *result.extra.items(),
        ],
    )


def _copy_object(op: ops.CopyObject, result: res.CopyResult) -> Rendered:
    return _copy_document("CopyObjectResult", result)


def _no_content(op: ops.Operation, result: res.Result) -> Rendered:
    return Rendered(204, [])


def _delete_object(op: ops.DeleteObject, result: res.ObjectDeleted) -> Rendered:
    marker = [("x-amz-delete-marker", "true")] if result.marker else []
    return Rendered(204, marker + _version(result.version))


def _object_tags(op: ops.GetObjectTagging, result: res.ObjectTags) -> Rendered:
    return _document(listings.root("Tagging", tagging.pieces(result.tags)), _version(result.version))


def _object_acl(op: ops.GetObjectAcl, result: res.ObjectAcl) -> Rendered:
    grants = acls.grants_of(result.acl, result.owner.id, result.bucket_owner.id)
    return _document(acls.write_acl(result.owner, grants, result.names), _version(result.version))


def _object_acl_stored(op: ops.PutObjectAcl, result: res.ObjectAclStored) -> Rendered:
    return Rendered(200, _version(result.version))


def _object_tagged(op: ops.PutObjectTagging | ops.DeleteObjectTagging, result: res.ObjectTagged) -> Rendered:
    return Rendered(200 if isinstance(op, ops.PutObjectTagging) else 204, _version(result.version))


def _object_attributes(op: ops.GetObjectAttributes, result: res.ObjectAttributes) -> Rendered:
    modified = ("last-modified", httpdates.format_http(result.modified_ms // 1000))
    return _document(attributes.document(op, result), [modified, *_version(result.version)])


def _delete_objects(op: ops.DeleteObjects, result: res.DeleteResult) -> Rendered:
    return _document(
        listings.root(
            "DeleteResult",
            *[_deleted_key(entry) for entry in result.deleted],
            *[_delete_failure(failure) for failure in result.failures],
        )
    )


def _deleted_key(entry: res.DeletedKey) -> str:
    version = optional("VersionId", entry.version)
    if entry.marker_version:
        version += tag("DeleteMarker", "true") + tag("DeleteMarkerVersionId", entry.marker_version)
    return f"<Deleted>{tag('Key', entry.key)}{version}</Deleted>"


def _delete_failure(failure: res.DeleteFailure) -> str:
    version = optional("VersionId", failure.version)
    fields = tag("Key", failure.key), version, tag("Code", failure.code), tag("Message", failure.message)
    return f"<Error>{''.join(fields)}</Error>"


def _document(text: str, headers: Headers | None = None) -> Rendered:
    return Rendered(200, [] if headers is None else headers, text.encode())


# --- buckets ----------------------------------------------------------------------------------------------


def _create_bucket(op: ops.CreateBucket, result: res.BucketCreated) -> Rendered:
    return Rendered(200, [("location", f"/{op.bucket}")])


def _head_bucket(op: ops.HeadBucket, result: res.BucketFound) -> Rendered:
    return Rendered(200, [("x-amz-bucket-region", result.region)])


def _location(op: ops.GetBucketLocation, result: res.BucketLocation) -> Rendered:
    region = "" if result.region == "us-east-1" else result.region
    return _document(listings.root("LocationConstraint", escape(region)))


def _get_setting(op: ops.GetBucketSetting, result: res.SettingDocument) -> Rendered:
    return Rendered(200, [("content-type", result.content_type)], result.body)


def _put_setting(op: ops.PutBucketSetting, result: res.SettingStored) -> Rendered:
    return Rendered(204 if op.setting in {"policy", "tagging"} else 200, [])


# --- multipart --------------------------------------------------------------------------------------------


def _create_upload(op: ops.CreateMultipartUpload, result: res.UploadCreated) -> Rendered:
    headers = []
    if result.checksum_algorithm:
        headers.append(("x-amz-checksum-algorithm", result.checksum_algorithm.upper()))
    if result.checksum_type:
        headers.append(("x-amz-checksum-type", result.checksum_type))
    named = tag("Bucket", result.bucket), tag("Key", result.key), tag("UploadId", result.upload_id)
    return _document(listings.root("InitiateMultipartUploadResult", *named), headers)


def _upload_part(op: ops.UploadPart, result: res.PartStored) -> Rendered:
    return Rendered(200, [("etag", etags.quote(result.etag)), *_checksum_headers(result.checksums, "")])


def _upload_part_copy(op: ops.UploadPartCopy, result: res.CopyResult) -> Rendered:
    return _copy_document("CopyPartResult", result)


def _complete(op: ops.CompleteMultipartUpload, result: res.CompleteResult) -> Rendered:
    return _document(
        listings.root(
            "CompleteMultipartUploadResult",
            tag("Location", result.location),
            tag("Bucket", result.bucket),
            tag("Key", result.key),
            listings.etag(result.etag),
            listings.checksums(result.checksums),
            optional("ChecksumType", result.checksum_type),
        ),
        [*_version(result.version), *result.extra.items()],
    )


def _listing(write: Callable[[Any, Any], str]) -> Callable[[Any, Any], Rendered]:
    return lambda op, result: _document(write(op, result))


# Which result belongs to which operation is written in the signatures; a table cannot say it to the type
# checker.
def _preflight(op: ops.Preflight, result: res.PreflightAllowed) -> Rendered:
    return Rendered(200, cors.allowing(result.rule, result.origin, op.headers))


def _list_members(op: ops.ListMembers, result: res.MemberListing) -> Rendered:
    headers = [("content-type", "application/json"), ("etag", f'"{result.etag}"')]
    if result.version:
        headers.append(("x-amz-version-id", result.version))
    return Rendered(200, headers, memberlistings.document(result))


_RENDERERS: Mapping[type, Callable[[Any, Any], Rendered]] = {
    ops.ListBuckets: _listing(listings.buckets),
    ops.CreateBucket: _create_bucket,
    ops.HeadBucket: _head_bucket,
    ops.DeleteBucket: _no_content,
    ops.GetBucketLocation: _location,
    ops.GetBucketSetting: _get_setting,
    ops.PutBucketSetting: _put_setting,
    ops.DeleteBucketSetting: _no_content,
    ops.Preflight: _preflight,
    ops.ListObjects: _listing(listings.objects),
    ops.ListObjectVersions: _listing(versionlistings.document),
    ops.GetObject: _get_object,
    ops.ListMembers: _list_members,
    ops.PutObject: _put_object,
    ops.PostObject: _post_object,
    ops.CopyObject: _copy_object,
    ops.DeleteObject: _delete_object,
    ops.DeleteObjects: _delete_objects,
    ops.GetObjectTagging: _object_tags,
    ops.GetObjectAcl: _object_acl,
    ops.PutObjectAcl: _object_acl_stored,
    ops.PutObjectTagging: _object_tagged,
    ops.DeleteObjectTagging: _object_tagged,
    ops.GetObjectAttributes: _object_attributes,
    ops.CreateMultipartUpload: _create_upload,
    ops.UploadPart: _upload_part,
    ops.UploadPartCopy: _upload_part_copy,
    ops.CompleteMultipartUpload: _complete,
    ops.AbortMultipartUpload: _no_content,
    ops.ListParts: _listing(listings.parts),
    ops.ListMultipartUploads: _listing(listings.uploads),
}


def redirect_location(result: res.PostStored) -> str:
    """The URL with what was stored in its query."""
    query = "&".join(
        f"{name}={percents.encode(value)}"
        for name, value in (("bucket", result.bucket), ("key", result.key), ("etag", f'"{result.etag}"'))
    )
    base, hash_, fragment = result.redirect.partition("#")
    return f"{base}{'&' if '?' in base else '?'}{query}{hash_}{fragment}"
