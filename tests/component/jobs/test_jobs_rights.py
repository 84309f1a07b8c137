"""A job that runs for long has the rights of each moment, not those of the one in which it began."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.archive_files import archive_of
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.job_fixtures import ended
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = {f"{number:03d}.bin": bytes(100) for number in range(900)}
SLOW = {"MESHD_FAILPOINTS": "jobs.output.done=sleep(15000):after 4"}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    """Each batch of outputs takes it a quarter of a minute."""
    with Daemon.start(env=SLOW) as running:
        yield running


class Ann:
    """A user with a key, whose job is under way."""

    def __init__(self, node: Daemon, name: str) -> None:
        self.node, self.name = node, name
        user = json.dumps({"user_id": name}).encode()
        node.request("POST", "/-/admin/users", user)
        key = json.loads(node.request("POST", "/-/admin/keys", user).body)
        self.access_key = key["access_key"]
        self.wire = Wire(node.endpoint, key["access_key"], key["secret_key"])
        self.s3 = node.client()
        for bucket in (f"{name}-from", f"{name}-to"):
            assert self.wire.call("PUT", f"/{bucket}").status == 200
        self.s3.put_object(Bucket=f"{name}-from", Key="a.tar", Body=archive_of("tar", FILES))

    def start(self, wire: Wire) -> dict[str, Any]:
        job = {"kind": "extract", "source": f"s3://{self.name}-from/", "target": f"s3://{self.name}-to/out"}
        begun: dict[str, Any] = json.loads(wire.call("POST", "/-/jobs", json.dumps(job).encode()).body)
        await_true(lambda: self.outputs() > 4)
        return begun

    def outputs(self) -> int:
        """How many there are."""
        return int(self.s3.list_objects_v2(Bucket=f"{self.name}-to")["KeyCount"])


@pytest.fixture
def ann(node: Daemon, request: pytest.FixtureRequest) -> Iterator[Ann]:
    found = Ann(node, f"ann-{abs(hash(request.node.name)) % 10**8}")
    with contextlib.closing(found.wire), contextlib.closing(found.s3):
        yield found


def stopped(ann: Ann, job: dict[str, Any]) -> dict[str, Any]:
    """It has failed, and has not done its work."""
    found = ended(ann.node, job)
    assert found["state"] == "failed", found
    assert ann.outputs() < len(FILES)
    return found


def test_a_disabled_key_stops_its_jobs(ann: Ann) -> None:
    job = ann.start(ann.wire)
    ann.node.request("PATCH", f"/-/admin/keys/{ann.access_key}", b'{"enabled": false}')
    assert "is not valid any more" in stopped(ann, job)["error"]


def test_a_revoked_session_stops_its_jobs(ann: Ann) -> None:
    made = json.loads(ann.wire.call("POST", "/-/sts", b"{}").body)
    token = made["SessionToken"]
    pod = Wire(ann.node.endpoint, made["AccessKeyId"], made["SecretAccessKey"], session_token=token)
    with contextlib.closing(pod):
        job = ann.start(pod)
        ann.node.request("DELETE", f"/-/admin/users/{ann.name}/sessions")
        assert "were revoked" in stopped(ann, job)["error"]


def narrow(ann: Ann) -> None:
    nothing = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::elsewhere/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": nothing}).encode()
    assert ann.node.request("PUT", f"/-/admin/policies/for-{ann.name}", policy).status in (200, 201)
    place = f"/-/admin/keys/{ann.access_key}/policies/for-{ann.name}"
    assert ann.node.request("PUT", place).status in (200, 201)


def refuse(ann: Ann) -> None:
    """The source's owner says who may read it."""
    who = {"AWS": f"arn:aws:iam:::user/{ann.name}"}
    denied = {
        "Effect": "Deny",
        "Principal": who,
        "Action": "s3:*",
        "Resource": f"arn:aws:s3:::{ann.name}-from/*",
    }
    ann.s3.put_bucket_policy(
        Bucket=f"{ann.name}-from", Policy=json.dumps({"Version": "2012-10-17", "Statement": denied})
    )


@pytest.mark.parametrize("change", [narrow, refuse])
def test_rights_that_are_taken_away_stop_a_job(ann: Ann, change: Callable[[Ann], None]) -> None:
    job = ann.start(ann.wire)
    change(ann)
    assert "may not do s3:GetObject" in stopped(ann, job)["error"]


def test_what_others_do_meanwhile_is_nothing_to_it(ann: Ann) -> None:
    """It is not begun anew: what has the same rights is equal, however it was read."""
    made = json.loads(ann.wire.call("POST", "/-/sts", json.dumps({"policy": EVERYTHING}).encode()).body)
    token = made["SessionToken"]
    pod = Wire(ann.node.endpoint, made["AccessKeyId"], made["SecretAccessKey"], session_token=token)
    with contextlib.closing(pod):
        job = ann.start(pod)
        before = _progress(ann, job)["written"]
        for number in range(3):
            name = json.dumps({"user_id": f"{ann.name}-{number}"}).encode()
            ann.node.request("POST", "/-/admin/users", name)
            threading.Event().wait(1.2)  # it looks once a second
        await_true(lambda: _progress(ann, job)["written"] > before)
        assert _progress(ann, job)["there"] == 0
        ann.node.request("DELETE", f"/-/jobs/{job['id']}")


def _progress(ann: Ann, job: dict[str, Any]) -> dict[str, int]:
    return dict(json.loads(ann.node.request("GET", f"/-/jobs/{job['id']}").body)["progress"])


EVERYTHING = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
