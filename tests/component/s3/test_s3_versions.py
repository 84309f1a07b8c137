"""Versioned and suspended buckets through boto3: every verb with a version id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.s3_raw import Wire


def refused(call: Callable[..., Any], **options: Any) -> tuple[int, str, dict[str, str]]:
    """(status, code, headers) of a refusal."""
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    answer = excinfo.value.response
    meta = answer["ResponseMetadata"]
    return meta["HTTPStatusCode"], answer["Error"]["Code"], meta["HTTPHeaders"]


def version(s3: Any, bucket: str, status: str = "Enabled") -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})


def put(s3: Any, bucket: str, data: bytes, key: str = "k") -> str:
    return str(s3.put_object(Bucket=bucket, Key=key, Body=data).get("VersionId", ""))


def read(s3: Any, bucket: str, key: str = "k", **options: Any) -> bytes:
    return bytes(s3.get_object(Bucket=bucket, Key=key, **options)["Body"].read())


def listed(s3: Any, bucket: str, size: int = 1000, **options: Any) -> list[tuple[str, str, bool, str]]:
    """(key, version id, latest, kind) over all pages, in the order of the keys and then of age."""
    found, prefixes = [], []
    pages = s3.get_paginator("list_object_versions").paginate(
        Bucket=bucket, PaginationConfig={"PageSize": size}, **options
    )
    for page in pages:
        for kind in ("Versions", "DeleteMarkers"):
            found += [(e["Key"], e["VersionId"], e["IsLatest"], kind) for e in page.get(kind, [])]
        prefixes += [p["Prefix"] for p in page.get("CommonPrefixes", [])]
    return found + [(prefix, "", False, "") for prefix in prefixes]


def test_versions_are_read_by_their_ids(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    first, second = put(s3, bucket, b"1"), put(s3, bucket, b"22")
    assert first != second
    assert (read(s3, bucket), read(s3, bucket, VersionId=first)) == (b"22", b"1")
    assert read(s3, bucket, VersionId=second, Range="bytes=1-") == b"2"
    head = s3.head_object(Bucket=bucket, Key="k", VersionId=first)
    assert (head["VersionId"], head["ContentLength"]) == (first, 1)
    assert s3.head_object(Bucket=bucket, Key="k")["VersionId"] == second
    where = {"Bucket": bucket, "Key": "k"}
    for call in (s3.get_object, s3.get_object_tagging):
        status, code, _ = refused(call, VersionId="1" * 16, **where)
        assert (status, code) == (404, "NoSuchVersion")
    assert refused(s3.head_object, VersionId="1" * 16, **where)[0] == 404
    condition = {"IfMatch": s3.head_object(VersionId=first, **where)["ETag"]}
    assert refused(s3.get_object, **where, **condition)[0] == 412
    assert read(s3, bucket, VersionId=first, **condition) == b"1"


def test_delete_markers(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    kept = put(s3, bucket, b"1")
    gone = s3.delete_object(Bucket=bucket, Key="k")
    marker = gone["VersionId"]
    assert gone["DeleteMarker"]
    where = {"Bucket": bucket, "Key": "k"}
    for call, expected in ((s3.get_object, "NoSuchKey"), (s3.head_object, "404")):
        status, code, headers = refused(call, **where)
        assert (status, code) == (404, expected)
        assert (headers["x-amz-delete-marker"], headers["x-amz-version-id"]) == ("true", marker)
    for call, expected in ((s3.get_object, "MethodNotAllowed"), (s3.head_object, "405")):
        status, code, headers = refused(call, VersionId=marker, **where)
        assert (status, code) == (405, expected)
        assert (headers["x-amz-delete-marker"], headers["allow"]) == ("true", "DELETE")
        assert "last-modified" in headers
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)
    assert read(s3, bucket, VersionId=kept) == b"1"
    again = s3.delete_object(VersionId=marker, **where)
    assert (again["DeleteMarker"], again["VersionId"]) == (True, marker)
    assert read(s3, bucket) == b"1"
    last = s3.delete_object(VersionId=kept, **where)
    assert last["VersionId"] == kept
    assert "DeleteMarker" not in last
    status, _, headers = refused(s3.get_object, **where)
    assert status == 404
    assert "x-amz-delete-marker" not in headers
    assert listed(s3, bucket) == []
    assert s3.delete_object(VersionId=kept, **where)["ResponseMetadata"]["HTTPStatusCode"] == 204


def test_deleting_the_newest_version_brings_back_the_one_before(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    versions = [put(s3, bucket, b"%d" % i) for i in range(4)]
    for number in (3, 2, 1):
        s3.delete_object(Bucket=bucket, Key="k", VersionId=versions[number])
        assert read(s3, bucket) == b"%d" % (number - 1)
        assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    assert listed(s3, bucket) == [("k", versions[0], True, "Versions")]


def test_null_versions(s3: Any, bucket: str) -> None:
    assert put(s3, bucket, b"before") == ""
    assert "VersionId" not in s3.head_object(Bucket=bucket, Key="k")
    assert read(s3, bucket, VersionId="null") == b"before"
    version(s3, bucket)
    assert s3.head_object(Bucket=bucket, Key="k")["VersionId"] == "null"
    named = put(s3, bucket, b"named")
    assert read(s3, bucket, VersionId="null") == b"before"
    version(s3, bucket, "Suspended")
    assert put(s3, bucket, b"one") == put(s3, bucket, b"two") == ""
    assert s3.head_object(Bucket=bucket, Key="k")["VersionId"] == "null"
    assert (read(s3, bucket), read(s3, bucket, VersionId=named)) == (b"two", b"named")
    gone = s3.delete_object(Bucket=bucket, Key="k")
    assert (gone["DeleteMarker"], gone["VersionId"]) == (True, "null")
    assert listed(s3, bucket) == [("k", named, False, "Versions"), ("k", "null", True, "DeleteMarkers")]
    assert refused(s3.get_object, Bucket=bucket, Key="k", VersionId="null")[0] == 405
    s3.delete_object(Bucket=bucket, Key="k", VersionId="null")
    assert read(s3, bucket) == b"named"
    version(s3, bucket)
    put(s3, bucket, b"later")
    assert [entry[2] for entry in listed(s3, bucket)] == [True, False]


def test_pages_of_versions(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    keys = ["a/1", "a/2", "b", "c d+é", "e/f"]
    for key in keys * 3:
        put(s3, bucket, b"", key)
    s3.delete_object(Bucket=bucket, Key="b")
    whole = sorted(listed(s3, bucket))
    assert len(whole) == 16
    for size in (1, 2, 5):
        assert sorted(listed(s3, bucket, size)) == whole
    assert {key for key, *_ in listed(s3, bucket, 2, Prefix="a/")} == {"a/1", "a/2"}
    for size in (1, 3):
        rolled = listed(s3, bucket, size, Delimiter="/")
        assert [key for key, *_, kind in rolled if not kind] == ["a/", "e/"]
        assert {key for key, *_, kind in rolled if kind} == {"b", "c d+é"}
        assert len(rolled) == 2 + 4 + 3
    after = s3.list_object_versions(Bucket=bucket, KeyMarker="b")
    assert {e["Key"] for e in after["Versions"]} == {"c d+é", "e/f"}
    inside = s3.list_object_versions(Bucket=bucket, Prefix="a/1")["Versions"]
    assert [e["IsLatest"] for e in inside] == [True, False, False]
    assert inside[0]["LastModified"] >= inside[2]["LastModified"]
    rest = s3.list_object_versions(Bucket=bucket, KeyMarker="a/1", VersionIdMarker=inside[0]["VersionId"])
    assert [e["VersionId"] for e in rest["Versions"][:2]] == [e["VersionId"] for e in inside[1:]]
    empty = s3.list_object_versions(Bucket=bucket, MaxKeys=0)
    assert (empty["IsTruncated"], empty.get("Versions")) == (False, None)
    status, code, _ = refused(s3.list_object_versions, Bucket=bucket, VersionIdMarker="x")
    assert (status, code) == (400, "InvalidArgument")


def test_what_a_listing_says_of_a_version(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    stored = s3.put_object(Bucket=bucket, Key="k", Body=b"12", ChecksumAlgorithm="SHA256")
    s3.delete_object(Bucket=bucket, Key="k")
    page = s3.list_object_versions(Bucket=bucket)
    entry, marker = page["Versions"][0], page["DeleteMarkers"][0]
    assert (entry["ETag"], entry["Size"], entry["StorageClass"]) == (stored["ETag"], 2, "STANDARD")
    assert (entry["ChecksumAlgorithm"], entry["ChecksumType"]) == (["SHA256"], "FULL_OBJECT")
    owner = s3.list_buckets()["Owner"]["ID"]
    assert entry["Owner"]["ID"] == marker["Owner"]["ID"] == owner
    assert (marker["IsLatest"], entry["IsLatest"]) == (True, False)


def test_many_deletions(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    old, new = put(s3, bucket, b"1"), put(s3, bucket, b"2")
    put(s3, bucket, b"3", "plain")
    objects = [
        {"Key": "k", "VersionId": old},
        {"Key": "plain"},
        {"Key": "none"},
        {"Key": "k", "VersionId": new, "ETag": '"other"'},
    ]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": objects})
    made = {entry["Key"]: entry for entry in answer["Deleted"]}
    assert made["k"]["VersionId"] == old
    assert "DeleteMarker" not in made["k"]
    assert made["plain"]["DeleteMarker"]
    assert made["none"]["DeleteMarkerVersionId"]
    failure = answer["Errors"][0]
    assert (failure["Key"], failure["VersionId"], failure["Code"]) == ("k", new, "PreconditionFailed")
    marker = made["plain"]["DeleteMarkerVersionId"]
    objects = [{"Key": "plain", "VersionId": marker}]
    undone = s3.delete_objects(Bucket=bucket, Delete={"Objects": objects})["Deleted"][0]
    assert (undone["VersionId"], undone["DeleteMarkerVersionId"]) == (marker, marker)
    assert read(s3, bucket, "plain") == b"3"
    quiet = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "k"}], "Quiet": True})
    assert "Deleted" not in quiet


def test_a_bucket_with_versions_is_not_empty(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    kept = put(s3, bucket, b"1")
    marker = s3.delete_object(Bucket=bucket, Key="k")["VersionId"]
    for left in (kept, marker):
        assert refused(s3.delete_bucket, Bucket=bucket)[1] == "BucketNotEmpty"
        s3.delete_object(Bucket=bucket, Key="k", VersionId=left)
    s3.delete_bucket(Bucket=bucket)
    s3.create_bucket(Bucket=bucket)
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)


def test_copies_of_versions(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    old, new = put(s3, bucket, b"old"), put(s3, bucket, b"new")
    source = {"Bucket": bucket, "Key": "k", "VersionId": old}
    copied = s3.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    assert copied["CopySourceVersionId"] == old
    assert copied["VersionId"] == s3.head_object(Bucket=bucket, Key="copy")["VersionId"]
    assert read(s3, bucket, "copy") == b"old"
    s3.copy_object(Bucket=bucket, Key="k", CopySource=source)  # an old version comes back
    assert read(s3, bucket) == b"old"
    assert len(listed(s3, bucket, Prefix="k")) == 3
    plain = s3.copy_object(Bucket=bucket, Key="c2", CopySource=f"{bucket}/k")
    assert plain["CopySourceVersionId"] not in (old, new)
    marker = s3.delete_object(Bucket=bucket, Key="k")["VersionId"]
    for bad, expected in (
        ({"Bucket": bucket, "Key": "k"}, (404, "NoSuchKey")),
        ({"Bucket": bucket, "Key": "k", "VersionId": marker}, (400, "InvalidRequest")),
        ({"Bucket": bucket, "Key": "k", "VersionId": "1" * 16}, (404, "NoSuchVersion")),
    ):
        assert refused(s3.copy_object, Bucket=bucket, Key="copy", CopySource=bad)[:2] == expected
    upload = s3.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    part = {"Bucket": bucket, "Key": "parts", "UploadId": upload}
    copied = s3.upload_part_copy(PartNumber=1, CopySource=source, CopySourceRange="bytes=1-2", **part)
    assert copied["CopySourceVersionId"] == old
    parts = [{"PartNumber": 1, "ETag": copied["CopyPartResult"]["ETag"]}]
    done = s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **part)
    assert done["VersionId"] == s3.head_object(Bucket=bucket, Key="parts")["VersionId"]
    assert read(s3, bucket, "parts") == b"ld"


def test_a_completion_may_be_repeated_after_a_newer_version(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    where = {"Bucket": bucket, "Key": "k", "UploadId": upload}
    parts = [{"PartNumber": 1, "ETag": s3.upload_part(PartNumber=1, Body=b"1", **where)["ETag"]}]
    done = s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    put(s3, bucket, b"newer")
    again = s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    assert (again["VersionId"], again["ETag"]) == (done["VersionId"], done["ETag"])
    assert len(listed(s3, bucket)) == 2


@pytest.mark.parametrize(
    "query", ["versionId=", "versionId=%00", "versionId=%ff", "versionId=made-up", "versionId=" + "v" * 2000]
)
def test_version_ids_that_are_none(wire: Wire, s3: Any, bucket: str, query: str) -> None:
    put(s3, bucket, b"1")
    for method in ("GET", "DELETE"):
        answer = wire.call(method, f"/{bucket}/k?{query}")
        assert (answer.status, answer.code) in ((400, "InvalidArgument"), (400, "InvalidURI"))
    assert read(s3, bucket) == b"1"


def test_versions_survive_a_change_of_setting(s3: Any, bucket: str) -> None:
    version(s3, bucket)
    versions = [put(s3, bucket, b"%d" % i) for i in range(3)]
    version(s3, bucket, "Suspended")
    put(s3, bucket, b"null")
    version(s3, bucket)
    for i, name in enumerate(versions):
        assert read(s3, bucket, VersionId=name) == b"%d" % i
    assert read(s3, bucket, VersionId="null") == b"null"
    assert len(listed(s3, bucket)) == 4
