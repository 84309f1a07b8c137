"""Requests and the operations, or the refusals, they are."""

from __future__ import annotations

from typing import Any

import pytest

from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import Conditions, RangeSpec
from meshwire.s3 import listings
from meshwire.s3 import operations as ops
from meshwire.s3.parse_request import RequestHead, parse_request

BUCKET, KEY = "photos", "a/b.jpg"


def parse(method: str, target: str, **headers: str) -> Any:
    path, _, query = target.partition("?")
    return parse_request(
        RequestHead(method, path, query, {k.replace("_", "-"): v for k, v in headers.items()})
    )


def refused(method: str, target: str, **headers: str) -> S3Error:
    with pytest.raises(S3Error) as caught:
        parse(method, target, **headers)
    return caught.value


@pytest.mark.parametrize(
    ("method", "target", "operation"),
    [
        ("GET", "/", ops.ListBuckets()),
        ("GET", "/?x-id=ListBuckets&max-buckets=5&prefix=a", ops.ListBuckets("a", 5)),
        ("GET", "/?bucket-region=eu-west-1", ops.ListBuckets(region="eu-west-1")),
        ("PUT", "/photos", ops.CreateBucket(BUCKET)),
        ("PUT", "/photos/", ops.CreateBucket(BUCKET)),
        ("HEAD", "/photos", ops.HeadBucket(BUCKET)),
        ("DELETE", "/photos/?x-id=DeleteBucket", ops.DeleteBucket(BUCKET)),
        ("GET", "/photos?location", ops.GetBucketLocation(BUCKET)),
        ("GET", "/photos?location=", ops.GetBucketLocation(BUCKET)),
        ("GET", "/photos", ops.ListObjects(BUCKET, 1)),
        ("GET", "/photos?marker=m&max-keys=0", ops.ListObjects(BUCKET, 1, max_keys=0, after="m")),
        ("GET", "/photos?list-type=2&max-keys=99999", ops.ListObjects(BUCKET, 2)),
        ("GET", "/photos?list-type=2&fetch-owner=true", ops.ListObjects(BUCKET, 2, fetch_owner=True)),
        ("GET", "/photos?uploads&max-uploads=3", ops.ListMultipartUploads(BUCKET, max_uploads=3)),
        ("POST", "/photos?delete", ops.DeleteObjects(BUCKET, BodyDigests())),
        ("GET", "/photos/a/b.jpg", ops.GetObject(BUCKET, KEY)),
        ("HEAD", "/photos/a%2Fb.jpg?versionId=null", ops.GetObject(BUCKET, KEY, head=True, version="null")),
        ("GET", "/photos/a/b.jpg?partNumber=3", ops.GetObject(BUCKET, KEY, part_number=3)),
        ("GET", "/photos/a/b.jpg?cachebuster=17", ops.GetObject(BUCKET, KEY)),
        ("DELETE", "/photos/a/b.jpg", ops.DeleteObject(BUCKET, KEY)),
        ("DELETE", "/photos/a/b.jpg?versionId=v", ops.DeleteObject(BUCKET, KEY, version="v")),
        ("GET", "/photos?versions", ops.ListObjectVersions(BUCKET)),
        (
            "GET",
            "/photos?versions&prefix=p&delimiter=/&key-marker=k&version-id-marker=v&max-keys=5000"
            "&encoding-type=url",
            ops.ListObjectVersions(BUCKET, "p", "/", "k", "v", 1000, encode_url=True),
        ),
        ("GET", "/photos/a/b.jpg?tagging", ops.GetObjectTagging(BUCKET, KEY)),
        ("GET", "/photos/a/b.jpg?tagging&versionId=v", ops.GetObjectTagging(BUCKET, KEY, "v")),
        ("PUT", "/photos/a/b.jpg?tagging", ops.PutObjectTagging(BUCKET, KEY, BodyDigests())),
        ("DELETE", "/photos/a/b.jpg?tagging&versionId=v", ops.DeleteObjectTagging(BUCKET, KEY, "v")),
        ("GET", "/photos/a/b.jpg?uploadId=u", ops.ListParts(BUCKET, KEY, "u")),
        ("DELETE", "/photos/a/b.jpg?uploadId=u", ops.AbortMultipartUpload(BUCKET, KEY, "u")),
        (
            "PUT",
            "/photos/a/b.jpg?partNumber=1&uploadId=u",
            ops.UploadPart(BUCKET, KEY, "u", 1, BodyDigests()),
        ),
    ],
)
def test_operations(method: str, target: str, operation: ops.Operation) -> None:
    assert parse(method, target) == operation


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("PUT", "/photos?policyStatus", "MethodNotAllowed"),
        ("DELETE", "/photos?acl", "MethodNotAllowed"),
        ("DELETE", "/photos/k?acl", "MethodNotAllowed"),
        ("GET", "/photos?versions&version-id-marker=v", "InvalidArgument"),
        ("GET", "/photos?versions&key-marker=k&version-id-marker=", "InvalidArgument"),
        ("GET", "/photos?versions&key-marker=k&version-id-marker", "InvalidArgument"),
        ("GET", "/photos?versions&version-id-marker=", "InvalidArgument"),
        ("GET", "/photos?versions&key-marker=k&version-id-marker=%C3%A9", "InvalidArgument"),
        ("PUT", "/photos?versions", "MethodNotAllowed"),
        ("PUT", "/photos?website", "NotImplemented"),
        ("PUT", "/photos?encryption", "NotImplemented"),
        ("DELETE", "/photos?notification", "NotImplemented"),
        ("DELETE", "/photos?versioning", "MethodNotAllowed"),
        ("HEAD", "/photos?versioning", "MethodNotAllowed"),
        ("GET", "/photos?versioning&website", "InvalidArgument"),
        ("GET", "/photos?versioning&uploads", "InvalidArgument"),
        ("PUT", "/photos?tomorrow", "NotImplemented"),
        ("PUT", "/photos?tomorrow=1", "NotImplemented"),
        ("GET", "/photos?tomorrow", "NotImplemented"),
        ("GET", "/photos/k?attributes", "InvalidArgument"),
        ("PUT", "/photos/k?versionId=null", "InvalidArgument"),
        ("POST", "/photos/k?restore", "NotImplemented"),
        ("POST", "/photos/k?select&select-type=2", "NotImplemented"),
        ("PUT", "/photos?location", "MethodNotAllowed"),
        ("DELETE", "/photos?uploads", "MethodNotAllowed"),
        ("DELETE", "/photos?delete", "MethodNotAllowed"),
        ("POST", "/photos", "MethodNotAllowed"),
        ("POST", "/photos/k", "MethodNotAllowed"),
        ("PATCH", "/photos/k", "MethodNotAllowed"),
        ("PUT", "/", "MethodNotAllowed"),
        ("PUT", "/photos/k?partNumber=1", "InvalidArgument"),
        ("PUT", "/photos/k?uploadId=u", "InvalidArgument"),
        ("PUT", "/photos/k?uploadId=u&partNumber=0", "InvalidArgument"),
        ("PUT", "/photos/k?uploadId=u&partNumber=10001", "InvalidArgument"),
        ("PUT", "/photos/k?uploadId=u&partNumber=%C2%B2", "InvalidArgument"),
        ("GET", "/photos?max-keys=x", "InvalidArgument"),
        ("GET", "/photos?max-keys=-1", "InvalidArgument"),
        ("GET", "/photos?max-keys=2147483648", "InvalidArgument"),
        ("GET", "/photos?encoding-type=utf", "InvalidArgument"),
        ("GET", "/photos?list-type=3", "InvalidArgument"),
        ("GET", "/photos?prefix=a&prefix=b", "InvalidArgument"),
        ("GET", "/photos?list-type=2&continuation-token=zzz", "InvalidArgument"),
        ("GET", "/photos/k?versionId=", "InvalidArgument"),
        ("DELETE", "/photos/k?versionId=a%0ab", "InvalidArgument"),
        ("GET", "/photos/k?tagging&versionId=" + "v" * 1025, "InvalidArgument"),
        ("GET", "/photos/k?response-content-type=a%0d%0aSet-Cookie:%20x", "InvalidArgument"),
        ("GET", "/photos?prefix=%ff", "InvalidURI"),
        ("GET", "/photos/%zz", "InvalidURI"),
        ("GET", "/photos/%ff", "InvalidURI"),
        ("GET", "/photos/%00", "InvalidURI"),
        ("GET", "photos", "InvalidURI"),
        ("GET", "/Photos/k", "InvalidBucketName"),
        ("GET", "/ab", "InvalidBucketName"),
        ("GET", "/-mesh-/plans/x", "InvalidBucketName"),
        ("GET", "//k", "InvalidBucketName"),
        ("GET", "/192.168.0.1", "InvalidBucketName"),
        ("PUT", "/" + "a" * 64, "InvalidBucketName"),
        ("GET", "/photos/" + "k" * 1025, "KeyTooLongError"),
        ("GET", "/photos/" + "%C3%A9" * 513, "KeyTooLongError"),
        ("GET", "/photos?prefix=" + "k" * 1025, "KeyTooLongError"),
        ("OPTIONS", "/photos/k", "BadRequest"),
    ],
)
def test_refusals(method: str, target: str, code: str) -> None:
    assert refused(method, target).code == code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content_md5": "AAAA"}, "InvalidDigest"),
        ({"x_amz_checksum_crc32": "AAAA"}, "InvalidRequest"),
        ({"x_amz_checksum_crc32": "AAAAAA==", "x_amz_checksum_crc32c": "AAAAAA=="}, "InvalidRequest"),
        ({"x_amz_checksum_sha384": "AAAAAA=="}, "NotImplemented"),
        ({"x_amz_checksum_sha512": "AAAAAA=="}, "InvalidRequest"),
        ({"x_amz_sdk_checksum_algorithm": "ROT13"}, "InvalidRequest"),
        ({"x_amz_sdk_checksum_algorithm": "SHA1", "x_amz_checksum_crc32": "AAAAAA=="}, "InvalidRequest"),
        ({"x_amz_trailer": "x-amz-meta-a"}, "InvalidRequest"),
        ({"x_amz_meta_a": "v" * 2048}, "MetadataTooLarge"),
        ({"x_amz_meta_é": "v"}, "InvalidArgument"),
        ({"x_amz_meta_a": "a\x01b"}, "InvalidArgument"),
        ({"x_amz_storage_class": "CHEAP"}, "InvalidStorageClass"),
        ({"x_amz_tagging": "a=b&a=c"}, "InvalidArgument"),
        ({"x_amz_tagging": "a=%ff"}, "InvalidArgument"),
        ({"x_amz_tagging": "a=%"}, "InvalidArgument"),
        ({"x_amz_tagging": "=b"}, "InvalidTag"),
        ({"x_amz_tagging": "a=!"}, "InvalidTag"),
        ({"x_amz_tagging": "k" * 129 + "=b"}, "InvalidTag"),
        ({"x_amz_tagging": "k=" + "v" * 257}, "InvalidTag"),
        ({"x_amz_tagging": "aws:k=v"}, "InvalidTag"),
        ({"x_amz_tagging": "&".join(f"k{i}=v" for i in range(11))}, "BadRequest"),
        ({"x_amz_copy_source": "photos/k", "x_amz_tagging_directive": "MERGE"}, "InvalidArgument"),
        ({"x_amz_acl": "aws-exec-read"}, "NotImplemented"),
        ({"x_amz_acl": "public"}, "InvalidArgument"),
        ({"x_amz_acl": "private", "x_amz_grant_read": 'id="ann"'}, "InvalidRequest"),
        ({"x_amz_grant_read": "ann"}, "InvalidArgument"),
        ({"x_amz_grant_read": 'uri="http://example.org/all"'}, "InvalidArgument"),
        ({"x_amz_server_side_encryption": "AES256"}, "NotImplemented"),
        ({"x_amz_copy_source": "nokey"}, "InvalidArgument"),
        ({"x_amz_copy_source": "/photos/%ff"}, "InvalidArgument"),
        ({"x_amz_copy_source": "/Photos/k"}, "InvalidBucketName"),
        ({"x_amz_copy_source": "photos/k?versionId="}, "InvalidArgument"),
        ({"x_amz_copy_source": "photos/k?versionId=%zz"}, "InvalidArgument"),
        ({"x_amz_copy_source": "photos/k", "x_amz_metadata_directive": "MERGE"}, "InvalidArgument"),
    ],
)
def test_refused_headers(headers: dict[str, str], code: str) -> None:
    assert refused("PUT", "/photos/k", **headers).code == code


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("gzip,aws-chunked", "gzip"),
        ("deflate, gzip", "deflate, gzip"),
        ("aws-chunked, gzip", "gzip"),
        ("aws-chunked", None),
        ("AWS-Chunked, br ,gzip", "br ,gzip"),
        ("deflate, gzip,aws-chunked", "deflate, gzip"),
        ("gzip", "gzip"),
    ],
)
def test_aws_chunked_is_no_content_encoding(given: str, stored: str | None) -> None:
    assert parse("PUT", "/photos/k", content_encoding=given).headers.system.get("content-encoding") == stored


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("", ""),
        ("=?UTF-8?B?w6k=?=", "=?UTF-8?B?w6k=?="),
        ("é", "é"),
        ("\udcc3\udca9", "é"),
        ("caf\udce9", "café"),
        (" a  b ", "a  b"),
    ],
)
def test_metadata_values(sent: str, kept: str) -> None:
    """Latin-1 and UTF-8, decoded by the server or not, come out as text."""
    assert parse("PUT", "/photos/k", x_amz_meta_name=sent).headers.metadata == {"name": kept}


