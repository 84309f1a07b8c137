"""Buckets, users and refusals, through boto3."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.one_node import one_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

USERS = [
    {
        "user_id": name,
        "display_name": name.title(),
        "email": f"{name}@example.org",
        "access_key": f"AK{name.upper()}",
        "secret_key": f"secret-of-{name}",
    }
    for name in ("alice", "bob")
]


def code_of(excinfo: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = excinfo.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with users besides root."""
    users: Path = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with one_node(("--users", str(users))) as daemon:
        yield daemon


def client_of(daemon: Daemon, access_key: str, secret_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture(scope="module")
def alice(shared: Daemon) -> Any:
    return client_of(shared, "AKALICE", "secret-of-alice")


@pytest.fixture(scope="module")
def bob(shared: Daemon) -> Any:
    return client_of(shared, "AKBOB", "secret-of-bob")


@pytest.fixture(scope="module")
def root(shared: Daemon) -> Any:
    return client_of(shared, shared.access_key, shared.secret_key)


@pytest.fixture(scope="module")
def nobody(shared: Daemon) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=shared.endpoint,
        region_name="us-east-1",
        config=Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}),
    )


def fresh_name() -> str:
    return f"b-{uuid.uuid4().hex[:12]}"


def test_life_of_a_bucket(s3: Any) -> None:
    name = fresh_name()
    s3.create_bucket(Bucket=name)
    s3.create_bucket(Bucket=name)
    assert s3.head_bucket(Bucket=name)["BucketRegion"] == "us-east-1"
    assert s3.get_bucket_location(Bucket=name)["LocationConstraint"] is None
    assert name in [b["Name"] for b in s3.list_buckets()["Buckets"]]
    s3.put_object(Bucket=name, Key="k", Body=b"")
    with pytest.raises(ClientError) as excinfo:
        s3.delete_bucket(Bucket=name)
    assert code_of(excinfo) == (409, "BucketNotEmpty")
    s3.delete_object(Bucket=name, Key="k")
    s3.delete_bucket(Bucket=name)
    with pytest.raises(ClientError) as excinfo:
        s3.head_bucket(Bucket=name)
    assert code_of(excinfo) == (404, "404")
    attempts: tuple[Callable[[], object], ...] = (
        lambda: s3.delete_bucket(Bucket=name),
        lambda: s3.list_objects_v2(Bucket=name),
    )
    for refused in attempts:
        with pytest.raises(ClientError) as excinfo:
            refused()
        assert code_of(excinfo) == (404, "NoSuchBucket")
    with pytest.raises(ClientError) as excinfo:
        s3.put_object(Bucket=name, Key="k", Body=b"x")
    assert code_of(excinfo) == (404, "NoSuchBucket")


def test_uploads_in_progress_go_with_the_bucket(s3: Any) -> None:
    name = fresh_name()
    s3.create_bucket(Bucket=name)
    upload = s3.create_multipart_upload(Bucket=name, Key="k")["UploadId"]
    s3.upload_part(Bucket=name, Key="k", UploadId=upload, PartNumber=1, Body=b"x")
    s3.delete_bucket(Bucket=name)
    s3.create_bucket(Bucket=name)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=name)


def test_location_constraint_is_kept(s3: Any) -> None:
    name = fresh_name()
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assert s3.get_bucket_location(Bucket=name)["LocationConstraint"] == "eu-west-1"
    assert s3.head_bucket(Bucket=name)["BucketRegion"] == "eu-west-1"


