"""Members of archives as any S3 client reads them: by query, by key, listed, presigned, copied."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from boto3.s3.transfer import TransferConfig
from botocore.auth import HmacV1QueryAuth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.support.archive_files import KINDS, archive_of, tar_of
from tests.support.daemons import Daemon

_source = random.Random(5)
FILES = {
    "a/0001.jpg": _source.randbytes(70_000),
    "a/0001.json": b'{"class": 7}',
    "a/0002.jpg": _source.randbytes(300_000),
    "b/ü +?.txt": b"text",
    "empty": b"",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_read_by_key_with_boto3(s3: Any, bucket: str, kind: str) -> None:
    key = f"shards/x.{kind}"
    s3.put_object(Bucket=bucket, Key=key, Body=archive_of(kind, FILES))
    for name, data in FILES.items():
        where = {"Bucket": bucket, "Key": f"{key}/-/{name}"}
        head, got = s3.head_object(**where), s3.get_object(**where)
        assert got["Body"].read() == data
        assert head["ContentLength"] == len(data)
        assert head["ETag"] == got["ETag"]
        if data:
            part = s3.get_object(**where, Range="bytes=2-99")
            assert part["Body"].read() == data[2:100]
            assert part["ContentRange"] == f"bytes 2-{min(99, len(data) - 1)}/{len(data)}"
            with pytest.raises(ClientError, match="304"):
                s3.get_object(**where, IfNoneMatch=head["ETag"])
            with pytest.raises(ClientError, match="PreconditionFailed"):
                s3.get_object(**where, IfMatch='"other"')
    assert s3.head_object(Bucket=bucket, Key=f"{key}/-/a/0001.jpg")["ContentType"] == "image/jpeg"
    with pytest.raises(ClientError, match="NoSuchKey") as caught:
        s3.get_object(Bucket=bucket, Key=f"{key}/-/a/0003.jpg")
    assert caught.value.response["Error"]["Member"] == "a/0003.jpg"
    with pytest.raises(ClientError, match="InvalidRange"):
        s3.get_object(Bucket=bucket, Key=f"{key}/-/empty", Range="bytes=0-1")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_member_is_read_by_query(daemon: Daemon, s3: Any, bucket: str, kind: str) -> None:
    s3.put_object(Bucket=bucket, Key=f"x.{kind}", Body=archive_of(kind, FILES))
    for name, data in FILES.items():
        target = f"/{bucket}/x.{kind}?member={quote(name, safe='')}"
        answer = daemon.request("GET", target)
        assert (answer.status, answer.body) == (200, data)
        by_key = s3.head_object(Bucket=bucket, Key=f"x.{kind}/-/{name}")
        assert answer.headers["etag"] == by_key["ETag"]
        head = daemon.request("HEAD", target)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
    for query, status in {
        "member=": 400,
        "member=none": 404,
        "member=a&members": 400,
        "members&max-keys=0": 400,
        "member=a&member=b": 400,
    }.items():
        assert daemon.request("GET", f"/{bucket}/x.{kind}?{query}").status == status, query
    s3.put_object(Bucket=bucket, Key="a.jpg", Body=b"x")
    assert daemon.request("GET", f"/{bucket}/a.jpg?member=a").status == 400
    assert daemon.request("PUT", f"/{bucket}/x.{kind}?member=a", b"x").status == 405


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_the_listing_tells_names_sizes_and_places(daemon: Daemon, s3: Any, bucket: str, kind: str) -> None:
    data = archive_of(kind, FILES)
    s3.put_object(Bucket=bucket, Key=f"x.{kind}", Body=data)
    found, after = [], ""
    while True:
        answer = daemon.request("GET", f"/{bucket}/x.{kind}?members&max-keys=2&start-after={quote(after)}")
        assert answer.headers["content-type"] == "application/json"
        page = json.loads(answer.body)
        assert (page["kind"], page["size"], page["count"]) == (kind, len(data), len(FILES))
        found += page["members"]
        if "next" not in page:
            break
        after = page["next"]
    assert [(each["name"], each["size"]) for each in found] == [(n, len(FILES[n])) for n in sorted(FILES)]
    for each in found:  # where the bytes lie plain, a range of the archive is the member
        assert ("offset" in each) == (kind == "tar")
        if kind == "tar":
            assert data[each["offset"] :][: each["size"]] == FILES[each["name"]]
    some = json.loads(daemon.request("GET", f"/{bucket}/x.{kind}?members&prefix=a/").body)
    assert [each["name"] for each in some["members"]] == [name for name in sorted(FILES) if name[:2] == "a/"]


def test_a_prefix_that_leads_into_an_archive_lists_its_members(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.tar.zst", Body=archive_of("tar.zst", FILES))
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix="x.tar.zst/-/", PaginationConfig={"PageSize": 2}
    )
    listed = [entry for page in pages for entry in page.get("Contents", ())]
    assert [entry["Key"] for entry in listed] == [f"x.tar.zst/-/{name}" for name in sorted(FILES)]
    for entry in listed:
        got = s3.get_object(Bucket=bucket, Key=entry["Key"])
        assert (entry["Size"], entry["ETag"]) == (got["ContentLength"], got["ETag"])
        got["Body"].close()
    folders = s3.list_objects_v2(Bucket=bucket, Prefix="x.tar.zst/-/", Delimiter="/")
    assert [each["Prefix"] for each in folders["CommonPrefixes"]] == ["x.tar.zst/-/a/", "x.tar.zst/-/b/"]
    assert [each["Key"] for each in folders["Contents"]] == ["x.tar.zst/-/empty"]
    assert [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["x.tar.zst"]


def test_a_stored_key_is_never_a_member(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.tar", Body=tar_of({"a": b"member", "b": b"member"}))
    s3.put_object(Bucket=bucket, Key="x.tar/-/a", Body=b"stored")
    assert s3.get_object(Bucket=bucket, Key="x.tar/-/a")["Body"].read() == b"stored"
    assert s3.get_object(Bucket=bucket, Key="x.tar/-/b")["Body"].read() == b"member"
    listed = s3.list_objects_v2(Bucket=bucket, Prefix="x.tar/-/")["Contents"]
    assert [entry["Key"] for entry in listed] == ["x.tar/-/a"]
    s3.delete_object(Bucket=bucket, Key="x.tar/-/a")
    assert s3.get_object(Bucket=bucket, Key="x.tar/-/a")["Body"].read() == b"member"
    # nor is one that was deleted where versions are kept
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    s3.put_object(Bucket=bucket, Key="x.tar/-/a", Body=b"stored")
    s3.delete_object(Bucket=bucket, Key="x.tar/-/a")
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.get_object(Bucket=bucket, Key="x.tar/-/a")


def test_members_follow_the_archive_and_its_versions(daemon: Daemon, s3: Any, bucket: str) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    first = s3.put_object(Bucket=bucket, Key="x.tgz", Body=archive_of("tgz", {"a": b"one"}))["VersionId"]
    old = s3.head_object(Bucket=bucket, Key="x.tgz/-/a")
    s3.put_object(Bucket=bucket, Key="x.tgz", Body=archive_of("tgz", {"a": b"two"}))
    new = s3.get_object(Bucket=bucket, Key="x.tgz/-/a")
    assert new["Body"].read() == b"two"
    assert old["ETag"] != new["ETag"]
    assert old["VersionId"] == first != new["VersionId"]
    earlier = s3.get_object(Bucket=bucket, Key="x.tgz/-/a", VersionId=first)
    assert earlier["Body"].read() == b"one"
    assert daemon.request("GET", f"/{bucket}/x.tgz?member=a&versionId={first}").body == b"one"


def test_a_presigned_url_reads_one(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.zip", Body=archive_of("zip", FILES))
    where = {"Bucket": bucket, "Key": "x.zip/-/a/0001.json"}
    url = s3.generate_presigned_url("get_object", Params=where)
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.read() == FILES["a/0001.json"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.replace("0001.json", "0001.jpg"), timeout=60)


def test_a_query_may_be_presigned_too(daemon: Daemon, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.tar", Body=archive_of("tar", FILES))
    keys = Credentials(daemon.access_key, daemon.secret_key)

    def url(signer: Any, query: str) -> str:
        request = AWSRequest("GET", f"{daemon.endpoint}/{bucket}/x.tar?{query}")
        signer.add_auth(request)
        return str(request.url)

    made = url(S3SigV4QueryAuth(keys, "s3", "us-east-1", expires=60), "member=a%2F0001.json")
    with urllib.request.urlopen(made, timeout=60) as answer:
        assert answer.read() == FILES["a/0001.json"]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(made.replace("0001.json", "0001.jpg"), timeout=60)
    # version 2 does not sign it, so that it could be changed on the way
    with pytest.raises(urllib.error.HTTPError, match=r"40[03]"):
        urllib.request.urlopen(url(HmacV1QueryAuth(keys, expires=60), "member=empty"), timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_copied_out(s3: Any, bucket: str, kind: str) -> None:
    s3.put_object(Bucket=bucket, Key=f"x.{kind}", Body=archive_of(kind, FILES))
    for name, data in FILES.items():
        s3.copy_object(Bucket=bucket, Key="out", CopySource={"Bucket": bucket, "Key": f"x.{kind}/-/{name}"})
        assert s3.get_object(Bucket=bucket, Key="out")["Body"].read() == data
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.copy_object(Bucket=bucket, Key="out", CopySource=f"{bucket}/x.{kind}/-/none")


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_a_large_member_is_copied_in_parts(s3: Any, bucket: str, kind: str) -> None:
    data = random.Random(6).randbytes(12 << 20)
    s3.put_object(Bucket=bucket, Key=f"x.{kind}", Body=archive_of(kind, {"small": b"x", "large": data}))
    source = {"Bucket": bucket, "Key": f"x.{kind}/-/large"}
    s3.copy(
        source, bucket, "out", Config=TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    )
    head = s3.head_object(Bucket=bucket, Key="out")
    assert head["ETag"].endswith('-3"')
    assert s3.get_object(Bucket=bucket, Key="out")["Body"].read() == data


def test_what_is_damaged_is_refused_by_name(daemon: Daemon, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="x.tgz", Body=archive_of("tgz", FILES)[:-7])
    for _ in range(2):
        with pytest.raises(ClientError, match=r"x\.tgz cannot be read as an archive: the gzip"):
            s3.get_object(Bucket=bucket, Key="x.tgz/-/empty")
    assert daemon.request("GET", f"/{bucket}/x.tgz?members").status == 422
    assert s3.get_object(Bucket=bucket, Key="x.tgz")["Body"].read()  # itself it is an object like others


USERS = [
    {"user_id": name, "access_key": f"AK{name.upper()}", "secret_key": f"secret-of-{name}"}
    for name in ("ann", "bob")
]


def test_the_archives_key_decides_who_reads_its_members(tmp_path: Any) -> None:
    users = tmp_path / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with Daemon.start(args=("--users", str(users))) as running:
        ann, bob = [
            running.client(aws_access_key_id=f"AK{name}", aws_secret_access_key=f"secret-of-{name.lower()}")
            for name in ("ANN", "BOB")
        ]
        ann.create_bucket(Bucket="shared")
        for key in ("open.tar", "closed.tar"):
            ann.put_object(Bucket="shared", Key=key, Body=tar_of({"a": b"x"}))
        resources = ["open.tar", "closed.tar/-/*"]
        statement = {
            "Effect": "Allow",
            "Principal": {"AWS": "bob"},
            "Action": ["s3:GetObject", "s3:ListBucket"],
            "Resource": ["arn:aws:s3:::shared", *[f"arn:aws:s3:::shared/{key}" for key in resources]],
        }
        ann.put_bucket_policy(Bucket="shared", Policy=json.dumps({"Statement": [statement]}))
        assert bob.get_object(Bucket="shared", Key="open.tar/-/a")["Body"].read() == b"x"
        with pytest.raises(ClientError, match="AccessDenied"):
            bob.get_object(Bucket="shared", Key="closed.tar/-/a")
        with pytest.raises(ClientError, match="AccessDenied"):
            bob.copy_object(Bucket="shared", Key="b", CopySource="shared/closed.tar/-/a")
        assert "Contents" in bob.list_objects_v2(Bucket="shared", Prefix="open.tar/-/")
        assert "Contents" not in bob.list_objects_v2(Bucket="shared", Prefix="closed.tar/-/")
        ann.close()
        bob.close()


def test_members_of_a_views_objects_are_not_read(daemon: Daemon, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="a.jpg", Body=b"x")
    view = {"bucket": bucket, "name": "tars", "view": {"kind": "shards", "count": 1}}
    assert daemon.request("POST", "/-/views", json.dumps(view).encode()).status == 200
    answer = daemon.request("GET", f"/{bucket}--tars/shard-000000.tar?member=a.jpg")
    assert answer.status == 501
