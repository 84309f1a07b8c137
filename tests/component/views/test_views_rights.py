"""Views made with keys that may not read all of the source: what is denied stays so, a folder that is
allowed whole can be shown."""

from __future__ import annotations

import contextlib
import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.s3_raw import Answer

EVERYTHING = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
SHARDS = {"kind": "shards", "count": 10}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as running:
        yield running


class Ann:
    """A user who owns a bucket with a secret in it."""

    def __init__(self, node: Daemon) -> None:
        self.node, self.bucket = node, f"acme-{uuid.uuid4().hex[:8]}"
        user = json.dumps({"user_id": f"ann-{self.bucket}"}).encode()
        node.request("POST", "/-/admin/users", user)
        key = json.loads(node.request("POST", "/-/admin/keys", user).body)
        self.wires = contextlib.ExitStack()
        self.wire = self._wire(key["access_key"], key["secret_key"])
        assert self.wire.call("PUT", f"/{self.bucket}").status == 200
        for target in ("/secret/a.txt", "/pub/b.txt"):
            body = f"this is {target}".encode()
            assert self.wire.call("PUT", f"/{self.bucket}{target}", body).status == 200

    def _wire(self, access: str, secret: str, token: str | None = None) -> Wire:
        return self.wires.enter_context(
            contextlib.closing(Wire(self.node.endpoint, access, secret, session_token=token))
        )

    def session(self, *statements: dict[str, Any]) -> Wire:
        """Temporary credentials within these statements."""
        policy = {"Version": "2012-10-17", "Statement": [_filled(each, self.bucket) for each in statements]}
        made = json.loads(self.wire.call("POST", "/-/sts", json.dumps({"policy": policy}).encode()).body)
        return self._wire(made["AccessKeyId"], made["SecretAccessKey"], made["SessionToken"])

    def put_policy(self, *statements: dict[str, Any]) -> None:
        filled = [_filled(each, self.bucket) for each in statements]
        policy = json.dumps({"Version": "2012-10-17", "Statement": filled}).encode()
        assert self.wire.call("PUT", f"/{self.bucket}?policy", policy).status == 204

    def make(self, wire: Wire, view: dict[str, Any] = SHARDS, name: str = "v") -> Answer:
        body = {"bucket": self.bucket, "name": name, "view": view}
        return wire.call("POST", "/-/views", json.dumps(body).encode())


def _filled(statement: dict[str, Any], bucket: str) -> dict[str, Any]:
    filled: dict[str, Any] = json.loads(json.dumps(statement).replace("BUCKET", bucket))
    return filled


@pytest.fixture
def ann(node: Daemon) -> Iterator[Ann]:
    found = Ann(node)
    with found.wires:
        yield found


def deny(**more: Any) -> dict[str, Any]:
    resource = {} if "NotResource" in more else {"Resource": "arn:aws:s3:::BUCKET/secret/*"}
    return {"Effect": "Deny", "Action": ["s3:GetObject", "s3:GetObjectVersion"], **resource, **more}


def allow(*resources: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": ["s3:*"], "Resource": [f"arn:aws:s3:::{each}" for each in resources]}


BY_TAG = {"StringEquals": {"s3:ExistingObjectTag/secret": "yes"}}
ROOMS = ("BUCKET", "BUCKET--v", "BUCKET--v/*")


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param((EVERYTHING, deny()), id="a folder denied"),
        pytest.param((EVERYTHING, deny(Resource="arn:aws:s3:::*/secret/a.???")), id="by wildcards"),
        pytest.param((EVERYTHING, deny(NotResource="arn:aws:s3:::BUCKET/pub/*")), id="all but a folder"),
        pytest.param((EVERYTHING, deny(Resource="*", Condition=BY_TAG)), id="by a tag"),
        pytest.param((allow(*ROOMS, "BUCKET/?"),), id="keys of one character"),
        pytest.param((allow(*ROOMS, "BUCKET/pub/*"),), id="another folder"),
        pytest.param((allow(*ROOMS, "BUCKET/[*]", "BUCKET/${*}"),), id="a key named asterisk"),
    ],
)
def test_a_view_does_not_show_what_its_maker_may_not_read(ann: Ann, statements: Any) -> None:
    pod = ann.session(*statements)
    answer = ann.make(pod)
    assert answer.status == 403, answer.body
    error = json.loads(answer.body)["error"]
    assert error["code"] == "AccessDenied"
    assert "may not do s3:GetObject" in error["message"]
    assert "prefix" in error["help"]
    assert pod.call("GET", f"/{ann.bucket}--v/shard-000000.tar").status in (403, 404)


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param((EVERYTHING,), id="everything"),
        pytest.param((EVERYTHING, deny(Resource="arn:aws:s3:::another/*")), id="denied elsewhere"),
        pytest.param((EVERYTHING, deny(Action="s3:DeleteObject")), id="another action"),
        pytest.param((allow(*ROOMS, "BUCKET/*"),), id="the bucket"),
    ],
)
def test_a_key_that_may_read_every_object_makes_views(ann: Ann, statements: Any) -> None:
    pod = ann.session(*statements)
    assert ann.make(pod).status == 200
    assert b"this is /secret/a.txt" in pod.call("GET", f"/{ann.bucket}--v/shard-000000.tar").body


def test_a_folder_that_may_be_read_whole_can_be_shown(ann: Ann) -> None:
    for statements in ((EVERYTHING, deny()), (allow(*ROOMS, "BUCKET/pub/*"),)):
        pod = ann.session(*statements)
        assert ann.make(pod, {**SHARDS, "prefix": "pub/"}).status == 200
        assert ann.make(pod, {**SHARDS, "prefix": "secret/"}, "w").status == 403
        body = pod.call("GET", f"/{ann.bucket}--v/shard-000000.tar").body
        assert b"this is /pub/b.txt" in body
        assert b"this is /secret" not in body


def test_a_key_that_may_not_list_makes_no_view(ann: Ann) -> None:
    pod = ann.session(EVERYTHING, {"Effect": "Deny", "Action": "s3:ListBucket", "Resource": "*"})
    answer = ann.make(pod)
    assert answer.status == 403
    assert b"s3:ListBucket" in answer.body


def test_a_bucket_policy_that_denies_its_owner_counts_for_views(ann: Ann) -> None:
    ann.put_policy({**deny(), "Principal": "*"})
    assert ann.make(ann.wire).status == 403
    ann.put_policy(  # what others may read, or may not, is nothing to the owner
        {**deny(Condition=BY_TAG), "Principal": {"AWS": "arn:aws:iam:::user/somebody"}},
        {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::BUCKET/*"}
        | {"Condition": BY_TAG},
    )
    assert ann.make(ann.wire).status == 200