def test_metadata_of_two_kilobytes_is_fine() -> None:
    assert len(parse("PUT", "/photos/k", x_amz_meta_a="v" * 2047).headers.metadata["a"]) == 2047


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("photos/a+b%2Bc", ops.CopySource(BUCKET, "a b+c")),
        ("/photos/a%20b", ops.CopySource(BUCKET, "a b")),
        ("/photos//x?versionId=null", ops.CopySource(BUCKET, "/x", "null")),
        ("photos/x?versionId=a%2Bb", ops.CopySource(BUCKET, "x", "a+b")),
        ("photos/%D0%BA%3FversionId%3D1", ops.CopySource(BUCKET, "к?versionId=1")),
        ("photos/100%", ops.CopySource(BUCKET, "100%")),
        ("photos/\udcd0\udcba", ops.CopySource(BUCKET, "к")),
    ],
)
def test_copy_sources(header: str, source: ops.CopySource) -> None:
    assert parse("PUT", "/photos/k", x_amz_copy_source=header).source == source


@pytest.mark.parametrize("text", ["bytes=5-", "bytes=-5", "5-9", "bytes=9-5", "bytes=0-1,3-4", "bytes=a-b"])
def test_bad_copy_ranges(text: str) -> None:
    target = "/photos/k?uploadId=u&partNumber=1"
    error = refused("PUT", target, x_amz_copy_source="photos/s", x_amz_copy_source_range=text)
    assert error.code == "InvalidArgument"


