"""A tar in one PUT that becomes its members, as S3 Snowball and MinIO have it."""

from __future__ import annotations

import gzip
import json
import tarfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from meshd.objects.archive_upload import MAX_ARCHIVE_BYTES, MAX_MEMBERS
from tests.support.archives import UNPACK, tar_of

if TYPE_CHECKING:
    from tests.support.daemons import Daemon


def keys_of(s3: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def read(s3: Any, bucket: str, key: str) -> bytes:
    return bytes(s3.get_object(Bucket=bucket, Key=key)["Body"].read())


def test_members_become_objects(s3: Any, bucket: str) -> None:
    members = {
        "./a.txt": b"first",
        "/dir/é.json": b"{}",
        "large.bin": b"x" * 3_000_000,
        "empty": b"",
        "d/": None,
    }
    members |= {f"many/{number:03}": b"%d" % number for number in range(200)}
    pax = {"minio.metadata.Content-Type": "text/x-own", "minio.metadata.x-amz-meta-color": "blue"}
    names = {name.removeprefix("./").removeprefix("/"): data or b"" for name, data in members.items()}
    for turn, (prefix, packed) in enumerate(
        (("", tar_of(members, pax)), ("in/", gzip.compress(tar_of(members, pax))))
    ):
        answer = s3.put_object(
            Bucket=bucket,
            Key="batch.tar",
            Body=packed,
            Tagging="t=1",
            Metadata=UNPACK | ({"minio-snowball-prefix": "/in/"} if prefix else {}),
        )
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        assert headers["x-mesh-objects"] == str(len(names))
        wanted = sorted(prefix + name for name in names)
        assert [key for key in keys_of(s3, bucket) if key.startswith("in/") == bool(turn)] == wanted
        for name in ("a.txt", "dir/é.json", "large.bin", "empty", "d/", "many/007"):
            got = s3.get_object(Bucket=bucket, Key=prefix + name)
            assert got["Body"].read() == names[name]
            assert (got["ContentType"], got["Metadata"]) == ("text/x-own", {"color": "blue"})
            assert got["TagCount"] == 1
    assert "batch.tar" not in keys_of(s3, bucket)
    again = tar_of({"a.txt": b"second", "d/": None, "./a.txt": b"third"})
    s3.put_object(
        Bucket=bucket, Key="x", Body=again, Metadata=UNPACK | {"minio-snowball-ignore-dirs": "true"}
    )
    assert read(s3, bucket, "a.txt") == b"third"
    assert s3.head_object(Bucket=bucket, Key="d/")["Metadata"] == {"color": "blue"}


def test_members_whose_reads_are_not_verified_have_a_checksum(s3: Any, bucket: str) -> None:
    large = bytes(range(256)) * 513
    s3.put_object(Bucket=bucket, Key="x", Body=tar_of({"large": large, "small": b"1"}), Metadata=UNPACK)
    s3.put_object(Bucket=bucket, Key="alone", Body=large, ChecksumAlgorithm="CRC64NVME")
    found = {
        key: s3.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        for key in ("large", "small", "alone")
    }
    assert found["large"]["ChecksumCRC64NVME"] == found["alone"]["ChecksumCRC64NVME"]
    assert found["large"]["ChecksumType"] == "FULL_OBJECT"
    assert "ChecksumCRC64NVME" not in found["small"]


def test_members_are_versions_where_there_are_versions(s3: Any, bucket: str) -> None:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"2"):
        s3.put_object(Bucket=bucket, Key="x", Body=tar_of({"k": body, f"l{body!r}": b""}), Metadata=UNPACK)
    versions = s3.list_object_versions(Bucket=bucket, Prefix="k")["Versions"]
    bodies = [
        s3.get_object(Bucket=bucket, Key="k", VersionId=each["VersionId"])["Body"].read() for each in versions
    ]
    assert bodies == [b"2", b"1"]


