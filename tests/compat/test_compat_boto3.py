"""boto3's own transfer manager and resources: what most Python code does."""

from __future__ import annotations

import io
import os
import uuid
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

MIB = 1 << 20


@pytest.fixture
def bucket(daemon: Daemon) -> Any:
    session = boto3.session.Session()
    resource = session.resource(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
    )
    return resource.create_bucket(Bucket=f"boto-{uuid.uuid4().hex[:10]}")


@pytest.mark.parametrize("size", [0, 1, 8 * MIB - 1, 8 * MIB, 33 * MIB + 7])
def test_transfers(bucket: Any, size: int) -> None:
    data = os.urandom(size)
    extra = {"Metadata": {"m": "1"}, "ContentType": "image/png"}
    bucket.upload_fileobj(io.BytesIO(data), "up", ExtraArgs=extra)
    got = io.BytesIO()
    bucket.download_fileobj("up", got)
    assert got.getvalue() == data
    assert bucket.Object("up").metadata == {"m": "1"}
    bucket.copy(
        {"Bucket": bucket.name, "Key": "up"}, "copy", Config=TransferConfig(multipart_threshold=10 * MIB)
    )
    assert bucket.Object("copy").get()["Body"].read() == data


def test_a_stream_of_unknown_length(bucket: Any) -> None:
    class Stream(io.RawIOBase):
        left = 11 * MIB

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), self.left, 60_000)
            buffer[:size] = b"s" * size
            self.left -= size
            return size

    bucket.upload_fileobj(io.BufferedReader(Stream()), "k")
    assert bucket.Object("k").content_length == 11 * MIB


@pytest.mark.parametrize("key", ["a b+c", "ünï/😀", "//x//", "q?&=#%41", "~'()*!"])
def test_odd_keys(bucket: Any, key: str) -> None:
    bucket.put_object(Key=key, Body=key.encode())
    assert [summary.key for summary in bucket.objects.all()] == [key]
    assert bucket.Object(key).get()["Body"].read() == key.encode()
    bucket.objects.all().delete()
    assert list(bucket.objects.all()) == []


def test_many_objects(bucket: Any) -> None:
    for i in range(30):
        bucket.put_object(Key=f"d{i % 3}/k{i:02}", Body=b"x")
    assert len(list(bucket.objects.filter(Prefix="d1/").page_size(4))) == 10
    bucket.objects.filter(Prefix="d1/").delete()
    assert len(list(bucket.objects.all())) == 20
    bucket.objects.all().delete()
    bucket.delete()
