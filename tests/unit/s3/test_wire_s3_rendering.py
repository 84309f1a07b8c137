"""Responses, text by text."""

from __future__ import annotations

from typing import Any

import pytest

from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import RangeSpec
from meshwire.s3 import listings
from meshwire.s3 import operations as ops
from meshwire.s3 import result_types as res
from meshwire.s3.responses import (
    not_modified_error,
    object_response_headers,
    render,
    render_error,
    resolve_object_range,
)

HEADER = '<?xml version="1.0" encoding="UTF-8"?>\n'
NS = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
MD5 = "d41d8cd98f00b204e9800998ecf8427e"
INFO = res.ObjectHead(
    10,
    MD5,
    1_369_353_600_123,
    {"content-type": "image/jpeg", "cache-control": "no-cache"},
    {"a": "", "b": "é"},
    {"crc32": "AAAAAA=="},
    "FULL_OBJECT",
)


def body_of(op: Any, result: Any) -> str:
    rendered = render(op, result, "req-1")
    headers = dict(rendered.headers)
    assert headers["x-amz-request-id"] == "req-1"
    assert headers["content-length"] == str(len(rendered.body))
    assert headers["content-type"] == "application/xml"
    return rendered.body.decode()


def test_list_v2() -> None:
    op = ops.ListObjects("photos", 2, "a&", "/", 3, "a", start_after="a")
    owner = res.Owner("id", "name")
    page = res.ObjectListing(
        (
            res.ObjectEntry(
                "a&\r<", 1, MD5, 0, owner, checksum_algorithm="crc32", checksum_type="FULL_OBJECT"
            ),
        ),
        ("a&b/",),
        True,
        "a&b/",
    )
    assert body_of(op, page) == (
        f"{HEADER}<ListBucketResult{NS}><Name>photos</Name><Prefix>a&amp;</Prefix>"
        f"<NextContinuationToken>{listings.write_continuation_token('a&b/')}</NextContinuationToken><StartAfter>a</StartAfter>"
        "<KeyCount>2</KeyCount><Delimiter>/</Delimiter><MaxKeys>3</MaxKeys><IsTruncated>true</IsTruncated>"
        "<Contents><Key>a&amp;&#13;&lt;</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{MD5}&quot;</ETag><ChecksumAlgorithm>CRC32</ChecksumAlgorithm>"
        "<ChecksumType>FULL_OBJECT</ChecksumType><Size>1</Size><StorageClass>STANDARD</StorageClass></Contents>"
        "<CommonPrefixes><Prefix>a&amp;b/</Prefix></CommonPrefixes></ListBucketResult>"
    )


def test_list_v1_has_owners_and_a_next_marker_only_with_delimiter() -> None:
    page = res.ObjectListing((res.ObjectEntry("a b/ü", 1, MD5, 0, res.Owner("id", "n")),), (), True, "a b/ü")
    plain = body_of(ops.ListObjects("photos", 1, encode_url=True), page)
    assert "<Key>a%20b/%C3%BC</Key>" in plain
    assert "<Owner><ID>id</ID><DisplayName>n</DisplayName></Owner>" in plain
    assert "NextMarker" not in plain
    delimited = body_of(ops.ListObjects("photos", 1, delimiter="/", encode_url=True), page)
    assert "<NextMarker>a%20b/%C3%BC</NextMarker>" in delimited
    assert "<EncodingType>url</EncodingType>" in delimited


def test_keys_xml_cannot_carry_become_references_and_leave_the_others_alone() -> None:
    page = res.ObjectListing(
        (res.ObjectEntry("a\x01b\ufffe", 1, MD5, 0), res.ObjectEntry("c&d ü", 1, MD5, 0))
    )
    text = body_of(ops.ListObjects("photos", 2), page)
    assert "<Key>a&#x1;b&#xfffe;</Key>" in text
    assert "<Key>c&amp;d ü</Key>" in text
    assert "EncodingType" not in text
    asked = body_of(ops.ListObjects("photos", 2, encode_url=True), page)
    assert "<Key>a%01b%EF%BF%BE</Key>" in asked
    assert "<EncodingType>url</EncodingType>" in asked


