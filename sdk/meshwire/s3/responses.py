"""Responses of S3: results and errors rendered as status, headers and body.

Law: pure; the caller streams the bytes of objects, everything else is complete here.
Invariant: every response names its request id, ETags are quoted, and every XML body is well-formed whatever
the keys are.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwire.errors import S3Error
from meshwire.http_values import conditional_requests, dates, percent_encoding
from meshwire.http_values.conditional_requests import UnsatisfiableRangeError, resolve_range
from meshwire.http_values.mesh_headers import WHOLE_CHECKSUM_PREFIX
from meshwire.s3 import acl_xml, cors, listings, settings_xml, xml_documents
from meshwire.s3 import operations as ops
from meshwire.s3.xml_io import escape_message, escape_xml, optional_element, xml_element

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.s3 import result_types as res

_NOTHING: Mapping[str, str] = MappingProxyType({})
_XML = ("content-type", "application/xml")

Headers = list[tuple[str, str]]


class RenderedResponse(NamedTuple):
    """A rendered response. `body` is empty for HEAD, 204 and 304; Content-Length is among the headers
    wherever HTTP allows it."""

    status: int
    headers: Headers
    body: bytes = b""


def render(op: ops.Operation, result: res.Result, request_id: str) -> RenderedResponse:
    """Render the response to an operation. For GetObject (HEAD included) only status and headers; the
    caller handles the bytes and the conditions. Raises S3Error InvalidRange."""
    status, headers, body = _RENDERERS[type(op)](op, result)
    headers.append(("x-amz-request-id", request_id))
    if body and not isinstance(op, ops.GetBucketSetting | ops.ListMembers):
        headers.append(_XML)
    if status != 204 and not isinstance(op, ops.GetObject):
        headers.append(("content-length", str(len(body))))
    return RenderedResponse(status, headers, body)


def render_error(
    error: S3Error, request_id: str, resource: str = "", *, head: bool = False
) -> RenderedResponse:
    """Render the error document; HEAD (`head`) and 304 have none."""
    headers = [("x-amz-request-id", request_id), *error.headers.items()]
    if error.status == 304:
        return RenderedResponse(304, headers)
    if head:
        return RenderedResponse(error.status, [*headers, _XML])
    body = "".join(
        (
            listings.XML_DECLARATION,
            "<Error>",
            xml_element("Code", error.code),
            f"<Message>{escape_message(error.message)}</Message>",
            *(xml_element(name, value) for name, value in error.extra.items()),
            xml_element("Resource", error.resource or resource),
            xml_element("RequestId", request_id),
            xml_element("HostId", request_id),
            "</Error>",
        )
    ).encode()
    return RenderedResponse(error.status, [*headers, _XML, ("content-length", str(len(body)))], body)


# --- objects -------------------------------------------------------------------------------------------


def object_response_headers(
    info: res.ObjectHead,
    *,
    window: tuple[int, int] | None = None,
    checksum_mode: bool = False,
    overrides: Mapping[str, str] = _NOTHING,
) -> Headers:
    """Return the headers of GET and HEAD. `window` is (offset, length) of a partial response.

    The checksum of the whole object is never sent with a 206 under S3's name: boto3, the JavaScript SDK and
    pyarrow would compare it. Under Shardmesh's name it is, for clients that fetch an object by its ranges. A
    part requested by number carries its own checksum.
    """
    length = info.size if window is None else window[1]
    headers = [
        ("content-length", str(length)),
        ("etag", f'"{info.etag}"'),
        ("last-modified", dates.format_http(info.modified_ms // 1000)),
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
    elif checksum_mode and info.checksum_type == "FULL_OBJECT":
        headers.extend((f"{WHOLE_CHECKSUM_PREFIX}{name}", value) for name, value in info.checksums.items())
    if info.version:
        headers.append(("x-amz-version-id", info.version))
    if info.tag_count:
        headers.append(("x-amz-tagging-count", str(info.tag_count)))
    if info.extra:
        headers.extend(info.extra.items())
    return headers


def resolve_object_range(op: ops.GetObject, size: int) -> tuple[int, int] | None:
    """Return the (offset, length) that the operation requests; None is the whole object.

    Raises S3Error InvalidRange with `Content-Range: bytes */SIZE`, from which CRT clients learn sizes.
    """
    if op.range is None or (size == 0 and op.range.is_suffix):
        return None  # a suffix of an empty object is all of it, which Content-Range cannot express
    try:
        return resolve_range(op.range, size)
    except UnsatisfiableRangeError:
        first, last = (str(end) if end is not None else "" for end in (op.range.first, op.range.last))
        raise S3Error(
            "InvalidRange",
            headers={"content-range": f"bytes */{size}"},
            extra={"RangeRequested": f"bytes={first}-{last}", "ActualObjectSize": str(size)},
        ) from None


def not_modified_error(info: res.ObjectHead) -> S3Error:
    """Return the 304 for a failed condition, with the headers that a cache refreshes (RFC 9110 §15.4.5)."""
    headers = {
        "etag": conditional_requests.quote_etag(info.etag),
        "last-modified": dates.format_http(info.modified_ms // 1000),
    }
    headers.update(
        (name, info.headers[name]) for name in ("cache-control", "expires") if name in info.headers
    )
    return S3Error("NotModified", headers=headers)


def _get_object(op: ops.GetObject, info: res.ObjectHead) -> RenderedResponse:
    window = resolve_object_range(op, info.size)
    headers = object_response_headers(
        info, window=window, checksum_mode=op.checksum_mode, overrides=op.overrides
    )
    return RenderedResponse(200 if window is None else 206, headers)


def _checksum_headers(checksums: Mapping[str, str], checksum_type: str) -> Headers:
    headers = [(f"x-amz-checksum-{name}", value) for name, value in checksums.items()]
    if headers and checksum_type:
        headers.append(("x-amz-checksum-type", checksum_type))
    return headers


def _put_object(op: ops.PutObject, result: res.ObjectStored) -> RenderedResponse:
    checksums = _checksum_headers(result.checksums, result.checksum_type)
    told = (*_version(result.version), *result.extra.items())
    return RenderedResponse(200, [("etag", conditional_requests.quote_etag(result.etag)), *checksums, *told])


def _post_object(op: ops.PostObject, result: res.PostStored) -> RenderedResponse:
    checksums = _checksum_headers(result.checksums, result.checksum_type)
    headers = [("etag", conditional_requests.quote_etag(result.etag)), *checksums, *_version(result.version)]
    if result.redirect:
        return RenderedResponse(303, [("location", redirect_location(result)), *headers])
    headers.append(("location", result.location))
    if result.status != 201:
        return RenderedResponse(result.status, headers)
    pieces = (
        xml_element("Location", result.location),
        xml_element("Bucket", result.bucket),
        xml_element("Key", result.key),
        xml_element("ETag", conditional_requests.quote_etag(result.etag)),
    )
    # S3 uses no namespace in this document.
    document = f"{listings.XML_DECLARATION}<PostResponse>{''.join(pieces)}</PostResponse>"
    return RenderedResponse(201, headers, document.encode())


def _version(version: str, name: str = "x-amz-version-id") -> Headers:
    return [(name, version)] if version else []


def _copy_document(name: str, result: res.CopyResult) -> RenderedResponse:
    return _document(
        listings.root_element(
            name,
            xml_element("LastModified", dates.format_iso(result.modified_ms)),
            listings.etag_element(result.etag),
            optional_element("ChecksumType", result.checksum_type),
            listings.checksum_elements(result.checksums),
        ),
        [
            *_version(result.version),
            *_version(result.source_version, "x-amz-copy-source-version-id"),
            *result.extra.items(),
        ],
    )


def _copy_object(op: ops.CopyObject, result: res.CopyResult) -> RenderedResponse:
    return _copy_document("CopyObjectResult", result)


def _no_content(op: ops.Operation, result: res.Result) -> RenderedResponse:
    return RenderedResponse(204, [])


def _delete_object(op: ops.DeleteObject, result: res.ObjectDeleted) -> RenderedResponse:
    marker = [("x-amz-delete-marker", "true")] if result.marker else []
    return RenderedResponse(204, marker + _version(result.version))


def _object_tags(op: ops.GetObjectTagging, result: res.ObjectTags) -> RenderedResponse:
    return _document(
        listings.root_element("Tagging", settings_xml.tag_elements(result.tags)), _version(result.version)
    )


def _object_acl(op: ops.GetObjectAcl, result: res.ObjectAcl) -> RenderedResponse:
    grants = acl_xml.effective_grants(result.acl, result.owner.id, result.bucket_owner.id)
    return _document(acl_xml.acl_document(result.owner, grants, result.names), _version(result.version))


def _object_acl_stored(op: ops.PutObjectAcl, result: res.ObjectAclStored) -> RenderedResponse:
    return RenderedResponse(200, _version(result.version))


def _object_tagged(
    op: ops.PutObjectTagging | ops.DeleteObjectTagging, result: res.ObjectTagged
) -> RenderedResponse:
    return RenderedResponse(200 if isinstance(op, ops.PutObjectTagging) else 204, _version(result.version))


def _object_attributes(op: ops.GetObjectAttributes, result: res.ObjectAttributes) -> RenderedResponse:
    modified = ("last-modified", dates.format_http(result.modified_ms // 1000))
    return _document(listings.object_attributes_document(op, result), [modified, *_version(result.version)])


def _delete_objects(op: ops.DeleteObjects, result: res.DeleteResult) -> RenderedResponse:
    return _document(
        listings.root_element(
            "DeleteResult",
            *[_deleted_key(entry) for entry in result.deleted],
            *[_delete_failure(failure) for failure in result.failures],
        )
    )


def _deleted_key(entry: res.DeletedKey) -> str:
    version = optional_element("VersionId", entry.version)
    if entry.marker_version:
        version += xml_element("DeleteMarker", "true") + xml_element(
            "DeleteMarkerVersionId", entry.marker_version
        )
    return f"<Deleted>{xml_element('Key', entry.key)}{version}</Deleted>"


def _delete_failure(failure: res.DeleteFailure) -> str:
    version = optional_element("VersionId", failure.version)
    fields = (
        xml_element("Key", failure.key),
        version,
        xml_element("Code", failure.code),
        xml_element("Message", failure.message),
    )
    return f"<Error>{''.join(fields)}</Error>"


def _document(text: str, headers: Headers | None = None) -> RenderedResponse:
    return RenderedResponse(200, [] if headers is None else headers, text.encode())


# --- buckets ----------------------------------------------------------------------------------------------


def _create_bucket(op: ops.CreateBucket, result: res.BucketCreated) -> RenderedResponse:
    return RenderedResponse(200, [("location", f"/{op.bucket}")])


def _head_bucket(op: ops.HeadBucket, result: res.BucketFound) -> RenderedResponse:
    return RenderedResponse(200, [("x-amz-bucket-region", result.region)])


def _location(op: ops.GetBucketLocation, result: res.BucketLocation) -> RenderedResponse:
    region = "" if result.region == "us-east-1" else result.region
    return _document(listings.root_element("LocationConstraint", escape_xml(region)))


def _get_setting(op: ops.GetBucketSetting, result: res.SettingDocument) -> RenderedResponse:
    return RenderedResponse(200, [("content-type", result.content_type)], result.body)


def _put_setting(op: ops.PutBucketSetting, result: res.SettingStored) -> RenderedResponse:
    return RenderedResponse(204 if op.setting in {"policy", "tagging"} else 200, [])


# --- multipart --------------------------------------------------------------------------------------------


def _create_upload(op: ops.CreateMultipartUpload, result: res.UploadCreated) -> RenderedResponse:
    headers = []
    if result.checksum_algorithm:
        headers.append(("x-amz-checksum-algorithm", result.checksum_algorithm.upper()))
    if result.checksum_type:
        headers.append(("x-amz-checksum-type", result.checksum_type))
    named = (
        xml_element("Bucket", result.bucket),
        xml_element("Key", result.key),
        xml_element("UploadId", result.upload_id),
    )
    return _document(listings.root_element("InitiateMultipartUploadResult", *named), headers)


def _upload_part(op: ops.UploadPart, result: res.PartStored) -> RenderedResponse:
    return RenderedResponse(
        200,
        [("etag", conditional_requests.quote_etag(result.etag)), *_checksum_headers(result.checksums, "")],
    )


def _upload_part_copy(op: ops.UploadPartCopy, result: res.CopyResult) -> RenderedResponse:
    return _copy_document("CopyPartResult", result)


def _complete(op: ops.CompleteMultipartUpload, result: res.CompleteResult) -> RenderedResponse:
    return _document(
        listings.root_element(
            "CompleteMultipartUploadResult",
            xml_element("Location", result.location),
            xml_element("Bucket", result.bucket),
            xml_element("Key", result.key),
            listings.etag_element(result.etag),
            listings.checksum_elements(result.checksums),
            optional_element("ChecksumType", result.checksum_type),
        ),
        [*_version(result.version), *result.extra.items()],
    )


def _listing(write: Callable[[Any, Any], str]) -> Callable[[Any, Any], RenderedResponse]:
    return lambda op, result: _document(write(op, result))


# The signatures state which result belongs to which operation; a table cannot express that to the type
# checker.
def _preflight(op: ops.Preflight, result: res.PreflightAllowed) -> RenderedResponse:
    return RenderedResponse(200, cors.cors_allow_headers(result.rule, result.origin, op.headers))


def _list_members(op: ops.ListMembers, result: res.MemberListing) -> RenderedResponse:
    headers = [("content-type", "application/json"), ("etag", f'"{result.etag}"')]
    if result.version:
        headers.append(("x-amz-version-id", result.version))
    return RenderedResponse(200, headers, listings.list_members_document(result))


_RENDERERS: Mapping[type, Callable[[Any, Any], RenderedResponse]] = {
    ops.ListBuckets: _listing(listings.list_buckets_document),
    ops.CreateBucket: _create_bucket,
    ops.HeadBucket: _head_bucket,
    ops.DeleteBucket: _no_content,
    ops.GetBucketLocation: _location,
    ops.GetBucketSetting: _get_setting,
    ops.PutBucketSetting: _put_setting,
    ops.DeleteBucketSetting: _no_content,
    ops.Preflight: _preflight,
    ops.ListObjects: _listing(listings.list_objects_document),
    ops.ListObjectVersions: _listing(xml_documents.list_versions_document),
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
    ops.ListParts: _listing(listings.list_parts_document),
    ops.ListMultipartUploads: _listing(listings.list_uploads_document),
}


def redirect_location(result: res.PostStored) -> str:
    """Return the redirect URL with bucket, key and ETag in its query."""
    query = "&".join(
        f"{name}={percent_encoding.encode(value)}"
        for name, value in (("bucket", result.bucket), ("key", result.key), ("etag", f'"{result.etag}"'))
    )
    base, hash_, fragment = result.redirect.partition("#")
    return f"{base}{'&' if '?' in base else '?'}{query}{hash_}{fragment}"