@pytest.mark.parametrize("name", ["UPPER", "a_b", "a..b", "127.0.0.1", "-lead", "xn--x", "x" * 64])
def test_names_out_of_rule(s3: Any, name: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        s3.create_bucket(Bucket=name)
    assert code_of(excinfo) == (400, "InvalidBucketName")


def test_buckets_are_listed_in_pages(s3: Any) -> None:
    prefix = f"p-{uuid.uuid4().hex[:8]}-"
    names = [f"{prefix}{i:02}" for i in range(7)]
    for name in reversed(names):
        s3.create_bucket(Bucket=name)
    pages = s3.get_paginator("list_buckets").paginate(Prefix=prefix, PaginationConfig={"PageSize": 3})
    found = [[b["Name"] for b in page.get("Buckets", [])] for page in pages]
    assert [len(page) for page in found] == [3, 3, 1]
    assert [name for page in found for name in page] == names


def test_buckets_are_listed_by_region(s3: Any) -> None:
    prefix = f"r-{uuid.uuid4().hex[:8]}-"
    for number, region in enumerate(["eu-west-1", "eu-central-1", "eu-west-1"]):
        s3.create_bucket(Bucket=f"{prefix}{number}", CreateBucketConfiguration={"LocationConstraint": region})
    pages = s3.get_paginator("list_buckets").paginate(
        Prefix=prefix, BucketRegion="eu-west-1", PaginationConfig={"PageSize": 1}
    )
    found = [b for page in pages for b in page.get("Buckets", [])]
    assert [(b["Name"], b["BucketRegion"]) for b in found] == [
        (f"{prefix}0", "eu-west-1"),
        (f"{prefix}2", "eu-west-1"),
    ]
    assert not s3.list_buckets(Prefix=prefix, BucketRegion="us-west-2").get("Buckets")


def test_a_bucket_is_its_owners(alice: Any, bob: Any, root: Any, nobody: Any) -> None:
    name = fresh_name()
    alice.create_bucket(Bucket=name)
    alice.put_object(Bucket=name, Key="k", Body=b"mine")
    calls: tuple[Callable[[Any], object], ...] = (
        lambda client: client.get_object(Bucket=name, Key="k"),
        lambda client: client.put_object(Bucket=name, Key="k", Body=b"yours"),
        lambda client: client.delete_object(Bucket=name, Key="k"),
        lambda client: client.list_objects_v2(Bucket=name),
        lambda client: client.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "k"}]}),
        lambda client: client.create_multipart_upload(Bucket=name, Key="k"),
        lambda client: client.delete_bucket(Bucket=name),
    )
    for stranger in (bob, nobody):
        for call in calls:
            with pytest.raises(ClientError) as excinfo:
                call(stranger)
            assert code_of(excinfo) == (403, "AccessDenied")
    assert root.get_object(Bucket=name, Key="k")["Body"].read() == b"mine"
    assert alice.get_object(Bucket=name, Key="k")["Body"].read() == b"mine"


def test_a_copy_reads_its_source_as_the_caller(alice: Any, bob: Any) -> None:
    hers, his = fresh_name(), fresh_name()
    alice.create_bucket(Bucket=hers)
    bob.create_bucket(Bucket=his)
    alice.put_object(Bucket=hers, Key="k", Body=b"secret")
    source = {"Bucket": hers, "Key": "k"}
    with pytest.raises(ClientError) as excinfo:
        bob.copy_object(Bucket=his, Key="k", CopySource=source)
    assert code_of(excinfo) == (403, "AccessDenied")
    upload = bob.create_multipart_upload(Bucket=his, Key="k")["UploadId"]
    with pytest.raises(ClientError) as excinfo:
        bob.upload_part_copy(Bucket=his, Key="k", UploadId=upload, PartNumber=1, CopySource=source)
    assert code_of(excinfo) == (403, "AccessDenied")


def test_names_are_shared_by_all_users(alice: Any, bob: Any, root: Any) -> None:
    name = fresh_name()
    alice.create_bucket(Bucket=name)
    alice.create_bucket(Bucket=name)
    with pytest.raises(ClientError) as excinfo:
        bob.create_bucket(Bucket=name)
    assert code_of(excinfo) == (409, "BucketAlreadyExists")
    assert name in [b["Name"] for b in alice.list_buckets()["Buckets"]]
    assert name not in [b["Name"] for b in bob.list_buckets()["Buckets"]]
    assert name in [b["Name"] for b in root.list_buckets()["Buckets"]]


def test_anonymous(nobody: Any, root: Any) -> None:
    name = fresh_name()
    root.create_bucket(Bucket=name)
    with pytest.raises(ClientError) as excinfo:
        nobody.get_object(Bucket=name, Key="k")
    assert code_of(excinfo) == (403, "AccessDenied")
    with pytest.raises(ClientError) as excinfo:
        nobody.get_object(Bucket=fresh_name(), Key="k")
    assert code_of(excinfo) == (404, "NoSuchBucket")
    with pytest.raises(ClientError) as excinfo:
        nobody.list_buckets()
    assert code_of(excinfo) == (403, "AccessDenied")
    with pytest.raises(ClientError) as excinfo:
        nobody.create_bucket(Bucket=fresh_name())
    assert code_of(excinfo) == (403, "AccessDenied")


def test_wrong_keys(shared: Daemon) -> None:
    with pytest.raises(ClientError) as excinfo:
        client_of(shared, "AKNOBODY", "x").list_buckets()
    assert code_of(excinfo) == (403, "InvalidAccessKeyId")
    with pytest.raises(ClientError) as excinfo:
        client_of(shared, "AKALICE", "guess").list_buckets()
    assert code_of(excinfo) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize(
    "call",
    [
        lambda s3, b: s3.get_object_torrent(Bucket=b, Key="k"),
        lambda s3, b: s3.get_object_legal_hold(Bucket=b, Key="k"),
        lambda s3, b: s3.restore_object(Bucket=b, Key="k"),
    ],
)
def test_what_is_not_built_says_so(s3: Any, bucket: str, call: Any) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"kept")
    with pytest.raises(ClientError) as excinfo:
        call(s3, bucket)
    assert code_of(excinfo) == (501, "NotImplemented")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"kept"
