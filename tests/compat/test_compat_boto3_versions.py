"""boto3's resources and paginators over versioned buckets: what backup and data versioning tools do."""

from __future__ import annotations

import io
import os
import uuid
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

MIB = 1 << 20


@pytest.fixture
def bucket(daemon: Daemon) -> Iterator[Any]:
    resource = boto3.session.Session().resource(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
    )
    bucket = resource.create_bucket(Bucket=f"versions-{uuid.uuid4().hex[:10]}")
    bucket.Versioning().enable()
    yield bucket
    bucket.object_versions.delete()
    bucket.delete()
    resource.meta.client.close()


def test_the_history_of_an_object(bucket: Any) -> None:
    assert bucket.Versioning().status == "Enabled"
    for i in range(5):
        bucket.put_object(Key="data.bin", Body=b"version %d" % i)
    history = list(bucket.object_versions.filter(Prefix="data.bin"))
    assert [version.is_latest for version in history] == [True, False, False, False, False]
    bodies = [version.get()["Body"].read() for version in history]
    assert bodies == [b"version %d" % i for i in (4, 3, 2, 1, 0)]
    assert [version.head()["ContentLength"] for version in history] == [9] * 5
    assert len({version.id for version in history}) == 5


def test_a_deleted_object_is_restored(bucket: Any) -> None:
    bucket.put_object(Key="k", Body=b"precious")
    bucket.Object("k").delete()
    with pytest.raises(ClientError) as excinfo:
        bucket.Object("k").load()
    assert excinfo.value.response["ResponseMetadata"]["HTTPHeaders"]["x-amz-delete-marker"] == "true"
    assert list(bucket.objects.all()) == []
    markers = [version for version in bucket.object_versions.filter(Prefix="k") if version.size is None]
    assert [marker.is_latest for marker in markers] == [True]
    markers[0].delete()
    assert bucket.Object("k").get()["Body"].read() == b"precious"


def test_an_old_version_is_made_current_by_a_copy(bucket: Any) -> None:
    first = bucket.put_object(Key="k", Body=b"first", Metadata={"m": "1"})
    old = first.version_id
    bucket.put_object(Key="k", Body=b"second")
    bucket.Object("k").copy_from(CopySource={"Bucket": bucket.name, "Key": "k", "VersionId": old})
    current = bucket.Object("k").get()
    assert (current["Body"].read(), current["Metadata"]) == (b"first", {"m": "1"})
    assert len(list(bucket.object_versions.all())) == 3


@pytest.mark.parametrize("size", [0, 17 * MIB])
def test_transfers_of_versions(bucket: Any, size: int) -> None:
    old, new = os.urandom(size), os.urandom(size + 1)
    for data in (old, new):
        bucket.upload_fileobj(io.BytesIO(data), "k")
    before = [v.id for v in bucket.object_versions.filter(Prefix="k")][1]
    got = io.BytesIO()
    bucket.download_fileobj("k", got, ExtraArgs={"VersionId": before})
    assert got.getvalue() == old
    source = {"Bucket": bucket.name, "Key": "k", "VersionId": before}
    bucket.copy(source, "copy", Config=TransferConfig(multipart_threshold=8 * MIB))
    assert bucket.Object("copy").get()["Body"].read() == old


def test_a_bucket_is_emptied_of_all_versions(bucket: Any) -> None:
    for i in range(30):
        bucket.put_object(Key=f"k{i % 7}", Body=b"x")
    bucket.objects.all().delete()
    assert list(bucket.objects.all()) == []
    assert len(list(bucket.object_versions.page_size(4))) == 37
    bucket.object_versions.all().delete()
    assert list(bucket.object_versions.all()) == []


def test_suspended(bucket: Any) -> None:
    bucket.put_object(Key="k", Body=b"kept")
    bucket.Versioning().suspend()
    assert bucket.Versioning().status == "Suspended"
    for body in (b"1", b"2"):
        bucket.put_object(Key="k", Body=body)
    assert [v.id == "null" for v in bucket.object_versions.filter(Prefix="k")] == [True, False]
    assert bucket.Object("k").get()["Body"].read() == b"2"
    assert bucket.Object("k").version_id == "null"


def test_waiters_and_conditions_know_versions(bucket: Any) -> None:
    stored = bucket.put_object(Key="k", Body=b"1")
    stored.wait_until_exists()
    version = bucket.Object("k").Version(stored.version_id)
    assert version.head()["VersionId"] == stored.version_id
    client = bucket.meta.client
    with pytest.raises(ClientError) as excinfo:
        client.put_object(Bucket=bucket.name, Key="k", Body=b"2", IfNoneMatch="*")
    assert excinfo.value.response["Error"]["Code"] == "PreconditionFailed"
    client.put_object(Bucket=bucket.name, Key="k", Body=b"2", IfMatch=stored.e_tag)
    bucket.Object("k").delete()
    bucket.Object("k").wait_until_not_exists()
    client.put_object(Bucket=bucket.name, Key="k", Body=b"3", IfNoneMatch="*")
    assert bucket.Object("k").get()["Body"].read() == b"3"
