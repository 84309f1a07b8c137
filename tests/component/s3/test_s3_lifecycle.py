"""Lifecycle configurations and what they do, through boto3."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from meshd.objects.buckets.service import BROADCAST_TIMEOUT_S
from meshd.util.clock import SystemClock
from tests.component.s3.test_s3_settings import refusal
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

_clock = SystemClock()
RULES: list[dict[str, Any]] = [
    {"ID": "old", "Prefix": "tmp/", "Status": "Enabled", "Expiration": {"Days": 1}},
    {"ID": "new", "Filter": {"Prefix": "logs/"}, "Status": "Disabled", "Expiration": {"Days": 30}},
    {
        "ID": "both",
        "Filter": {
            "And": {
                "Prefix": "p",
                "Tags": [{"Key": "keep", "Value": "no"}],
                "ObjectSizeGreaterThan": 1,
                "ObjectSizeLessThan": 1000,
            }
        },
        "Status": "Enabled",
        "NoncurrentVersionExpiration": {"NoncurrentDays": 3, "NewerNoncurrentVersions": 2},
    },
    {
        "ID": "uploads",
        "Filter": {},
        "Status": "Enabled",
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    },
]


def test_a_configuration_reads_back(s3: Any, bucket: str) -> None:
    missing = (404, "NoSuchLifecycleConfiguration")
    assert refusal(lambda: s3.get_bucket_lifecycle_configuration(Bucket=bucket)) == missing
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": RULES})
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == RULES
    s3.delete_bucket_lifecycle(Bucket=bucket)
    assert refusal(lambda: s3.get_bucket_lifecycle_configuration(Bucket=bucket)) == missing


def test_a_bad_configuration_changes_nothing(s3: Any, bucket: str) -> None:
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": RULES})
    moves = {
        "ID": "m",
        "Filter": {},
        "Status": "Enabled",
        "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}],
    }
    bad = {"Rules": [moves]}
    put = refusal(lambda: s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=bad))
    assert put == (501, "NotImplemented")
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == RULES


def known_everywhere(client: Any, bucket: str, rules: list[dict[str, Any]]) -> bool:
    """Put the rules; whether all nodes of a mesh go by them then. One that is `PATIENCE` seconds late is not
    waited for, and goes by the old ones for a while: an answer that took so long says nothing of it."""
    began = _clock.monotonic()
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    return _clock.monotonic() - began < BROADCAST_TIMEOUT_S


def test_answers_tell_when_an_object_expires(s3: Any, bucket: str) -> None:
    day, tagged = {"Days": 1}, {"Tag": {"Key": "keep", "Value": "no"}}
    rules = [
        {"ID": "tmp files", "Filter": {"Prefix": "tmp/"}, "Status": "Enabled", "Expiration": day},
        {"ID": "tagged", "Filter": tagged, "Status": "Enabled", "Expiration": day},
    ]
    await_true(lambda: known_everywhere(s3, bucket, rules))
    put = s3.put_object(Bucket=bucket, Key="tmp/a", Body=b"x")
    head = s3.head_object(Bucket=bucket, Key="tmp/a")
    midnight = head["LastModified"].replace(hour=0, minute=0, second=0) + timedelta(days=2)
    told = f'expiry-date="{midnight:%a, %d %b %Y} 00:00:00 GMT", rule-id="tmp%20files"'
    upload = s3.create_multipart_upload(Bucket=bucket, Key="tmp/m")["UploadId"]
    part = s3.upload_part(Bucket=bucket, Key="tmp/m", UploadId=upload, PartNumber=1, Body=b"x")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    for answer in (
        put,
        head,
        s3.get_object(Bucket=bucket, Key="tmp/a"),
        s3.get_object(Bucket=bucket, Key="tmp/a", Range="bytes=0-0"),
        s3.head_object(Bucket=bucket, Key="tmp/a", PartNumber=1),
        *(  # nodes of a mesh that have the source, and others
            s3.copy_object(Bucket=bucket, Key=f"tmp/b{number}", CopySource=f"{bucket}/tmp/a")
            for number in range(8)
        ),
        s3.complete_multipart_upload(Bucket=bucket, Key="tmp/m", UploadId=upload, MultipartUpload=parts),
    ):
        assert answer["Expiration"] == told
    assert "Expiration" not in s3.put_object(Bucket=bucket, Key="kept", Body=b"x")
    assert "Expiration" not in s3.head_object(Bucket=bucket, Key="kept")
    s3.put_object_tagging(Bucket=bucket, Key="kept", Tagging={"TagSet": [tagged["Tag"]]})
    assert 'rule-id="tagged"' in s3.head_object(Bucket=bucket, Key="kept")["Expiration"]


@pytest.fixture(scope="module")
def eager() -> Iterator[Daemon]:
    """A daemon that looks for what expires all the time."""
    with Daemon.start(args=("--lifecycle-interval", "0.2")) as daemon:
        yield daemon


def past(prefix: str, **more: Any) -> dict[str, Any]:
    """A rule whose day has come."""
    rule = {"ID": "past", "Filter": {"Prefix": prefix}, "Status": "Enabled"}
    return {"Rules": [rule | {"Expiration": {"Date": datetime(2020, 1, 1, tzinfo=UTC)}} | more]}


def listed(client: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def expired(daemon: Daemon) -> float:
    with urlopen(f"{daemon.endpoint}/metrics") as answer:
        found = re.findall(
            r'^meshd_lifecycle_expired_total\{action="expire"\} (\S+)', answer.read().decode(), re.M
        )
    return sum(map(float, found))


def test_the_coordinator_removes_what_is_due(eager: Daemon) -> None:
    client, before, plain = eager.client(), expired(eager), f"plain-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=plain)
    for key in ("tmp/a", "tmp/b", "kept"):
        client.put_object(Bucket=plain, Key=key, Body=b"x")
    client.put_bucket_lifecycle_configuration(Bucket=plain, LifecycleConfiguration=past("tmp/"))
    await_true(lambda: listed(client, plain) == ["kept"])
    assert client.get_object(Bucket=plain, Key="kept")["Body"].read() == b"x"
    await_true(lambda: expired(eager) == before + 2)
    client.close()


def test_in_a_bucket_with_versioning_a_marker_hides_it(eager: Daemon) -> None:
    client, before, versioned = eager.client(), expired(eager), f"versioned-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=versioned)
    client.put_bucket_versioning(Bucket=versioned, VersioningConfiguration={"Status": "Enabled"})
    client.put_object(Bucket=versioned, Key="k", Body=b"x")
    client.put_bucket_lifecycle_configuration(Bucket=versioned, LifecycleConfiguration=past(""))
    await_true(lambda: not listed(client, versioned))
    found = client.list_object_versions(Bucket=versioned)
    assert [marker["IsLatest"] for marker in found["DeleteMarkers"]] == [True]
    assert len(found["Versions"]) == 1
    await_true(lambda: expired(eager) == before + 1)  # it is counted after it was done
    client.close()
