"""GetObjectAttributes, and checksums of every kind on one piece and on parts."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest
from botocore.exceptions import ClientError

from meshwire.checksums import body_checksums as sums

MIB = 1 << 20
SOURCE = os.urandom(10 * MIB + 3)
PIECES = (SOURCE[: 5 * MIB], SOURCE[5 * MIB : 10 * MIB], SOURCE[10 * MIB :])
EVERYTHING = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
COMPOSITE = ["CRC32", "CRC32C", "SHA1", "SHA256", "SHA512", "MD5", "XXHASH64", "XXHASH3", "XXHASH128"]
FULL = ["CRC32", "CRC32C", "CRC64NVME"]


def refused(call: Any, **options: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    answer = excinfo.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def checksum(algorithm: str, data: bytes) -> str:
    hasher = sums.new_hasher(algorithm.lower())
    hasher.update(data)
    return hasher.base64()


def multipart(s3: Any, bucket: str, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An upload with all its parts, not yet completed."""
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k", **options)["UploadId"]
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload}
    algorithm, parts = options.get("ChecksumAlgorithm"), []
    for number, piece in enumerate(PIECES, 1):
        declared = {f"Checksum{algorithm}": checksum(algorithm, piece)} if algorithm else {}
        answer = s3.upload_part(PartNumber=number, Body=piece, **where, **declared)
        kept = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **kept})
    return where, parts


