"""A bucket's name is free when it is deleted: what was made of the bucket is not its successor's."""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import TYPE_CHECKING

import pytest

from tests.support import daemon_cluster
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.native_fixtures import Mesh, error, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.s3_raw import Answer


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as running:
        yield running
        assert "Traceback" not in running.output()


class User:
    """Somebody with a key of their own."""

    def __init__(self, node: Daemon, name: str, endpoint: str = "") -> None:
        body = json.dumps({"user_id": f"{name}-{secrets.token_hex(3)}"}).encode()
        node.request("POST", "/-/admin/users", body)
        key = json.loads(node.request("POST", "/-/admin/keys", body).body)
        self.keys = (key["access_key"], key["secret_key"])
        self.mesh = self.at(endpoint or node.endpoint)
        self.s3 = node.client(aws_access_key_id=self.keys[0], aws_secret_access_key=self.keys[1])

    def at(self, endpoint: str) -> Mesh:
        return Mesh(endpoint, *self.keys)

    def close(self) -> None:
        self.mesh.close()
        self.s3.close()


@pytest.fixture
def main(node: Daemon) -> Iterator[User]:
    with contextlib.closing(User(node, "main")) as user:
        yield user


@pytest.fixture
def alt(node: Daemon) -> Iterator[User]:
    with contextlib.closing(User(node, "alt")) as user:
        yield user


def free(user: User, bucket: str) -> None:
    for entry in user.s3.list_objects_v2(Bucket=bucket)["Contents"]:
        user.s3.delete_object(Bucket=bucket, Key=entry["Key"])
    user.s3.delete_bucket(Bucket=bucket)


def made(user: User, bucket: str, count: int = 4) -> tuple[str, str, bytes]:
    """A bucket with pictures: its snapshot, a plan, and a frame that is cached now."""
    user.s3.create_bucket(Bucket=bucket)
    fill(user.s3, bucket, count)
    return registered(user, bucket)


def registered(user: User, bucket: str) -> tuple[str, str, bytes]:
    snapshot = user.mesh.snapshot(f"s3://{bucket}/train")["snapshot"]
    plan = user.mesh.plan(snapshot)["plan"]
    answer = user.mesh.raw(plan, batch=4)
    assert answer.status == 200
    return snapshot, plan, answer.body


def refused(answer: Answer) -> tuple[int, str]:
    return answer.status, error(answer)["code"]


def asked(mesh: Mesh, snapshot: str, plan: str) -> dict[str, tuple[int, str]]:
    """Whatever takes a snapshot or plan by its hash."""
    spec = {"snapshot": snapshot, "spec": {"ops": [], "seed": 1}}
    return {
        "the snapshot": refused(mesh.call("GET", f"/-/snapshots/{snapshot}")),
        "a plan of it": refused(mesh.post("/-/plans", spec)),
        "a snapshot of it": refused(mesh.post("/-/snapshots", {"from": snapshot, "filter": "index < 2"})),
        "the plan": refused(mesh.call("GET", f"/-/plans/{plan}")),
        "a cached frame": refused(mesh.raw(plan, batch=4)),
        "source bytes": refused(mesh.raw(plan, batch=4, format="tar")),
        "chosen samples": refused(mesh.post(f"/-/plans/{plan}/rows", {"samples": [0]})),
        "bad samples": refused(mesh.call("GET", f"/-/plans/{plan}/bad")),
        "what is kept of the plan": refused(mesh.call("GET", f"/-/documents/plans/{plan}")),
        "what is kept of the snapshot": refused(mesh.call("GET", f"/-/documents/snapshots/{snapshot}")),
        "its removal": refused(mesh.call("DELETE", f"/-/documents/plans/{plan}?force=1")),
    }


OF_SNAPSHOT = ("the snapshot", "a plan of it", "a snapshot of it", "what is kept of the snapshot")


def require_nothing(mesh: Mesh, snapshot: str, plan: str) -> None:
    for what, answer in asked(mesh, snapshot, plan).items():
        code = "NoSuchSnapshot" if what in OF_SNAPSHOT else "NoSuchPlan"
        assert answer == (404, code), what
    for kind in ("plans", "snapshots"):
        assert mesh.ok(mesh.call("GET", f"/-/documents/{kind}"))[kind] == []


def test_the_next_owner_of_a_name_gets_nothing_of_its_predecessor(
    node: Daemon, main: User, alt: User
) -> None:
    bucket = f"reuse-{secrets.token_hex(4)}"
    snapshot, plan, frame = made(main, bucket)
    assert refused(alt.mesh.raw(plan, batch=4)) == (403, "AccessDenied")
    free(main, bucket)
    alt.s3.create_bucket(Bucket=bucket)
    require_nothing(alt.mesh, snapshot, plan)
    alt.s3.put_object(Bucket=bucket, Key="train/cat/0001.png", Body=b"of another")
    require_nothing(alt.mesh, snapshot, plan)
    with contextlib.closing(Mesh(node.endpoint, node.access_key, node.secret_key)) as root:
        assert root.raw(plan, batch=4).body == frame  # a snapshot of a former bucket is root's alone
        kept = root.ok(root.call("GET", f"/-/documents/plans/{plan}"))
        assert kept["buckets"] == [bucket]