def test_documents() -> None:
    assert body_of(ops.GetBucketLocation("b"), res.BucketLocation("us-east-1")).endswith(
        f"{NS}></LocationConstraint>"
    )
    assert ">eu-west-1</" in body_of(ops.GetBucketLocation("b"), res.BucketLocation("eu-west-1"))
    upload = ops.CreateMultipartUpload("b", "k", ops.ObjectHeaders())
    made = render(upload, res.UploadCreated("b", "k", "u", "crc32", "COMPOSITE"), "r")
    assert ("x-amz-checksum-algorithm", "CRC32") in made.headers
    parts = res.PartList(
        (res.PartEntry(2, 5, MD5, 0, {"sha1": "x="}),), True, res.Owner("o"), "sha1", "COMPOSITE"
    )
    text = body_of(ops.ListParts("b", "k", "u", 1, 1), parts)
    assert "<NextPartNumberMarker>2</NextPartNumberMarker>" in text
    assert "<ChecksumSHA1>x=</ChecksumSHA1>" in text
    uploads = res.UploadListing((res.UploadEntry("k", "u", 0),), ("p/",), True, "k", "u")
    text = body_of(ops.ListMultipartUploads("b"), uploads)
    assert "<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>" in text
    buckets = res.BucketListing(res.Owner("o"), (res.BucketEntry("b", 0, "r"),))
    assert "<Bucket><Name>b</Name>" in body_of(ops.ListBuckets(), buckets)


def test_answers_without_a_body() -> None:
    stored = render(
        ops.PutObject("b", "k", ops.ObjectHeaders(), BodyDigests()),
        res.ObjectStored(MD5, {"sha1": "x"}),
        "r",
    )
    assert dict(stored.headers) == {
        "etag": f'"{MD5}"',
        "x-amz-checksum-sha1": "x",
        "x-amz-checksum-type": "FULL_OBJECT",
        "x-amz-request-id": "r",
        "content-length": "0",
    }
    deleted = render(ops.DeleteObject("b", "k"), res.ObjectDeleted(), "r")
    assert (deleted.status, dict(deleted.headers)) == (204, {"x-amz-request-id": "r"})
    created = render(ops.CreateBucket("b"), res.BucketCreated("b"), "r")
    assert ("location", "/b") in created.headers


def test_object_headers() -> None:
    assert object_response_headers(INFO, checksum_mode=True) == [
        ("content-length", "10"),
        ("etag", f'"{MD5}"'),
        ("last-modified", "Fri, 24 May 2013 00:00:00 GMT"),
        ("accept-ranges", "bytes"),
        ("content-type", "image/jpeg"),
        ("cache-control", "no-cache"),
        ("x-amz-meta-a", ""),
        ("x-amz-meta-b", "é"),
        ("x-amz-checksum-crc32", "AAAAAA=="),
        ("x-amz-checksum-type", "FULL_OBJECT"),
    ]
    assert not any("checksum" in name for name, _ in object_response_headers(INFO))


def test_partial_answers_have_a_range_and_no_checksum() -> None:
    for window in ((2, 3), (0, 10)):
        headers = dict(object_response_headers(INFO, window=window, checksum_mode=True))
        assert headers["content-range"] == f"bytes {window[0]}-{window[0] + window[1] - 1}/10"
        assert headers["content-length"] == str(window[1])
        assert "x-amz-checksum-crc32" not in headers


def test_overrides_replace_and_defaults_fill() -> None:
    headers = object_response_headers(INFO, overrides={"content-type": "text/x", "expires": "0"})
    assert [value for name, value in headers if name == "content-type"] == ["text/x"]
    assert ("expires", "0") in headers
    assert ("content-type", "binary/octet-stream") in object_response_headers(res.ObjectHead(0, MD5, 0))


def test_head_of_a_range() -> None:
    answer = render(ops.GetObject("b", "k", head=True, range=RangeSpec(None, 4)), INFO, "r")
    assert answer.status == 206
    assert ("content-range", "bytes 6-9/10") in answer.headers
    assert answer.body == b""


def test_unsatisfiable_ranges_tell_the_size() -> None:
    with pytest.raises(S3Error) as caught:
        resolve_object_range(ops.GetObject("b", "k", range=RangeSpec(0, None)), 0)
    rendered = render_error(caught.value, "r", "/b/k")
    assert rendered.status == 416
    assert ("content-range", "bytes */0") in rendered.headers


def test_errors() -> None:
    error = S3Error("NoSuchKey", extra={"Key": "a<b\x00"})
    rendered = render_error(error, "req", "/b/a<b")
    assert rendered.status == 404
    assert rendered.body.decode() == (
        f"{HEADER}<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message>"
        "<Key>a&lt;b\ufffd</Key><Resource>/b/a&lt;b</Resource><RequestId>req</RequestId><HostId>req</HostId></Error>"
    )
    assert ("x-amz-request-id", "req") in rendered.headers
    assert render_error(error, "req", head=True).body == b""


def test_not_modified_carries_the_etag() -> None:
    rendered = render_error(not_modified_error(INFO), "req")
    assert (rendered.status, rendered.body) == (304, b"")
    assert ("etag", f'"{MD5}"') in rendered.headers
    assert ("cache-control", "no-cache") in rendered.headers
