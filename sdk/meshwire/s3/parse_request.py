"""Parser of S3 requests: from method, target and headers to an operation.

Law: syntax only.
Invariant: any text gives an operation or an S3Error. An unsupported sub-resource answers NotImplemented:
falling through to the plain operation would let `PUT /bucket?acl` create a bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire import names
from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding
from meshwire.http_values.conditional_requests import parse_range
from meshwire.s3 import (
    acl_xml,
    checksum_headers,
    cors,
    listings,
    operations,
    request_headers,
    settings_xml,
    xml_documents,
)
from meshwire.s3.request_head import RequestHead as RequestHead  # noqa: TC001 - importers of requests want it here
from meshwire.s3.request_head import invalid_argument, read_auth_mechanism, read_query

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.s3.operations import Operation
    from meshwire.s3.request_head import Query

    Headers = Mapping[str, str]

_MAX_KEYS = 1000


def parse_request(head: RequestHead) -> Operation:
    """Parse a request into an operation. Raises S3Error."""
    bucket, key = split_path(head)
    if head.method == "OPTIONS":
        return cors.read_preflight(bucket, key, head.headers)
    query, headers, presigned = read_query(head.raw_query), head.headers, False
    if query.values:
        mechanism = read_auth_mechanism(headers, query)
        headers, presigned = (
            request_headers.with_presigned_headers(headers, query, mechanism),
            mechanism.presigned,
        )
    request_headers.reject_unsupported_headers(headers)
    level = "object" if key else "bucket" if bucket else "service"
    route = _ROUTES.get((level, head.method))
    if query.values:
        query.check_parameters(level, head.method, presigned=presigned)
    if route is None:
        raise S3Error("MethodNotAllowed", extra={"Method": head.method[:32], "ResourceType": level.upper()})
    return route(bucket, key, query, headers)


def split_path(head: RequestHead) -> tuple[str, str]:
    """Return (bucket, key), either of which may be empty. Raises S3Error InvalidURI, InvalidBucketName,
    KeyTooLongError."""
    raw_path = head.raw_path
    if not raw_path.startswith("/"):
        raise S3Error("InvalidURI")
    raw_bucket, _, raw_key = raw_path[1:].partition("/")
    try:
        if head.host_bucket:
            raw_bucket, raw_key = percent_encoding.encode(head.host_bucket), raw_path[1:]
        if not raw_bucket and not raw_key:
            return "", ""
        bucket, key = percent_encoding.decode(raw_bucket), percent_encoding.decode(raw_key)
    except percent_encoding.PercentError:
        raise S3Error("InvalidURI") from None
    request_headers.check_bucket(bucket)
    if key:
        request_headers.check_key(key)
    return bucket, key


# --- service and buckets -------------------------------------------------------------------------------


def _list_buckets(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    token = query.values.get("continuation-token")
    return operations.ListBuckets(
        prefix=query.text("prefix"),
        max_buckets=query.integer("max-buckets", 10_000, low=1, high=10_000),
        continuation=_read_token(token) if token else None,
        region=query.values.get("bucket-region") or None,
    )


def _put_bucket(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    setting = query.bucket_setting()
    if setting is not None:
        acl = acl_xml.read_acl_headers(headers) if setting == "acl" else None
        return operations.PutBucketSetting(bucket, setting, checksum_headers.read_digests(headers), acl)
    return operations.CreateBucket(
        bucket, acl_xml.read_acl_headers(headers), request_headers.read_object_ownership(headers)
    )


def _head_bucket(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    return operations.HeadBucket(bucket)


def _delete_bucket(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    setting = query.bucket_setting()
    if setting is not None:
        return operations.DeleteBucketSetting(bucket, setting)
    return operations.DeleteBucket(bucket)


def _get_bucket(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    setting = query.bucket_setting()
    if setting is not None:
        return operations.GetBucketSetting(bucket, setting)
    if "location" in query.values:
        return operations.GetBucketLocation(bucket)
    if "uploads" in query.values:
        return _list_uploads(bucket, query)
    if "versions" in query.values:
        return xml_documents.read_list_versions(bucket, query)
    list_type = query.values.get("list-type")
    if list_type is None:
        return _list_v1(bucket, query)
    if list_type != "2":
        raise invalid_argument("list-type", list_type, "list-type must be 2; leave it out for version 1.")
    return _list_v2(bucket, query)


def _list_v1(bucket: str, query: Query) -> Operation:
    return operations.ListObjects(
        bucket,
        1,
        prefix=query.text("prefix"),
        delimiter=query.text("delimiter"),
        max_keys=min(query.integer("max-keys", _MAX_KEYS, label="maxKeys"), _MAX_KEYS),
        after=query.text("marker"),
        encode_url=query.encode_url(),
    )


def _list_v2(bucket: str, query: Query) -> Operation:
    token = query.values.get("continuation-token")
    start_after = query.text("start-after")
    return operations.ListObjects(
        bucket,
        2,
        prefix=query.text("prefix"),
        delimiter=query.text("delimiter"),
        max_keys=min(query.integer("max-keys", _MAX_KEYS, label="maxKeys"), _MAX_KEYS),
        after=_read_token(token) if token else start_after,
        continuation_token=token,
        start_after=start_after or None,
        encode_url=query.encode_url(),
        fetch_owner=query.values.get("fetch-owner", "").lower() == "true",
    )


def _read_token(token: str) -> str:
    try:
        after = listings.read_continuation_token(token)
        names.check_key(after)
    except (listings.ContinuationTokenError, names.NameProblemError):
        raise invalid_argument(
            "continuation-token", token, "The continuation token provided is incorrect"
        ) from None
    return after


def _list_uploads(bucket: str, query: Query) -> Operation:
    return operations.ListMultipartUploads(
        bucket,
        prefix=query.text("prefix"),
        delimiter=query.text("delimiter"),
        key_marker=query.text("key-marker"),
        upload_id_marker=query.text("upload-id-marker"),
        max_uploads=min(query.integer("max-uploads", 1000), 1000),
        encode_url=query.encode_url(),
    )


def _post_bucket(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    if "delete" in query.values:
        return operations.DeleteObjects(bucket, checksum_headers.read_digests(headers))
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return operations.PostObject(bucket, headers["content-type"])
    raise S3Error("MethodNotAllowed", extra={"Method": "POST", "ResourceType": "BUCKET"})


# --- objects ---------------------------------------------------------------------------------------------


def _get_object(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    if "uploadId" in query.values:
        return operations.ListParts(
            bucket,
            key,
            _upload_id(query),
            max_parts=min(query.integer("max-parts", 1000), 1000),
            part_number_marker=query.integer("part-number-marker", 0),
        )
    if "acl" in query.values:
        return operations.GetObjectAcl(bucket, key, query.version_id())
    if "tagging" in query.values:
        return operations.GetObjectTagging(bucket, key, query.version_id())
    if "attributes" in query.values:
        return listings.read_get_object_attributes(bucket, key, query.version_id(), headers)
    if "members" in query.values:
        return listings.read_list_members(bucket, key, query)
    return _read_object(bucket, key, query, headers, head=False)


def _head_object(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    return _read_object(bucket, key, query, headers, head=True)


def _read_object(bucket: str, key: str, query: Query, headers: Headers, *, head: bool) -> Operation:
    range_header = headers.get("range")
    conditions = request_headers.read_conditions(headers)
    checksum_mode = headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
    span = None if range_header is None else parse_range(range_header)
    if_range = None if span is None else request_headers.if_range(headers)
    if not query.values:
        return operations.GetObject(
            bucket, key, head, span, conditions, None, checksum_mode, if_range=if_range
        )
    version, number = query.version_id(), request_headers.part_number(query)
    if number is not None and range_header is not None:
        raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    return operations.GetObject(
        bucket,
        key,
        head,
        span,
        conditions,
        number,
        checksum_mode,
        request_headers.response_overrides(query),
        version,
        listings.read_member(query),
        if_range,
    )


def _put_object(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    if "uploadId" in query.values or "partNumber" in query.values:
        return _put_part(bucket, key, query, headers)
    if "tagging" in query.values:
        return operations.PutObjectTagging(
            bucket, key, checksum_headers.read_digests(headers), query.version_id()
        )
    if "acl" in query.values:
        given, acl = checksum_headers.read_digests(headers), acl_xml.read_acl_headers(headers)
        return operations.PutObjectAcl(bucket, key, given, acl, query.version_id())
    if "versionId" in query.values:
        raise invalid_argument(
            "versionId", query.values["versionId"], "This operation does not accept a version-id."
        )
    if "x-amz-copy-source" in headers:
        return _copy_object(bucket, key, headers)
    if "content-range" in headers:  # a client that resumes an upload sends the rest of the object
        raise S3Error(
            "NotImplemented",
            "Content-Range asks to write a part of an object, which is not implemented. Send the whole "
            "object without it, or a multipart upload.",
            extra={"Header": "content-range"},
        )
    return operations.PutObject(
        bucket,
        key,
        request_headers.object_headers(headers),
        checksum_headers.read_digests(headers),
        request_headers.read_conditions(headers),
        settings_xml.read_tagging_header(headers),
        acl=acl_xml.read_acl_headers(headers),
    )


def _copy_object(bucket: str, key: str, headers: Headers) -> Operation:
    return operations.CopyObject(
        bucket,
        key,
        request_headers.copy_source(headers),
        request_headers.replaces_metadata(headers),
        request_headers.object_headers(headers),
        request_headers.read_conditions(headers),
        request_headers.read_copy_source_conditions(headers),
        checksum_headers.read_checksum_algorithm(headers),
        settings_xml.read_tagging_header(headers) if settings_xml.replaces_tags(headers) else None,
        reclass="x-amz-storage-class" in headers,
        acl=acl_xml.read_acl_headers(headers),
    )


def _put_part(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    upload_id, number = _upload_id(query), request_headers.part_number(query)
    if number is None:
        raise invalid_argument(
            "partNumber", "", "Part number must be an integer between 1 and 10000, inclusive"
        )
    if "x-amz-copy-source" not in headers:
        return operations.UploadPart(bucket, key, upload_id, number, checksum_headers.read_digests(headers))
    return operations.UploadPartCopy(
        bucket,
        key,
        upload_id,
        number,
        request_headers.copy_source(headers),
        request_headers.copy_range(headers),
        request_headers.read_copy_source_conditions(headers),
    )


def _upload_id(query: Query) -> str:
    """Return the upload id; as in S3, a malformed one gives NoSuchUpload."""
    upload_id = query.values.get("uploadId", "")
    if not upload_id:
        raise invalid_argument(
            "uploadId", "", "This operation does not accept a query-string without an uploadId."
        )
    if len(upload_id) > 1024 or not upload_id.isprintable():
        raise S3Error("NoSuchUpload")
    return upload_id


def _post_object(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    if "uploads" in query.values:
        algorithm = checksum_headers.read_checksum_algorithm(headers)
        checksum_type = checksum_headers.read_checksum_type(headers, algorithm)
        if checksum_type is not None and algorithm is None:
            raise S3Error(
                "InvalidRequest",
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header.",
            )
        return operations.CreateMultipartUpload(
            bucket,
            key,
            request_headers.object_headers(headers),
            algorithm,
            checksum_type,
            settings_xml.read_tagging_header(headers),
            acl=acl_xml.read_acl_headers(headers),
        )
    if "uploadId" in query.values:
        return operations.CompleteMultipartUpload(
            bucket,
            key,
            _upload_id(query),
            checksum_headers.read_digests(headers, composite=True),
            request_headers.read_conditions(headers),
            checksum_headers.read_checksum_type(headers, None),
            request_headers.object_size(headers),
        )
    raise S3Error("MethodNotAllowed", extra={"Method": "POST", "ResourceType": "OBJECT"})


def _delete_object(bucket: str, key: str, query: Query, headers: Headers) -> Operation:
    if "uploadId" in query.values:
        return operations.AbortMultipartUpload(bucket, key, _upload_id(query))
    if "tagging" in query.values:
        return operations.DeleteObjectTagging(bucket, key, query.version_id())
    return operations.DeleteObject(bucket, key, request_headers.read_conditions(headers), query.version_id())


_ROUTES: dict[tuple[str, str], Callable[[str, str, Query, Headers], Operation]] = {
    ("service", "GET"): _list_buckets,
    ("bucket", "GET"): _get_bucket,
    ("bucket", "HEAD"): _head_bucket,
    ("bucket", "PUT"): _put_bucket,
    ("bucket", "POST"): _post_bucket,
    ("bucket", "DELETE"): _delete_bucket,
    ("object", "GET"): _get_object,
    ("object", "HEAD"): _head_object,
    ("object", "PUT"): _put_object,
    ("object", "POST"): _post_object,
    ("object", "DELETE"): _delete_object,
}
