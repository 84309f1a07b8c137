"""Multipart uploads through boto3."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from tests.support.daemons import Daemon
    from tests.support.s3_raw import Wire

MIB = 1 << 20
XMLNS = "{http://s3.amazonaws.com/doc/2006-03-01/}"
SOURCE = os.urandom(12 * MIB)


def code_of(excinfo: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = excinfo.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def begin(s3: Any, bucket: str, **options: Any) -> dict[str, Any]:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k", **options)["UploadId"]
    return {"Bucket": bucket, "Key": "k", "UploadId": upload}


def put(s3: Any, upload: dict[str, Any], number: int, data: bytes, **options: Any) -> dict[str, Any]:
    answer = s3.upload_part(PartNumber=number, Body=data, **upload, **options)
    sums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
    return {"PartNumber": number, "ETag": answer["ETag"], **sums}


def complete(s3: Any, upload: dict[str, Any], parts: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = s3.complete_multipart_upload(
        MultipartUpload={"Parts": parts}, **upload, **options
    )
    return answer


def etag_of(parts: list[bytes]) -> str:
    return f'"{hashlib.md5(b"".join(hashlib.md5(p).digest() for p in parts)).hexdigest()}-{len(parts)}"'


def test_an_upload_becomes_an_object(s3: Any, bucket: str) -> None:
    pieces = [SOURCE[: 5 * MIB], SOURCE[5 * MIB : 11 * MIB], SOURCE[11 * MIB :]]
    upload = begin(s3, bucket, Metadata={"m": "1"}, ContentType="text/x")
    parts = [
        put(s3, upload, number, piece)
        for number, piece in zip((3, 1, 7), (pieces[1], pieces[0], pieces[2]), strict=True)
    ]
    parts.sort(key=lambda part: part["PartNumber"])
    answer = complete(s3, upload, parts)
    assert answer["ETag"] == etag_of(pieces)
    got = s3.get_object(Bucket=bucket, Key="k")
    assert got["Body"].read() == SOURCE
    assert (got["ETag"], got["Metadata"], got["ContentType"]) == (answer["ETag"], {"m": "1"}, "text/x")
    across = s3.get_object(Bucket=bucket, Key="k", Range=f"bytes={5 * MIB - 3}-{11 * MIB + 2}")
    assert across["Body"].read() == SOURCE[5 * MIB - 3 : 11 * MIB + 3]
    second = s3.get_object(Bucket=bucket, Key="k", PartNumber=2)
    assert second["Body"].read() == pieces[1]
    assert second["PartsCount"] == 3
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    assert answer["Location"] == f"{s3.meta.endpoint_url}/{bucket}/k"
    again = complete(s3, upload, parts)
    assert (again["ETag"], again["Location"]) == (answer["ETag"], answer["Location"])


def test_a_part_sent_again_replaces_the_first(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket)
    first = put(s3, upload, 1, b"first")
    second = put(s3, upload, 1, b"second")
    with pytest.raises(ClientError) as excinfo:
        complete(s3, upload, [first])
    assert code_of(excinfo) == (400, "InvalidPart")
    complete(s3, upload, [second])
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"second"


def test_refused_completions(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket)
    small, last = put(s3, upload, 1, b"small"), put(s3, upload, 2, b"last")
    for parts, expected in (
        ([small, last], "EntityTooSmall"),
        ([last, small], "InvalidPartOrder"),
        ([small, small], "InvalidPartOrder"),
        ([{"PartNumber": 9, "ETag": small["ETag"]}], "InvalidPart"),
        ([{"PartNumber": 1, "ETag": last["ETag"]}], "InvalidPart"),
        ([], "MalformedXML"),
    ):
        with pytest.raises(ClientError) as excinfo:
            complete(s3, upload, parts)
        assert code_of(excinfo) == (400, expected)
    complete(s3, upload, [last])
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"last"


def test_an_aborted_upload_is_gone(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket)
    part = put(s3, upload, 1, b"x")
    s3.abort_multipart_upload(**upload)
    for call in (
        lambda: put(s3, upload, 2, b"y"),
        lambda: complete(s3, upload, [part]),
        lambda: s3.list_parts(**upload),
        lambda: s3.abort_multipart_upload(**upload),
        lambda: put(s3, {**upload, "UploadId": "made-up"}, 1, b"z"),
    ):
        with pytest.raises(ClientError) as excinfo:
            call()
        assert code_of(excinfo) == (404, "NoSuchUpload")
    with pytest.raises(ClientError) as excinfo:
        s3.head_object(Bucket=bucket, Key="k")
    assert code_of(excinfo) == (404, "404")


@pytest.mark.parametrize("number", [0, 10_001])
def test_part_numbers(s3: Any, bucket: str, number: int) -> None:
    with pytest.raises(ClientError) as excinfo:
        put(s3, begin(s3, bucket), number, b"x")
    assert code_of(excinfo) == (400, "InvalidArgument")


def test_lists_of_parts_and_uploads(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket)
    for number in (5, 2, 9, 1):
        put(s3, upload, number, b"x" * number)
    pages = s3.get_paginator("list_parts").paginate(**upload, PaginationConfig={"PageSize": 3})
    parts = [(p["PartNumber"], p["Size"]) for page in pages for p in page["Parts"]]
    assert parts == [(1, 1), (2, 2), (5, 5), (9, 9)]
    for key in ("a/1", "a/2", "b"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    pages = s3.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, Delimiter="/", PaginationConfig={"PageSize": 1}
    )
    keys, prefixes = [], []
    for page in pages:
        keys += [u["Key"] for u in page.get("Uploads", [])]
        prefixes += [p["Prefix"] for p in page.get("CommonPrefixes", [])]
    assert (keys, prefixes) == (["b", "k"], ["a/"])


def test_parts_copied_from_objects(s3: Any, bucket: str) -> None:
    source = {"Bucket": bucket, "Key": "so ur+ce"}
    s3.put_object(Body=SOURCE, **source)
    upload = begin(s3, bucket)
    parts = []
    for number, span in ((1, f"bytes=0-{6 * MIB - 1}"), (2, f"bytes={6 * MIB}-{len(SOURCE) - 1}")):
        copied = s3.upload_part_copy(PartNumber=number, CopySource=source, CopySourceRange=span, **upload)
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    complete(s3, upload, parts)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == SOURCE
    for span in ("bytes=0-99999999", "bytes=5-", "0-5", "bytes=9-3"):
        with pytest.raises(ClientError) as excinfo:
            s3.upload_part_copy(PartNumber=3, CopySource=source, CopySourceRange=span, **begin(s3, bucket))
        assert code_of(excinfo) == (400, "InvalidArgument"), span


def b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def test_full_object_checksum(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")
    pieces = [SOURCE[: 5 * MIB], SOURCE[5 * MIB :]]
    parts = [put(s3, upload, n, piece, ChecksumAlgorithm="CRC32") for n, piece in enumerate(pieces, 1)]
    whole = b64(zlib.crc32(SOURCE).to_bytes(4, "big"))
    with pytest.raises(ClientError) as excinfo:
        complete(s3, upload, parts, ChecksumCRC32="AAAAAA==", ChecksumType="FULL_OBJECT")
    assert code_of(excinfo) == (400, "BadDigest")
    answer = complete(s3, upload, parts, ChecksumCRC32=whole, ChecksumType="FULL_OBJECT")
    assert (answer["ChecksumCRC32"], answer["ChecksumType"]) == (whole, "FULL_OBJECT")
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head["ChecksumCRC32"], head["ChecksumType"]) == (whole, "FULL_OBJECT")


def test_composite_checksum(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="SHA256")
    pieces = [SOURCE[: 5 * MIB], SOURCE[5 * MIB :]]
    parts = [put(s3, upload, n, piece, ChecksumAlgorithm="SHA256") for n, piece in enumerate(pieces, 1)]
    answer = complete(s3, upload, parts)
    digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert answer["ChecksumSHA256"] == f"{b64(hashlib.sha256(digests).digest())}-2"
    assert answer["ChecksumType"] == "COMPOSITE"


def test_a_bad_part_checksum_is_refused(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="SHA256")
    with pytest.raises(ClientError) as excinfo:
        put(s3, upload, 1, b"x", ChecksumSHA256=b64(hashlib.sha256(b"y").digest()))
    assert code_of(excinfo) == (400, "BadDigest")
    assert "Parts" not in s3.list_parts(**upload)


def test_conditional_completion(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"there")
    upload = begin(s3, bucket)
    part = put(s3, upload, 1, b"new")
    with pytest.raises(ClientError) as excinfo:
        complete(s3, upload, [part], IfNoneMatch="*")
    assert code_of(excinfo) == (412, "PreconditionFailed")
    etag = s3.head_object(Bucket=bucket, Key="k")["ETag"]
    complete(s3, upload, [part], IfMatch=etag)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"new"


def test_pages_of_uploads_of_one_key(s3: Any, bucket: str) -> None:
    """Uploads of a key come in the order they began; markers name one of them, or the key alone."""
    begun = [s3.create_multipart_upload(Bucket=bucket, Key="b é+")["UploadId"] for _ in range(5)]
    for key in ("a", "c/1", "c/2"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    found: list[tuple[str, str]] = []
    marker: dict[str, str] = {}
    while True:
        page = s3.list_multipart_uploads(Bucket=bucket, MaxUploads=2, **marker)
        found += [(u["Key"], u["UploadId"]) for u in page["Uploads"]]
        if not page["IsTruncated"]:
            break
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    assert [key for key, _ in found] == ["a", *["b é+"] * 5, "c/1", "c/2"]
    assert [upload for key, upload in found if key == "b é+"] == begun
    after = s3.list_multipart_uploads(Bucket=bucket, KeyMarker="b é+")
    assert [u["Key"] for u in after["Uploads"]] == ["c/1", "c/2"]
    rest = s3.list_multipart_uploads(Bucket=bucket, KeyMarker="b é+", UploadIdMarker=begun[3])
    assert [u["UploadId"] for u in rest["Uploads"]][:1] == begun[4:]
    assert [u["Key"] for u in rest["Uploads"]] == ["b é+", "c/1", "c/2"]
    inside = s3.list_multipart_uploads(Bucket=bucket, Prefix="c/", MaxUploads=1)
    assert ([u["Key"] for u in inside["Uploads"]], inside["IsTruncated"]) == (["c/1"], True)
    rolled = s3.list_multipart_uploads(Bucket=bucket, Delimiter="/")
    assert [p["Prefix"] for p in rolled["CommonPrefixes"]] == ["c/"]
    encoded = s3.list_multipart_uploads(Bucket=bucket, EncodingType="url", Prefix="b ")
    assert {u["Key"] for u in encoded["Uploads"]} == {"b%20%C3%A9%2B"}


def test_pages_of_parts_end_where_parts_end(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket)
    for number in (1, 2, 10_000):
        put(s3, upload, number, b"x")
    first = s3.list_parts(MaxParts=2, **upload)
    assert ([p["PartNumber"] for p in first["Parts"]], first["NextPartNumberMarker"]) == ([1, 2], 2)
    assert first["IsTruncated"]
    last = s3.list_parts(PartNumberMarker=2, **upload)
    assert ([p["PartNumber"] for p in last["Parts"]], last["IsTruncated"]) == ([10_000], False)
    for marker in (10_000, 0xFFFF, 2_147_483_647):
        assert "Parts" not in s3.list_parts(PartNumberMarker=marker, **upload)
    assert not s3.list_parts(MaxParts=0, **upload)["IsTruncated"]


def test_parts_of_nothing_and_copies_of_nothing(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="empty", Body=b"")
    upload = begin(s3, bucket)
    copied = s3.upload_part_copy(PartNumber=1, CopySource=f"{bucket}/empty", **upload)["CopyPartResult"]
    assert copied["ETag"] == f'"{hashlib.md5(b"").hexdigest()}"'
    complete(s3, upload, [{"PartNumber": 1, "ETag": copied["ETag"]}])
    assert s3.head_object(Bucket=bucket, Key="k")["ContentLength"] == 0


def test_conditions_on_the_source_of_a_part(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="s", Body=b"123")["ETag"]
    upload = begin(s3, bucket)
    part = {"PartNumber": 1, "CopySource": f"{bucket}/s", **upload}
    for bad in ({"CopySourceIfMatch": '"other"'}, {"CopySourceIfNoneMatch": etag}):
        with pytest.raises(ClientError) as excinfo:
            s3.upload_part_copy(**part, **bad)
        assert code_of(excinfo) == (412, "PreconditionFailed")
    assert s3.upload_part_copy(CopySourceIfMatch=etag, **part)["CopyPartResult"]["ETag"] == etag


def test_a_completion_that_names_checksums_of_another_algorithm(s3: Any, bucket: str) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT")
    part = put(s3, upload, 1, b"data", ChecksumAlgorithm="CRC32C")
    named = {"PartNumber": 1, "ETag": part["ETag"]}
    for data in (b"data", b"other"):
        with pytest.raises(ClientError, match="The sha256 you specified for part 1 did not match") as excinfo:
            complete(s3, upload, [{**named, "ChecksumSHA256": b64(hashlib.sha256(data).digest())}])
        assert code_of(excinfo) == (400, "BadDigest")
    assert complete(s3, upload, [named])["ChecksumCRC32C"] == part["ChecksumCRC32C"]


@pytest.mark.parametrize("kind", ["FULL_OBJECT", "COMPOSITE"])
def test_a_part_with_a_checksum_of_another_algorithm(s3: Any, bucket: str, kind: str) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="CRC32", ChecksumType=kind)
    with pytest.raises(ClientError, match="Checksum Type mismatch occurred") as excinfo:
        put(s3, upload, 1, b"x", ChecksumAlgorithm="SHA256")
    assert code_of(excinfo) == (400, "InvalidRequest")
    assert "Parts" not in s3.list_parts(**upload)
    complete(s3, upload, [put(s3, upload, 1, b"x", ChecksumAlgorithm="CRC32")])


def test_any_algorithm_goes_for_an_upload_that_names_none(wire: Wire, s3: Any, bucket: str) -> None:
    answer = wire.call("POST", f"/{bucket}/k?uploads=")
    upload = {"Bucket": bucket, "Key": "k"}
    upload["UploadId"] = ElementTree.fromstring(answer.body).findtext(f"{XMLNS}UploadId") or ""
    complete(s3, upload, [put(s3, upload, 1, b"x", ChecksumAlgorithm="SHA256")])
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


@pytest.mark.parametrize(("kind", "told"), [("FULL_OBJECT", False), ("COMPOSITE", True)])
def test_a_parts_checksum_is_told_only_of_composites(s3: Any, bucket: str, kind: str, told: bool) -> None:
    upload = begin(s3, bucket, ChecksumAlgorithm="CRC32", ChecksumType=kind)
    part = put(s3, upload, 1, b"part", ChecksumAlgorithm="CRC32")
    complete(s3, upload, [part])
    asked = {"Bucket": bucket, "Key": "k", "PartNumber": 1, "ChecksumMode": "ENABLED"}
    for answer in (s3.get_object(**asked), s3.head_object(**asked)):
        assert answer.get("ChecksumCRC32") == (part["ChecksumCRC32"] if told else None)
        assert answer["PartsCount"] == 1


def test_nobody_begins_an_upload(daemon: Daemon, s3: Any, bucket: str) -> None:
    """Where everybody may write: plain uploads go, uploads in parts are for those who sign."""
    s3.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    nobody = daemon.client(config=Config(signature_version=UNSIGNED))
    nobody.put_object(Bucket=bucket, Key="k", Body=b"anybody's")
    with pytest.raises(ClientError, match="Anonymous users cannot initiate multipart uploads") as excinfo:
        nobody.create_multipart_upload(Bucket=bucket, Key="k")
    assert code_of(excinfo) == (403, "AccessDenied")
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    nobody.close()


@pytest.mark.parametrize("spelled", ["Full_Object", "full_object", "FULL_OBJECT"])
def test_a_checksum_type_in_any_case(wire: Wire, bucket: str, spelled: str) -> None:
    headers = {"x-amz-checksum-algorithm": "Crc32", "x-amz-checksum-type": spelled}
    answer = wire.call("POST", f"/{bucket}/k?uploads=", headers=headers)
    assert (answer.status, answer.headers["x-amz-checksum-type"]) == (200, "FULL_OBJECT")