def test_conditions() -> None:
    operation = parse(
        "GET",
        "/photos/k",
        if_match='"a", W/"b",c',
        if_none_match="*",
        if_modified_since="Fri, 24 May 2013 00:00:00 GMT",
        if_unmodified_since="nonsense",
        range="bytes=1-",
    )
    assert operation.conditions == Conditions(("a", "b", "c"), ("*",), 1369353600, None)
    assert operation.range == RangeSpec(1, None)


def test_range_and_part_number_exclude_each_other() -> None:
    assert refused("GET", "/photos/k?partNumber=1", range="bytes=0-1").code == "InvalidRequest"


def test_continuation_goes_before_start_after() -> None:
    token = listings.write_continuation_token("m/é")
    operation = parse("GET", f"/photos?list-type=2&start-after=a&continuation-token={token}")
    assert (operation.after, operation.start_after, operation.continuation_token) == ("m/é", "a", token)


def test_preflights() -> None:
    """The query, which may be a presigned one, plays no part."""
    asked = {"access_control_request_method": "PUT", "access_control_request_headers": "X-Amz-Date, a"}
    operation = parse("OPTIONS", "/photos/k?X-Amz-Signature=1&acl", origin="http://a", **asked)
    assert operation == ops.Preflight("photos", "k", "http://a", "PUT", ("x-amz-date", "a"))
    assert refused("OPTIONS", "/photos/k", origin="http://a").code == "BadRequest"
    asked = {"access_control_request_method": "PATCH"}
    assert refused("OPTIONS", "/photos/k", origin="http://a", **asked).code == "BadRequest"