def test_of_a_plain_object(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    stored = s3.put_object(Body=b"123", ChecksumAlgorithm="SHA1", **where)
    told = s3.get_object_attributes(ObjectAttributes=EVERYTHING, **where)
    assert told["ETag"] == stored["ETag"].strip('"')
    assert told["Checksum"] == {"ChecksumSHA1": checksum("sha1", b"123"), "ChecksumType": "FULL_OBJECT"}
    assert (told["ObjectSize"], told["StorageClass"]) == (3, "STANDARD")
    assert told["LastModified"] == s3.head_object(**where)["LastModified"]
    assert "ObjectParts" not in told
    assert "VersionId" not in told
    few = s3.get_object_attributes(ObjectAttributes=["ObjectSize"], **where)
    assert {"ETag", "Checksum", "StorageClass"}.isdisjoint(few)
    assert refused(s3.get_object_attributes, ObjectAttributes=["Colour"], **where) == (400, "InvalidArgument")
    missing = {"Bucket": bucket, "Key": "none", "ObjectAttributes": ["ETag"]}
    assert refused(s3.get_object_attributes, **missing) == (404, "NoSuchKey")


def test_of_versions(s3: Any, bucket: str) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    where = {"Bucket": bucket, "Key": "k", "ObjectAttributes": ["ObjectSize"]}
    old = s3.put_object(Bucket=bucket, Key="k", Body=b"1")["VersionId"]
    s3.put_object(Bucket=bucket, Key="k", Body=b"22")
    told = s3.get_object_attributes(VersionId=old, **where)
    assert (told["ObjectSize"], told["VersionId"]) == (1, old)
    assert s3.get_object_attributes(**where)["ObjectSize"] == 2
    marker = s3.delete_object(Bucket=bucket, Key="k")["VersionId"]
    assert refused(s3.get_object_attributes, **where) == (404, "NoSuchKey")
    assert refused(s3.get_object_attributes, VersionId=marker, **where) == (405, "MethodNotAllowed")


def test_pages_of_parts(s3: Any, bucket: str) -> None:
    where, parts = multipart(s3, bucket, ChecksumAlgorithm="CRC32")
    s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    asked = {"Bucket": bucket, "Key": "k", "ObjectAttributes": EVERYTHING}
    told = s3.get_object_attributes(**asked)["ObjectParts"]
    assert (told["TotalPartsCount"], told["IsTruncated"]) == (3, False)
    assert [(p["PartNumber"], p["Size"]) for p in told["Parts"]] == [
        (number, len(piece)) for number, piece in enumerate(PIECES, 1)
    ]
    assert [p["ChecksumCRC32"] for p in told["Parts"]] == [p["ChecksumCRC32"] for p in parts]
    seen, marker = [], 0
    while True:
        page = s3.get_object_attributes(MaxParts=2, PartNumberMarker=marker, **asked)["ObjectParts"]
        seen += [p["PartNumber"] for p in page["Parts"]]
        assert page["MaxParts"] == 2
        if not page["IsTruncated"]:
            break
        marker = page["NextPartNumberMarker"]
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("algorithm", [*COMPOSITE, "CRC64NVME"])
def test_a_checksum_of_one_piece(s3: Any, bucket: str, algorithm: str) -> None:
    name, value = f"Checksum{algorithm}", checksum(algorithm, b"data")
    where = {"Bucket": bucket, "Key": "k"}
    wrong = {name: checksum(algorithm, b"other")}
    assert refused(s3.put_object, Body=b"data", **where, **wrong) == (400, "BadDigest")
    stored = s3.put_object(Body=b"data", **where, **{name: value})
    assert (stored[name], stored["ChecksumType"]) == (value, "FULL_OBJECT")
    got = s3.get_object(ChecksumMode="ENABLED", **where)
    assert got["Body"].read() == b"data"
    for told in (got, s3.head_object(ChecksumMode="ENABLED", **where)):
        assert (told[name], told["ChecksumType"]) == (value, "FULL_OBJECT")
    entry = s3.list_objects_v2(Bucket=bucket)["Contents"][0]
    assert (entry["ChecksumAlgorithm"], entry["ChecksumType"]) == ([algorithm], "FULL_OBJECT")
    copied = s3.copy_object(CopySource=f"{bucket}/k", Bucket=bucket, Key="c")["CopyObjectResult"]
    assert (copied[name], copied["ChecksumType"]) == (value, "FULL_OBJECT")


@pytest.mark.parametrize("algorithm", COMPOSITE)
def test_composite_checksums(s3: Any, bucket: str, algorithm: str) -> None:
    name = f"Checksum{algorithm}"
    expected = sums.composite_checksum(algorithm.lower(), [checksum(algorithm, piece) for piece in PIECES])
    where, parts = multipart(s3, bucket, ChecksumAlgorithm=algorithm)
    listed = s3.list_parts(**where)
    assert (listed["ChecksumAlgorithm"], listed["ChecksumType"]) == (algorithm, "COMPOSITE")
    assert [p[name] for p in listed["Parts"]] == [p[name] for p in parts]
    upload = s3.list_multipart_uploads(Bucket=bucket)["Uploads"][0]
    assert (upload["ChecksumAlgorithm"], upload["ChecksumType"]) == (algorithm, "COMPOSITE")
    finish = {"MultipartUpload": {"Parts": parts}, **where}
    for options, code in (
        ({"ChecksumType": "FULL_OBJECT"}, "InvalidRequest"),
        ({name: checksum(algorithm, b"other") + "-3"}, "BadDigest"),
        ({"MpuObjectSize": len(SOURCE) + 1}, "InvalidRequest"),
        ({"ChecksumCRC64NVME": checksum("crc64nvme", SOURCE)}, "InvalidRequest"),
    ):
        assert refused(s3.complete_multipart_upload, **finish, **options) == (400, code)
    swapped = [{**parts[0], name: parts[1][name]}, *parts[1:]]
    bad = {**finish, "MultipartUpload": {"Parts": swapped}}
    assert refused(s3.complete_multipart_upload, **bad) == (400, "InvalidPart")
    done = s3.complete_multipart_upload(
        ChecksumType="COMPOSITE", MpuObjectSize=len(SOURCE), **finish, **{name: expected}
    )
    assert (done[name], done["ChecksumType"]) == (expected, "COMPOSITE")
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head[name], head["ChecksumType"]) == (expected, "COMPOSITE")
    part = s3.get_object(Bucket=bucket, Key="k", PartNumber=3, ChecksumMode="ENABLED")
    assert part[name] == checksum(algorithm, PIECES[2])
    assert part["Body"].read() == PIECES[2]
    ranged = s3.get_object(Bucket=bucket, Key="k", Range="bytes=0-9", ChecksumMode="ENABLED")
    assert ranged["Body"].read() == SOURCE[:10]
    assert name not in ranged
    told = s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["Checksum"])
    assert told["Checksum"] == {name: expected.removesuffix("-3"), "ChecksumType": "COMPOSITE"}