@pytest.mark.parametrize(
    ("packed", "code", "why"),
    [
        (b"junk" * 300, "InvalidArgument", "is not a tar archive"),
        (tar_of({"a": b"1", "b": b"2" * 5000})[:4000], "InvalidArgument", "a tar archive, or is damaged"),
        (gzip.compress(tar_of({"a": b"1"}))[:-9], "InvalidArgument", "is truncated"),
        (b"\x1f\x8bjunk", "InvalidArgument", "cannot be decompressed"),
        (
            tar_of({"a": b""}, kind=tarfile.GNUTYPE_LONGNAME)[:512] * 20_000,
            "InvalidArgument",
            "or is damaged",
        ),
        (b"\x28\xb5\x2f\xfd" + b"junk", "InvalidArgument", "use gzip"),
        (tar_of({"fine": b"1", "a/../../b": b"2"}), "InvalidArgument", "leads out of the archive"),
        (
            tar_of({"fine": b"1", "link": b""}, kind=tarfile.SYMTYPE),
            "InvalidArgument",
            "neither a file nor a folder",
        ),
        (tar_of({"fine": b"1", "k" * 1025: b"2"}), "KeyTooLongError", "at most 1024"),
        (gzip.compress(bytes(MAX_ARCHIVE_BYTES + 1)), "EntityTooLarge", "Send several archives"),
        (
            tar_of({str(number): b"" for number in range(MAX_MEMBERS + 1)}),
            "EntityTooLarge",
            "more than 10000 members",
        ),
        (
            tar_of({"fine": b"1", "b": b""}, {"minio.metadata.x-amz-meta-a b": "c"}),
            "InvalidArgument",
            "metadata name",
        ),
    ],
    ids=[
        "junk",
        "cut",
        "cut-gzip",
        "junk-gzip",
        "nested",
        "zstd",
        "outside",
        "link",
        "long",
        "bomb",
        "many",
        "metadata",
    ],
)
def test_of_a_bad_archive_nothing_is_stored(s3: Any, bucket: str, packed: bytes, code: str, why: str) -> None:
    with pytest.raises(ClientError) as refused:
        s3.put_object(Bucket=bucket, Key="x", Body=packed, Metadata=UNPACK)
    error = refused.value.response["Error"]
    assert error["Code"] == code
    assert why in error["Message"]
    assert keys_of(s3, bucket) == []


def test_members_that_cannot_be_objects_are_left_out_on_request(s3: Any, bucket: str) -> None:
    packed = tar_of({"../a": b"1", "fine": b"2", "k" * 1025: b"3"})
    ignore = UNPACK | {"minio-snowball-ignore-errors": "true"}
    answer = s3.put_object(Bucket=bucket, Key="x", Body=packed, Metadata=ignore)
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-mesh-objects"] == "1"
    assert keys_of(s3, bucket) == ["fine"]


def test_every_member_needs_the_right_to_be_written(s3: Any, bucket: str, daemon: Daemon) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{bucket}/open/*",
    }
    s3.put_bucket_policy(
        Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    )
    config = Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1})
    with closing(
        boto3.client("s3", endpoint_url=daemon.endpoint, region_name="us-east-1", config=config)
    ) as anybody:
        with pytest.raises(ClientError, match="AccessDenied"):
            anybody.put_object(
                Bucket=bucket, Key="open/x", Body=tar_of({"open/a": b"1", "shut/b": b"2"}), Metadata=UNPACK
            )
        assert keys_of(s3, bucket) == []
        anybody.put_object(Bucket=bucket, Key="open/x", Body=tar_of({"open/a": b"1"}), Metadata=UNPACK)
    assert keys_of(s3, bucket) == ["open/a"]


def test_an_archive_takes_no_conditions(s3: Any, bucket: str) -> None:
    with pytest.raises(ClientError, match="cannot have conditional headers"):
        s3.put_object(Bucket=bucket, Key="x", Body=tar_of({"a": b""}), Metadata=UNPACK, IfNoneMatch="*")
    s3.put_object(
        Bucket=bucket, Key="x", Body=b"stored as it is", Metadata={"snowball-auto-extract": "false"}
    )
    assert read(s3, bucket, "x") == b"stored as it is"
