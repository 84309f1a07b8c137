"""Object tags through boto3 and by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.s3_raw import Wire


def refused(call: Callable[..., Any], **options: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    answer = excinfo.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def as_set(tags: dict[str, str]) -> dict[str, Any]:
    return {"TagSet": [{"Key": key, "Value": value} for key, value in tags.items()]}


def tags_of(s3: Any, bucket: str, key: str = "k", **options: Any) -> dict[str, str]:
    answer = s3.get_object_tagging(Bucket=bucket, Key=key, **options)
    return {tag["Key"]: tag["Value"] for tag in answer["TagSet"]}


def test_tags_are_set_read_and_taken_away(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    stored = s3.put_object(Body=b"1", **where)
    before = s3.head_object(**where)
    assert tags_of(s3, bucket) == {}
    assert "TagCount" not in before
    tags = {"b": "2", "a": "", "ünï côdé": "+-=._:/@ 日本"}
    s3.put_object_tagging(Tagging=as_set(tags), **where)
    assert list(tags_of(s3, bucket).items()) == list(tags.items())
    head = s3.head_object(**where)
    assert head["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "3"
    got = s3.get_object(**where)
    assert (got["Body"].read(), got["TagCount"]) == (b"1", 3)
    assert (head["ETag"], head["LastModified"]) == (stored["ETag"], before["LastModified"])
    s3.put_object_tagging(Tagging=as_set({"only": "one"}), **where)
    assert tags_of(s3, bucket) == {"only": "one"}
    s3.delete_object_tagging(**where)
    assert tags_of(s3, bucket) == {}
    assert s3.get_object(**where)["Body"].read() == b"1"


def test_tags_come_with_uploads(s3: Any, bucket: str) -> None:
    tags = {"a b": "1+2", "é": "="}
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", Tagging=urlencode(tags))
    assert tags_of(s3, bucket) == tags
    s3.put_object(Bucket=bucket, Key="k", Body=b"2")
    assert tags_of(s3, bucket) == {}
    upload = s3.create_multipart_upload(Bucket=bucket, Key="m", Tagging=urlencode(tags))["UploadId"]
    where = {"Bucket": bucket, "Key": "m", "UploadId": upload}
    parts = [{"PartNumber": 1, "ETag": s3.upload_part(PartNumber=1, Body=b"1", **where)["ETag"]}]
    s3.complete_multipart_upload(MultipartUpload={"Parts": parts}, **where)
    assert tags_of(s3, bucket, "m") == tags


def test_tags_of_copies(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", Tagging="a=1")
    source = {"CopySource": f"{bucket}/k", "Bucket": bucket}
    s3.copy_object(Key="same", **source)
    assert tags_of(s3, bucket, "same") == {"a": "1"}
    s3.copy_object(Key="new", TaggingDirective="REPLACE", Tagging="b=2", **source)
    assert tags_of(s3, bucket, "new") == {"b": "2"}
    s3.copy_object(Key="none", TaggingDirective="REPLACE", **source)
    assert tags_of(s3, bucket, "none") == {}
    s3.copy_object(Key="k", MetadataDirective="REPLACE", Metadata={"m": "1"}, **source)
    assert tags_of(s3, bucket) == {"a": "1"}
    assert refused(s3.copy_object, Key="x", TaggingDirective="MERGE", **source) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        ({f"k{i}": "" for i in range(11)}, "BadRequest"),
        ({"k" * 129: ""}, "InvalidTag"),
        ({"k": "v" * 257}, "InvalidTag"),
        ({"aws:k": ""}, "InvalidTag"),
        ({"a?": ""}, "InvalidTag"),
    ],
)
def test_limits(s3: Any, bucket: str, tags: dict[str, str], code: str) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    s3.put_object(Body=b"1", Tagging="kept=1", **where)
    assert refused(s3.put_object_tagging, Tagging=as_set(tags), **where) == (400, code)
    assert refused(s3.put_object, Body=b"2", Tagging=urlencode(tags), **where) == (400, code)
    assert tags_of(s3, bucket) == {"kept": "1"}
    widest = {f"{i}" + "k" * 127: "v" * 256 for i in range(10)}
    s3.put_object_tagging(Tagging=as_set(widest), **where)
    assert tags_of(s3, bucket) == widest


def test_tags_of_versions(s3: Any, bucket: str) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    where = {"Bucket": bucket, "Key": "k"}
    old = s3.put_object(Body=b"1", Tagging="a=1", **where)["VersionId"]
    new = s3.put_object(Body=b"2", **where)["VersionId"]
    assert (tags_of(s3, bucket), tags_of(s3, bucket, VersionId=old)) == ({}, {"a": "1"})
    answer = s3.put_object_tagging(Tagging=as_set({"b": "2"}), VersionId=old, **where)
    assert answer["VersionId"] == old
    assert s3.get_object_tagging(**where)["VersionId"] == new
    assert tags_of(s3, bucket, VersionId=old) == {"b": "2"}
    assert s3.delete_object_tagging(VersionId=old, **where)["VersionId"] == old
    assert [e["VersionId"] for e in s3.list_object_versions(Bucket=bucket)["Versions"]] == [new, old]
    marker = s3.delete_object(**where)["VersionId"]
    for call, more in ((s3.get_object_tagging, {}), (s3.put_object_tagging, {"Tagging": as_set({})})):
        assert refused(call, **where, **more) == (404, "NoSuchKey")
        assert refused(call, VersionId=marker, **where, **more) == (405, "MethodNotAllowed")
        assert refused(call, VersionId="1" * 16, **where, **more) == (404, "NoSuchVersion")


def test_tags_of_what_is_not_there(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "none"}
    assert refused(s3.get_object_tagging, **where) == (404, "NoSuchKey")
    assert refused(s3.put_object_tagging, Tagging=as_set({"a": "1"}), **where) == (404, "NoSuchKey")
    assert refused(s3.delete_object_tagging, **where) == (404, "NoSuchKey")


def test_a_tagging_document_is_checked(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    body = b"<Tagging><TagSet><Tag><Key>a</Key><Value>1</Value></Tag></TagSet></Tagging>"
    target = f"/{bucket}/k?tagging"
    wrong = {"content-md5": "AAAAAAAAAAAAAAAAAAAAAA=="}
    assert wire.call("PUT", target, body, headers=wrong).code == "BadDigest"
    twice = body.replace(b"</TagSet>", b"<Tag><Key>a</Key><Value/></Tag></TagSet>")
    assert wire.call("PUT", target, twice).code == "InvalidTag"
    for malformed in (b"", b"<Tagging/>", b"<Tagging><TagSet>", body.replace(b"Value", b"Worth")):
        assert wire.call("PUT", target, malformed).code == "MalformedXML"
    assert tags_of(s3, bucket) == {}
    assert wire.call("PUT", target, body).status == 200
    assert wire.call("DELETE", target).status == 204
    header = {"x-amz-tagging": "a=1&a=2"}
    assert wire.call("PUT", f"/{bucket}/k", b"1", headers=header).code == "InvalidArgument"


def test_tags_survive_many_changes(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    s3.put_object(Body=b"x" * 300_000, **where)
    for i in range(20):
        s3.put_object_tagging(Tagging=as_set({"n": str(i)}), **where)
    assert tags_of(s3, bucket) == {"n": "19"}
    assert len(s3.get_object(**where)["Body"].read()) == 300_000
