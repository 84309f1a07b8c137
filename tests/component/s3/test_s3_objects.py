"""Objects through boto3: stored, read, described, copied, deleted."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from tests.support.s3_raw import Wire

SIZES = [0, 1, 10_240, 128 << 10, (128 << 10) + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 9_000_000]
KEYS = [
    "plain",
    "dir/sub/leaf",
    "spaces and  two",
    "plus+sign",
    "a//b",
    "/leading",
    "trailing/",
    "//",
    "..",
    "../up",
    "a/../b",
    "./.",
    "ünïcodé/日本語/😀",
    "q?u=e&r#y",
    "percent%20literal%zz%",
    "quote'\"<>&;:@=,$!*()~`^|\\[]{}",
    "tab\tand\nnewline",
    "e\u0301 not \u00e9",
    "x" * 1024,
    "é" * 512,
    "-/looks-native",
    "metrics",
]


def code_of(excinfo: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = excinfo.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def base64_of(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@pytest.mark.parametrize("size", SIZES)
def test_bytes_come_back(s3: Any, bucket: str, size: int) -> None:
    data = os.urandom(size)
    stored = s3.put_object(Bucket=bucket, Key="k", Body=data)
    assert stored["ETag"] == f'"{hashlib.md5(data).hexdigest()}"'
    got = s3.get_object(Bucket=bucket, Key="k")
    assert got["Body"].read() == data
    assert got["ContentLength"] == size
    assert got["ETag"] == stored["ETag"]


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_any_key(s3: Any, bucket: str, key: str) -> None:
    body = key.encode()
    s3.put_object(Bucket=bucket, Key=key, Body=body)
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == body
    assert [o["Key"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"]] == [key]
    s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key})
    assert s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == body
    deleted = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]})
    assert [d["Key"] for d in deleted["Deleted"]] == [key]
    with pytest.raises(ClientError) as excinfo:
        s3.head_object(Bucket=bucket, Key=key)
    assert code_of(excinfo) == (404, "404")


def test_key_of_1025_bytes_is_refused(s3: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="x" * 1025, Body=b"")
    assert code_of(excinfo) == (400, "KeyTooLongError")


def test_headers_and_metadata_come_back_as_given(s3: Any, bucket: str) -> None:
    given = {
        "ContentType": "image/jpeg",
        "CacheControl": "max-age=60",
        "ContentDisposition": 'attachment; filename="x.jpg"',
        "ContentEncoding": "gzip",
        "ContentLanguage": "de",
        "Metadata": {"colour": "rot", "empty": "", "mixedcase": "Value  With  Spaces"},
    }
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Expires=expires, **given)
    head = s3.head_object(Bucket=bucket, Key="k")
    assert {name: head[name] for name in given} == given
    assert head["ExpiresString"] == "Wed, 02 Jan 2030 03:04:05 GMT"
    overridden = s3.get_object(
        Bucket=bucket, Key="k", ResponseContentType="text/plain", ResponseCacheControl="no-store"
    )
    assert (overridden["ContentType"], overridden["CacheControl"]) == ("text/plain", "no-store")


def test_response_override_cannot_split_the_response(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    with pytest.raises(ClientError) as excinfo:
        s3.get_object(Bucket=bucket, Key="k", ResponseContentType="text/plain\r\nx-evil: 1")
    assert code_of(excinfo) == (400, "InvalidArgument")
    assert "x-evil" not in excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]


def test_a_missing_object(s3: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        s3.get_object(Bucket=bucket, Key="none")
    assert code_of(excinfo) == (404, "NoSuchKey")
    assert excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]["x-amz-request-id"]
    assert excinfo.value.response["Error"]["Key"] == "none"
    s3.delete_object(Bucket=bucket, Key="none")


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        ("bytes=999990-", 999_990, 999_999),
        ("bytes=-5", 999_995, 999_999),
        ("bytes=-2000000", 0, 999_999),
        ("bytes=5-2000000", 5, 999_999),
        ("bytes=1000-900000", 1000, 900_000),
        (f"bytes=0-{'9' * 26}", 0, 999_999),
        (f"bytes=7-{2**63}", 7, 999_999),
        (f"bytes={'0' * 30}7-9", 7, 9),
        (f"bytes=-{'9' * 400}", 0, 999_999),
        (f"bytes=-{'9' * 5000}", 0, 999_999),
    ],
)
def test_ranges(s3: Any, bucket: str, asked: str, first: int, last: int) -> None:
    data = os.urandom(1_000_000)
    s3.put_object(Bucket=bucket, Key="k", Body=data)
    got = s3.get_object(Bucket=bucket, Key="k", Range=asked)
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert got["ContentRange"] == f"bytes {first}-{last}/1000000"
    assert got["Body"].read() == data[first : last + 1]


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=5-2",
        "bytes=a-b",
        "lines=0-1",
        "bytes=0-1,4-5",
        "bytes",
        "bytes= -1",
        "bytes=0 -1",
        "bytes=0- 1",
    ],
)
def test_malformed_ranges_are_ignored(s3: Any, bucket: str, asked: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    got = s3.get_object(Bucket=bucket, Key="k", Range=asked)
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert got["Body"].read() == b"0123456789"


@pytest.mark.parametrize(
    ("size", "asked"),
    [
        (10, "bytes=10-"),
        (5, "bytes=5-9"),
        (10, "bytes=-0"),
        (0, "bytes=0-"),
        (0, "bytes=0-0"),
        (0, "bytes=-0"),
        (5, f"bytes={2**63 - 1}-"),
    ],
)
def test_unsatisfiable_ranges_tell_the_size(s3: Any, bucket: str, size: int, asked: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=bytes(size))
    with pytest.raises(ClientError) as excinfo:
        s3.get_object(Bucket=bucket, Key="k", Range=asked)
    assert code_of(excinfo) == (416, "InvalidRange")
    headers = excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]
    assert headers["content-range"] == f"bytes */{size}"
    assert excinfo.value.response["Error"]["RangeRequested"] == asked


@pytest.mark.parametrize("asked", ["bytes=-1", f"bytes=-{'9' * 30}"])
def test_the_last_bytes_of_an_empty_object_are_all_of_it(s3: Any, bucket: str, asked: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"")
    for read in (s3.get_object, s3.head_object):
        got = read(Bucket=bucket, Key="k", Range=asked)
        assert (got["ResponseMetadata"]["HTTPStatusCode"], got["ContentLength"]) == (200, 0)
        assert "ContentRange" not in got


def test_conditional_reads(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"x")["ETag"]
    modified = s3.head_object(Bucket=bucket, Key="k")["LastModified"]
    hour = timedelta(hours=1)
    for conditions in (
        {"IfMatch": etag},
        {"IfMatch": "*"},
        {"IfNoneMatch": '"other"'},
        {"IfModifiedSince": modified - hour},
        {"IfUnmodifiedSince": modified},
        {"IfMatch": etag, "IfUnmodifiedSince": modified - hour},
    ):
        assert s3.get_object(Bucket=bucket, Key="k", **conditions)["Body"].read() == b"x"
    for conditions, expected in (
        ({"IfMatch": '"other"'}, (412, "PreconditionFailed")),
        ({"IfUnmodifiedSince": modified - hour}, (412, "PreconditionFailed")),
        ({"IfNoneMatch": etag}, (304, "304")),
        ({"IfNoneMatch": "*"}, (304, "304")),
        ({"IfModifiedSince": modified}, (304, "304")),
    ):
        with pytest.raises(ClientError) as excinfo:
            s3.get_object(Bucket=bucket, Key="k", **conditions)
        assert code_of(excinfo) == expected, conditions
        if expected[0] == 304:
            assert excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]["etag"] == etag


def test_conditional_writes(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*")
    assert code_of(excinfo) == (412, "PreconditionFailed")
    s3.put_object(Bucket=bucket, Key="k", Body=b"3", IfMatch=etag)
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="k", Body=b"4", IfMatch=etag)
    assert code_of(excinfo) == (412, "PreconditionFailed")
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="none", Body=b"4", IfMatch=etag)
    assert code_of(excinfo) == (404, "NoSuchKey")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"3"


CHECKSUMS = {
    "CRC32": lambda data: base64_of(zlib.crc32(data).to_bytes(4, "big")),
    "SHA1": lambda data: base64_of(hashlib.sha1(data).digest()),
    "SHA256": lambda data: base64_of(hashlib.sha256(data).digest()),
}


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
@pytest.mark.parametrize("size", [0, 100, 700_000])
def test_checksums_are_verified_kept_and_told(s3: Any, bucket: str, algorithm: str, size: int) -> None:
    data = os.urandom(size)
    name = f"Checksum{algorithm}"
    stored = s3.put_object(Bucket=bucket, Key="k", Body=data, ChecksumAlgorithm=algorithm)
    if algorithm in CHECKSUMS:
        assert stored[name] == CHECKSUMS[algorithm](data)
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert head[name] == stored[name]
    assert head["ChecksumType"] == "FULL_OBJECT"
    assert name not in s3.head_object(Bucket=bucket, Key="k")
    if size:
        part = s3.get_object(Bucket=bucket, Key="k", Range="bytes=0-9", ChecksumMode="ENABLED")
        assert name not in part


def test_a_wrong_checksum_is_refused_and_nothing_kept(s3: Any, bucket: str) -> None:
    wrong = CHECKSUMS["SHA256"](b"other")
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="k", Body=b"data", ChecksumSHA256=wrong)
    assert code_of(excinfo) == (400, "BadDigest")
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="k", Body=b"data", ContentMD5=base64_of(hashlib.md5(b"o").digest()))
    assert code_of(excinfo) == (400, "BadDigest")
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=bucket, Key="k", Body=b"data", ContentMD5="nonsense")
    assert code_of(excinfo) == (400, "InvalidDigest")
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_copies(s3: Any, bucket: str) -> None:
    data = os.urandom(2_000_000)
    source = {"Bucket": bucket, "Key": "a b+c"}
    etag = s3.put_object(Body=data, Metadata={"m": "1"}, ContentType="text/x", **source)["ETag"]
    s3.copy_object(Bucket=bucket, Key="kept", CopySource=source)
    kept = s3.get_object(Bucket=bucket, Key="kept")
    assert (kept["Body"].read(), kept["Metadata"], kept["ContentType"]) == (data, {"m": "1"}, "text/x")
    assert kept["ETag"] == etag
    s3.copy_object(
        Bucket=bucket, Key="new", CopySource=source, MetadataDirective="REPLACE", Metadata={"n": "2"}
    )
    new = s3.get_object(Bucket=bucket, Key="new")
    assert (new["Body"].read(), new["Metadata"], new["ContentType"]) == (
        data,
        {"n": "2"},
        "binary/octet-stream",
    )
    s3.delete_object(**source)
    assert s3.get_object(Bucket=bucket, Key="kept")["Body"].read() == data


def test_copy_onto_itself(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"m": "1"})
    source = {"Bucket": bucket, "Key": "k"}
    with pytest.raises(ClientError) as excinfo:
        s3.copy_object(Bucket=bucket, Key="k", CopySource=source)
    assert code_of(excinfo) == (400, "InvalidRequest")
    s3.copy_object(
        Bucket=bucket, Key="k", CopySource=source, MetadataDirective="REPLACE", Metadata={"m": "2"}
    )
    got = s3.get_object(Bucket=bucket, Key="k")
    assert (got["Body"].read(), got["Metadata"]) == (b"x", {"m": "2"})


def test_copy_conditions_and_missing_sources(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"x")["ETag"]
    source = {"Bucket": bucket, "Key": "k"}
    s3.copy_object(Bucket=bucket, Key="c", CopySource=source, CopySourceIfMatch=etag)
    for conditions in ({"CopySourceIfMatch": '"other"'}, {"CopySourceIfNoneMatch": etag}):
        with pytest.raises(ClientError) as excinfo:
            s3.copy_object(Bucket=bucket, Key="c", CopySource=source, **conditions)
        assert code_of(excinfo) == (412, "PreconditionFailed")
    with pytest.raises(ClientError) as excinfo:
        s3.copy_object(Bucket=bucket, Key="c", CopySource={"Bucket": bucket, "Key": "none"})
    assert code_of(excinfo) == (404, "NoSuchKey")
    with pytest.raises(ClientError) as excinfo:
        s3.copy_object(Bucket=bucket, Key="c", CopySource={"Bucket": "no-such-bucket-x", "Key": "k"})
    assert code_of(excinfo) == (404, "NoSuchBucket")


def test_copy_with_another_checksum(s3: Any, bucket: str) -> None:
    data = os.urandom(1_500_000)
    s3.put_object(Bucket=bucket, Key="k", Body=data)
    s3.copy_object(
        Bucket=bucket, Key="c", CopySource={"Bucket": bucket, "Key": "k"}, ChecksumAlgorithm="SHA256"
    )
    head = s3.head_object(Bucket=bucket, Key="c", ChecksumMode="ENABLED")
    assert head["ChecksumSHA256"] == CHECKSUMS["SHA256"](data)


def test_delete_many(s3: Any, bucket: str) -> None:
    keys = [f"k{i:04}&é+" for i in range(1000)]
    for key in keys[:20]:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    objects = [{"Key": key} for key in keys]
    assert len(s3.delete_objects(Bucket=bucket, Delete={"Objects": objects})["Deleted"]) == 1000
    quiet = s3.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
    assert "Deleted" not in quiet
    with pytest.raises(ClientError) as excinfo:
        s3.delete_objects(Bucket=bucket, Delete={"Objects": [*objects, {"Key": "more"}]})
    assert code_of(excinfo) == (400, "MalformedXML")
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_delete_many_on_condition(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="a", Body=b"x")["ETag"]
    s3.put_object(Bucket=bucket, Key="b", Body=b"y")
    answer = s3.delete_objects(
        Bucket=bucket, Delete={"Objects": [{"Key": "a", "ETag": etag}, {"Key": "b", "ETag": etag}]}
    )
    assert [d["Key"] for d in answer["Deleted"]] == ["a"]
    assert [(e["Key"], e["Code"]) for e in answer["Errors"]] == [("b", "PreconditionFailed")]


def test_overwriting_swaps_the_whole(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"old", Metadata={"m": "1"})
    s3.put_object(Bucket=bucket, Key="k", Body=b"new data")
    got = s3.get_object(Bucket=bucket, Key="k")
    assert (got["Body"].read(), got["Metadata"]) == (b"new data", {})


def test_a_range_of_another_content_is_the_whole(s3: Any, bucket: str, wire: Wire) -> None:
    """If-Range: browsers and `wget -c` go on with what they have only if it is of the same content."""
    for size in (1000, 300_000):
        data = os.urandom(size)
        etag = s3.put_object(Bucket=bucket, Key="k", Body=data)["ETag"]
        modified = s3.head_object(Bucket=bucket, Key="k")["ResponseMetadata"]["HTTPHeaders"]["last-modified"]
        target = f"/{bucket}/k"
        for same in (etag, etag.strip('"'), modified):
            answer = wire.call("GET", target, headers={"range": "bytes=10-19", "if-range": same})
            assert (answer.status, answer.body) == (206, data[10:20])
        for other in ('"x"', f"W/{etag}", "Wed, 21 Oct 2015 07:28:00 GMT", "", "nonsense"):
            for asked in ("bytes=10-19", "bytes=9999999-", "bytes=-5"):
                answer = wire.call("GET", target, headers={"range": asked, "if-range": other})
                assert (answer.status, answer.body) == (200, data), (other, asked)
        assert wire.call("GET", target, headers={"if-range": '"x"'}).body == data
        ranged = wire.call("HEAD", target, headers={"range": "bytes=10-19", "if-range": etag})
        assert (ranged.status, ranged.headers["content-length"]) == (206, "10")


def test_an_if_match_without_a_tag_fits_nothing(s3: Any, bucket: str) -> None:
    """What boto3 sends of a program that lost the ETag it wants to see: no overwrite of what is there."""
    k = {"Bucket": bucket, "Key": "k"}
    s3.put_object(**k, Body=b"theirs")
    source = {"CopySource": f"{bucket}/k", "Bucket": bucket, "Key": "copied"}
    for call, how in (
        (s3.put_object, {**k, "Body": b"ours", "IfMatch": ""}),
        (s3.delete_object, {**k, "IfMatch": ""}),
        (s3.get_object, {**k, "IfMatch": ""}),
        (s3.copy_object, {**source, "CopySourceIfMatch": ""}),
    ):
        with pytest.raises(ClientError, match="PreconditionFailed"):
            call(**how)
    assert s3.get_object(**k)["Body"].read() == b"theirs"


@pytest.mark.parametrize("size", [5, 300_000])
def test_the_rest_of_an_upload_does_not_replace_the_object(
    s3: Any, bucket: str, wire: Wire, size: int
) -> None:
    """As `curl -C 5 -T` sends it to resume: `Content-Range`, and the bytes from there on."""
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    asked = {"content-range": f"bytes 5-{size + 4}/{size + 5}"}
    answer = wire.exchange(wire.put(f"/{bucket}/k", bytes(size), headers=asked))
    assert (answer.status, answer.code) == (501, "NotImplemented")
    assert b"Send the whole object" in answer.body
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"0123456789"


@pytest.mark.parametrize("location", ["x", "ftp://a/b", "//", "/b", "http://a/b", "https://a/b"])
def test_where_a_page_may_redirect_to(s3: Any, bucket: str, location: str) -> None:
    s3.put_object(Bucket=bucket, Key="source", Body=b"x")
    k = {"Bucket": bucket, "Key": "k", "WebsiteRedirectLocation": location}
    source = {"CopySource": f"{bucket}/source"}
    for call, how in (
        (s3.put_object, {**k, "Body": b"x"}),
        (s3.copy_object, {**k, **source}),
        (s3.copy_object, {**k, **source, "MetadataDirective": "REPLACE"}),
        (s3.create_multipart_upload, k),
    ):
        if location[0] == "/" or location.startswith("http"):
            call(**how)
            continue
        with pytest.raises(ClientError) as excinfo:
            call(**how)
        assert code_of(excinfo) == (400, "InvalidRedirectLocation")