def test_its_own_former_bucket_is_over_for_its_owner_too(main: User) -> None:
    bucket = f"again-{secrets.token_hex(4)}"
    snapshot, plan, _ = made(main, bucket)
    free(main, bucket)
    main.s3.create_bucket(Bucket=bucket)
    require_nothing(main.mesh, snapshot, plan)


def test_the_same_content_uploaded_anew_is_registered_anew(main: User, alt: User) -> None:
    bucket = f"same-{secrets.token_hex(4)}"
    first = made(main, bucket)
    free(main, bucket)
    assert made(alt, bucket) == first  # hashes and frames do not depend on the bucket's birth
    alt.s3.delete_object(Bucket=bucket, Key="train/cat/0001.png")
    assert alt.mesh.raw(first[1], batch=4).body == first[2]
    (kept,) = alt.mesh.ok(alt.mesh.call("GET", "/-/documents/plans"))["plans"]
    assert kept["hash"] == first[1]


def test_who_lacks_one_object_gets_no_snapshot_of_it(main: User, alt: User) -> None:
    """What is not written down is judged by the objects, all of them."""
    bucket = f"some-{secrets.token_hex(4)}"
    snapshot, plan, frame = made(main, bucket)
    objects = [
        (entry["Key"], main.s3.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
        for entry in main.s3.list_objects_v2(Bucket=bucket)["Contents"]
    ]
    free(main, bucket)
    alt.s3.create_bucket(Bucket=bucket)
    for key, body in objects[1:]:
        alt.s3.put_object(Bucket=bucket, Key=key, Body=body)
    require_nothing(alt.mesh, snapshot, plan)
    alt.s3.put_object(Bucket=bucket, Key=objects[0][0], Body=objects[0][1])
    assert alt.mesh.raw(plan, batch=4).body == frame


def test_a_view_of_a_former_buckets_plan_shows_nothing(main: User) -> None:
    bucket = f"views-{secrets.token_hex(4)}"
    _, plan, _ = made(main, bucket)
    view = {"kind": "batches", "plan": plan, "batch": 4}
    main.mesh.ok(main.mesh.post("/-/views", {"bucket": bucket, "name": "b", "view": view}))
    (entry,) = main.s3.list_objects_v2(Bucket=f"{bucket}--b", MaxKeys=1)["Contents"]
    assert main.mesh.call("GET", f"/{bucket}--b/{entry['Key']}").status == 200
    free(main, bucket)
    main.s3.create_bucket(Bucket=bucket)
    answer = main.mesh.call("GET", f"/{bucket}--b/{entry['Key']}")
    assert b"ViewOutdated" in answer.body
    assert answer.status >= 400


def test_births_are_known_after_a_restart(main: User, node: Daemon) -> None:
    bucket = f"restart-{secrets.token_hex(4)}"
    snapshot, plan, _ = made(main, bucket)
    main.s3.delete_object(Bucket=bucket, Key="train/cat/0001.png")  # else the objects would do
    node.restart()
    with contextlib.closing(main.at(node.endpoint)) as mesh:
        assert mesh.call("GET", f"/-/plans/{plan}").status == 200
        assert mesh.call("GET", f"/-/snapshots/{snapshot}").status == 200


def test_every_node_of_a_mesh_says_the_same() -> None:
    with daemon_cluster.DaemonCluster.start(3) as nodes:
        first = nodes["n1"]
        with contextlib.closing(User(first, "main")) as main, contextlib.closing(User(first, "alt")) as alt:
            snapshot, plan, frame = made(main, "reuse")
            main.s3.delete_object(Bucket="reuse", Key="train/dog/0003.png")  # now the births decide alone
            for endpoint in nodes.endpoints.values():
                with contextlib.closing(main.at(endpoint)) as mesh:
                    assert mesh.call("GET", f"/-/snapshots/{snapshot}").status == 200
                    assert mesh.call("GET", f"/-/plans/{plan}").status == 200
            free(main, "reuse")
            alt.s3.create_bucket(Bucket="reuse")
            for endpoint in nodes.endpoints.values():
                with contextlib.closing(alt.at(endpoint)) as mesh:
                    await_true(lambda mesh=mesh: mesh.call("GET", "/reuse").status == 200)  # type: ignore[misc]
                    require_nothing(mesh, snapshot, plan)
            fill(alt.s3, "reuse", 4)
            assert registered(alt, "reuse") == (snapshot, plan, frame)
            for endpoint in nodes.endpoints.values():
                with contextlib.closing(alt.at(endpoint)) as mesh:
                    assert mesh.raw(plan, batch=4).body == frame