def test_upload_creation() -> None:
    made = parse(
        "POST", "/photos/k?uploads", x_amz_checksum_algorithm="CRC32C", x_amz_checksum_type="COMPOSITE"
    )
    assert (made.checksum_algorithm, made.checksum_type) == ("crc32c", "COMPOSITE")
    for headers in (
        {"x_amz_checksum_type": "COMPOSITE"},
        {"x_amz_checksum_type": "FULL_OBJECT", "x_amz_checksum_algorithm": "SHA256"},
        {"x_amz_checksum_type": "COMPOSITE", "x_amz_checksum_algorithm": "CRC64NVME"},
        {"x_amz_checksum_algorithm": "MD4"},
        {"x_amz_checksum_type": "FULL_OBJECT", "x_amz_checksum_algorithm": "XXHASH3"},
    ):
        assert refused("POST", "/photos/k?uploads", **headers).code == "InvalidRequest"


def test_completion_carries_what_is_expected_of_the_object() -> None:
    done = parse("POST", "/photos/k?uploadId=u", x_amz_checksum_crc32="AAAAAA==-3", x_amz_mp_object_size="9")
    assert (done.digests.checksums, done.object_size) == ({"crc32": "AAAAAA==-3"}, 9)


def test_tags_in_headers() -> None:
    tags = "a=1&b=&c+d=%C3%A9%20%2B&e"
    expected = {"a": "1", "b": "", "c d": "é +", "e": ""}
    assert parse("PUT", "/photos/k", x_amz_tagging=tags).tags == expected
    assert parse("POST", "/photos/k?uploads", x_amz_tagging=tags).tags == expected
    copied = parse("PUT", "/photos/k", x_amz_copy_source="photos/s", x_amz_tagging=tags)
    assert copied.tags is None
    replaced = parse(
        "PUT",
        "/photos/k",
        x_amz_copy_source="photos/s",
        x_amz_tagging=tags,
        x_amz_tagging_directive="REPLACE",
    )
    assert replaced.tags == expected


def test_attributes_asked_for() -> None:
    asked = parse(
        "GET",
        "/photos/k?attributes&versionId=v",
        x_amz_object_attributes="ETag, ObjectParts,Checksum",
        x_amz_max_parts="2000",
        x_amz_part_number_marker="3",
    )
    names = frozenset({"ETag", "ObjectParts", "Checksum"})
    assert asked == ops.GetObjectAttributes(BUCKET, "k", names, "v", 1000, 3)
    for headers in (
        {"x_amz_object_attributes": "ETag,Colour"},
        {"x_amz_object_attributes": ""},
        {"x_amz_object_attributes": "ETag", "x_amz_max_parts": "x"},
        {"x_amz_object_attributes": "ETag", "x_amz_part_number_marker": "-1"},
    ):
        assert refused("GET", "/photos/k?attributes", **headers).code == "InvalidArgument"