@pytest.mark.parametrize("algorithm", FULL)
def test_full_object_checksums(s3: Any, bucket: str, algorithm: str) -> None:
    name, expected = f"Checksum{algorithm}", checksum(algorithm, SOURCE)
    created = s3.create_multipart_upload(
        Bucket=bucket, Key="other", ChecksumAlgorithm=algorithm, ChecksumType="FULL_OBJECT"
    )
    assert (created["ChecksumAlgorithm"], created["ChecksumType"]) == (algorithm, "FULL_OBJECT")
    where, parts = multipart(s3, bucket, ChecksumAlgorithm=algorithm, ChecksumType="FULL_OBJECT")
    finish = {"MultipartUpload": {"Parts": parts}, **where}
    wrong = {name: checksum(algorithm, b"other")}
    assert refused(s3.complete_multipart_upload, **finish, **wrong) == (400, "BadDigest")
    assert refused(s3.complete_multipart_upload, ChecksumType="COMPOSITE", **finish)[0] == 400
    done = s3.complete_multipart_upload(ChecksumType="FULL_OBJECT", **finish, **{name: expected})
    assert (done[name], done["ChecksumType"]) == (expected, "FULL_OBJECT")
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == SOURCE
    assert (got[name], got["ChecksumType"]) == (expected, "FULL_OBJECT")


def test_without_an_algorithm_crc64nvme_is_kept(s3: Any, bucket: str) -> None:
    where, parts = multipart(s3, bucket)
    plain = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
    s3.complete_multipart_upload(MultipartUpload={"Parts": plain}, **where)
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head["ChecksumCRC64NVME"], head["ChecksumType"]) == (checksum("crc64nvme", SOURCE), "FULL_OBJECT")


def test_a_copy_may_ask_for_another_checksum(s3: Any, bucket: str) -> None:
    where, parts = multipart(s3, bucket, ChecksumAlgorithm="SHA256")
    done = s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    source = {"CopySource": f"{bucket}/k", "Bucket": bucket}
    shared = s3.copy_object(Key="shared", **source)["CopyObjectResult"]
    if "MESH_TEST_NODES" not in os.environ:  # between nodes a copy is written anew, in one piece
        assert (shared["ETag"], shared["ChecksumType"]) == (done["ETag"], "COMPOSITE")
    whole = s3.copy_object(Key="whole", ChecksumAlgorithm="SHA1", **source)["CopyObjectResult"]
    assert whole["ETag"] == f'"{hashlib.md5(SOURCE).hexdigest()}"'
    assert (whole["ChecksumSHA1"], whole["ChecksumType"]) == (checksum("sha1", SOURCE), "FULL_OBJECT")
    assert s3.get_object(Bucket=bucket, Key="whole")["Body"].read() == SOURCE


@pytest.mark.parametrize(("algorithm", "kind"), [("SHA256", "COMPOSITE"), ("CRC32", "FULL_OBJECT")])
def test_the_checksum_of_parts_does_not_count_them(s3: Any, bucket: str, algorithm: str, kind: str) -> None:
    """Nowhere else: HEAD and the completion end in `-3`."""
    where, parts = multipart(s3, bucket, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    done = s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    name = f"Checksum{algorithm}"
    asked = {"Bucket": bucket, "Key": "k"}
    assert s3.head_object(ChecksumMode="ENABLED", **asked)[name] == done[name]
    assert done[name].endswith("-3") is (kind == "COMPOSITE")
    told = s3.get_object_attributes(ObjectAttributes=["Checksum"], **asked)["Checksum"]
    assert told == {name: done[name].removesuffix("-3"), "ChecksumType": kind}


@pytest.mark.parametrize(
    "given", [{"Range": "bytes=1-3"}, {"PartNumber": 1}], ids=["a range", "the only part"]
)
def test_beside_a_range_the_checksum_of_the_whole_has_another_name(
    s3: Any, bucket: str, given: dict[str, Any]
) -> None:
    """Under S3's name, clients would compare it with the range."""
    s3.put_object(Bucket=bucket, Key="k", Body=SOURCE, ChecksumAlgorithm="CRC32")
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED", **given)
    headers = got["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-mesh-checksum-crc32"] == checksum("CRC32", SOURCE)
    assert "ChecksumCRC32" not in got
    unasked = s3.head_object(Bucket=bucket, Key="k", **given)["ResponseMetadata"]["HTTPHeaders"]
    assert not [name for name in unasked if "checksum" in name]
