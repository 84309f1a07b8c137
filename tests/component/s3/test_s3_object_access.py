"""What policies decide about single objects: tags in a request, deletions key by key, what is told."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from botocore.exceptions import ClientError

from tests.support.one_node import one_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemons import Daemon

USERS = [
    {"user_id": name, "access_key": f"AK{name.upper()}", "secret_key": f"secret-of-{name}"}
    for name in ("ann", "bob")
]
POLICY = {
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"AWS": "bob"},
            "Action": ["s3:GetObject", "s3:ListBucket", "s3:DeleteObject"],
            "Resource": ["arn:aws:s3:::shared", "arn:aws:s3:::shared/open/*"],
        },
        {
            "Effect": "Allow",
            "Principal": {"AWS": "bob"},
            "Action": "s3:PutObjectTagging",
            "Resource": "arn:aws:s3:::shared/open/*",
            "Condition": {"StringEquals": {"s3:RequestObjectTag/project": "x"}},
        },
        {
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": "arn:aws:s3:::shared/public",
        },
    ]
}


@pytest.fixture(scope="module")
def daemon_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with one_node(("--users", str(users))) as running:
        ann = client_of(running, "ann")
        ann.create_bucket(Bucket="shared")
        ann.put_bucket_versioning(Bucket="shared", VersioningConfiguration={"Status": "Enabled"})
        ann.put_bucket_policy(Bucket="shared", Policy=json.dumps(POLICY))
        ann.close()
        yield running


def client_of(daemon: Daemon, name: str) -> Any:
    keys = {"aws_access_key_id": f"AK{name.upper()}", "aws_secret_access_key": f"secret-of-{name}"}
    return daemon.client(**keys)


@pytest.fixture(scope="module")
def ann(daemon_of_two: Daemon) -> Iterator[Any]:
    client = client_of(daemon_of_two, "ann")
    yield client
    client.close()


@pytest.fixture(scope="module")
def bob(daemon_of_two: Daemon) -> Iterator[Any]:
    client = client_of(daemon_of_two, "bob")
    yield client
    client.close()


def refused(call: Callable[..., Any], **options: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    answer = excinfo.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def tagged(value: str) -> dict[str, Any]:
    return {"TagSet": [{"Key": "project", "Value": value}]}


def test_tags_in_the_body_count_for_the_policy(ann: Any, bob: Any) -> None:
    where = {"Bucket": "shared", "Key": "open/k"}
    ann.put_object(Body=b"1", **where)
    assert refused(bob.put_object_tagging, Tagging=tagged("y"), **where) == (403, "AccessDenied")
    assert ann.get_object_tagging(**where)["TagSet"] == []
    bob.put_object_tagging(Tagging=tagged("x"), **where)
    assert ann.get_object_tagging(**where)["TagSet"] == tagged("x")["TagSet"]
    other = {"Bucket": "shared", "Key": "closed/k"}
    ann.put_object(Body=b"1", **other)
    assert refused(bob.put_object_tagging, Tagging=tagged("x"), **other) == (403, "AccessDenied")


def test_the_number_of_tags_is_told_to_who_may_read_them(ann: Any, bob: Any) -> None:
    where = {"Bucket": "shared", "Key": "open/counted"}
    ann.put_object(Body=b"1", Tagging="a=1&b=2", **where)
    name = "x-amz-tagging-count"
    assert ann.head_object(**where)["ResponseMetadata"]["HTTPHeaders"][name] == "2"
    assert name not in bob.head_object(**where)["ResponseMetadata"]["HTTPHeaders"]
    assert refused(bob.get_object_tagging, **where) == (403, "AccessDenied")


def test_deletions_are_decided_key_by_key(ann: Any, bob: Any) -> None:
    versions = {
        key: ann.put_object(Bucket="shared", Key=key, Body=b"1")["VersionId"]
        for key in ("open/d1", "open/d2", "closed/d")
    }
    objects = [
        {"Key": "open/d1"},
        {"Key": "closed/d"},
        {"Key": "open/d2", "VersionId": versions["open/d2"]},
    ]
    answer = bob.delete_objects(Bucket="shared", Delete={"Objects": objects})
    assert [entry["Key"] for entry in answer["Deleted"]] == ["open/d1"]
    refusals = {(e["Key"], e.get("VersionId"), e["Code"]) for e in answer["Errors"]}
    assert refusals == {
        ("closed/d", None, "AccessDenied"),
        ("open/d2", versions["open/d2"], "AccessDenied"),
    }
    for key in ("closed/d", "open/d2"):
        assert ann.head_object(Bucket="shared", Key=key)["VersionId"] == versions[key]
    assert refused(bob.get_object, Bucket="shared", Key="open/d2", VersionId=versions["open/d2"])[0] == 403


def test_who_did_not_sign_may_not_change_headers(ann: Any, daemon_of_two: Daemon) -> None:
    ann.put_object(Bucket="shared", Key="public", Body=b"here")
    url = f"{daemon_of_two.endpoint}/shared/public"
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"here"
    with pytest.raises(urllib.error.HTTPError) as excinfo:
        urllib.request.urlopen(f"{url}?response-content-type=text/html")
    with excinfo.value as refusal:
        assert refusal.code == 400
        assert b"<Code>InvalidRequest</Code>" in refusal.read()
