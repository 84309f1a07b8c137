"""Datasets of one's own and of others: what policies and bounded keys open and close of the native routes."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from meshwire.frame.sample_frames import SampleFrame
from tests.support.daemons import Daemon
from tests.support.native_fixtures import Mesh, error, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = "arn:aws:s3:::"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump([{"user_id": "eve", "access_key": "EVEKEY", "secret_key": "evesecret"}]))
    users.chmod(0o600)
    with Daemon.start(args=["--users", str(users)], workers=2) as running:
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture(scope="module")
def s3(node: Daemon) -> Iterator[Any]:
    client = node.client()
    yield client
    client.close()


@pytest.fixture
def root(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, node.access_key, node.secret_key)
    yield wire
    wire.close()


@pytest.fixture
def eve(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, "EVEKEY", "evesecret")
    yield wire
    wire.close()


@pytest.fixture
def bucket(s3: Any) -> str:
    """Pictures below `train/` and below `secret/train/`."""
    name = f"pictures-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=name)
    fill(s3, name, 12)
    for number in range(3):
        source = {"Bucket": name, "Key": f"train/cat/{3 * number + 1:04d}.png"}
        s3.copy_object(Bucket=name, Key=f"secret/cat/{number}.png", CopySource=source)
    return name


def reading(bucket: str, prefix: str) -> list[dict[str, Any]]:
    """What it takes to train on one prefix."""
    inside = {"StringLike": {"s3:prefix": f"{prefix}*"}}
    return [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{SHOWN}{bucket}/{prefix}*"},
        {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": SHOWN + bucket, "Condition": inside},
    ]


def open_to_eve(s3: Any, bucket: str, *statements: dict[str, Any]) -> None:
    document = {
        "Version": "2012-10-17",
        "Statement": [{**s, "Principal": {"AWS": "eve"}} for s in statements],
    }
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(document))


@pytest.fixture
def key(root: Mesh, bucket: str) -> Iterator[Mesh]:
    """Root's temporary key, bound to one prefix."""
    policy = {"Version": "2012-10-17", "Statement": reading(bucket, "train/")}
    made = root.ok(root.post("/-/sts", {"policy": policy}))
    wire = Mesh(root.endpoint, made["AccessKeyId"], made["SecretAccessKey"])
    wire.session_token = made["SessionToken"]
    yield wire
    wire.close()


def gathered(mesh: Mesh, bucket: str, *keys: str) -> dict[str, str]:
    """Codes of the items that were refused, by key."""
    answer = mesh.post("/-/gather", {"items": [{"bucket": bucket, "key": key} for key in keys]})
    assert answer.status == 200, answer.body
    errors = json.loads(SampleFrame(answer.body).metadata["errors"])
    return {keys[int(number)]: code for number, code in errors.items()}


def refused(mesh: Mesh, method: str, target: str, document: Any = None) -> str:
    answer = mesh.call(method, target) if document is None else mesh.post(target, document)
    code: str = error(answer)["code"]
    assert answer.status == {"AccessDenied": 403, "NoSuchBucket": 404}[code]
    return code


def test_a_bound_key_trains_on_its_prefix_and_nothing_else(root: Mesh, key: Mesh, bucket: str) -> None:
    snapshot = key.snapshot(f"s3://{bucket}/train/")["snapshot"]
    plan = key.plan(snapshot)["plan"]
    assert key.frame(plan, batch=4)["image"].shape[0] == 4
    assert key.raw(plan, batch=4, format="samples").status == 200
    assert key.raw(plan, batch=4, format="tar").status == 200
    assert gathered(key, bucket, "train/cat/0001.png", "secret/cat/0.png", "train/none") == {
        "secret/cat/0.png": "AccessDenied",
        "train/none": "NoSuchKey",
    }
    everything = root.snapshot(f"s3://{bucket}")["snapshot"]
    all_of_it = root.plan(everything)["plan"]
    fields = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}
    for source in (f"s3://{bucket}", f"s3://{bucket}/secret"):
        assert refused(key, "POST", "/-/snapshots", {"source": source, "fields": fields}) == "AccessDenied"
    assert refused(key, "GET", f"/-/snapshots/{everything}") == "AccessDenied"
    assert refused(key, "POST", "/-/plans", {"snapshot": everything, "spec": {"ops": []}}) == "AccessDenied"
    assert refused(key, "GET", f"/-/plans/{all_of_it}") == "AccessDenied"
    assert refused(key, "GET", f"/-/plans/{all_of_it}/0/0?batch=4") == "AccessDenied"
    assert refused(key, "GET", f"/-/plans/{all_of_it}/0/0?batch=4&format=samples") == "AccessDenied"
    assert refused(key, "GET", f"/-/plans/{all_of_it}/bad") == "AccessDenied"
    assert refused(key, "POST", f"/-/plans/{all_of_it}/rows", {"samples": [0]}) == "AccessDenied"


def test_a_bucket_policy_opens_a_prefix_to_another_user(root: Mesh, eve: Mesh, s3: Any, bucket: str) -> None:
    source = f"s3://{bucket}/train/"
    fields = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}
    wanted = {"source": source, "fields": fields}
    plan = root.plan(root.snapshot(source)["snapshot"])["plan"]
    assert refused(eve, "POST", "/-/snapshots", wanted) == "AccessDenied"
    assert refused(eve, "GET", f"/-/plans/{plan}/0/0?batch=4") == "AccessDenied"
    assert gathered(eve, bucket, "train/cat/0001.png") == {"train/cat/0001.png": "AccessDenied"}
    open_to_eve(s3, bucket, *reading(bucket, "train/"))
    assert eve.plan(eve.snapshot(source)["snapshot"])["plan"] == plan
    assert eve.frame(plan, batch=4)["image"].shape[0] == 4
    one = f"{SHOWN}{bucket}/train/cat/0004.png"
    hidden = {"Effect": "Deny", "Action": "s3:GetObject", "Resource": one}
    open_to_eve(s3, bucket, *reading(bucket, "train/"), hidden)
    assert refused(eve, "GET", f"/-/plans/{plan}/0/0?batch=4") == "AccessDenied"
    assert refused(eve, "POST", "/-/snapshots", wanted) == "AccessDenied"
    s3.delete_bucket_policy(Bucket=bucket)
    assert refused(eve, "GET", f"/-/plans/{plan}/0/0?batch=4") == "AccessDenied"
    assert root.frame(plan, batch=4)["image"].shape[0] == 4


def test_it_takes_both_listing_and_reading(eve: Mesh, s3: Any, bucket: str) -> None:
    fields = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}
    wanted = {"source": f"s3://{bucket}/train", "fields": fields}
    for statement in reading(bucket, "train/"):
        open_to_eve(s3, bucket, statement)
        assert refused(eve, "POST", "/-/snapshots", wanted) == "AccessDenied"


def test_objects_that_are_public_by_their_acl_can_be_gathered(eve: Mesh, s3: Any, bucket: str) -> None:
    s3.put_object_acl(Bucket=bucket, Key="train/cat/0001.png", ACL="public-read")
    keys = ("train/cat/0001.png", "train/cat/0002.png", "none")
    assert gathered(eve, bucket, *keys) == dict.fromkeys(keys[1:], "AccessDenied")
    assert gathered(eve, "no-such-bucket", "k") == {"k": "NoSuchBucket"}


def test_conditions_see_the_request(eve: Mesh, s3: Any, bucket: str) -> None:
    for addresses, expected in (
        ("127.0.0.0/8", {}),
        ("192.0.2.0/24", {"train/cat/0001.png": "AccessDenied"}),
    ):
        near = {"IpAddress": {"aws:SourceIp": addresses}}
        statement, _ = reading(bucket, "train/")
        open_to_eve(s3, bucket, {**statement, "Condition": near})
        assert gathered(eve, bucket, "train/cat/0001.png") == expected


def test_a_bound_key_makes_no_views_of_what_it_may_not_read(root: Mesh, key: Mesh, bucket: str) -> None:
    ops = [
        {"op": "decode"},
        {"op": "resize", "args": {"size": 8}},
        {"op": "encode", "args": {"format": "png"}},
    ]
    view = {"kind": "transform", "ops": ops, "match": [".png"]}
    wanted = {"bucket": bucket, "name": "small", "view": view}
    assert refused(key, "POST", "/-/views", wanted) == "AccessDenied"
    assert root.post("/-/views", wanted).status == 200
    assert refused(key, "GET", "/-/views") == "AccessDenied"
    assert refused(key, "GET", f"/-/views/{bucket}--small") == "AccessDenied"
    assert error(key.call("GET", f"/-/views/{bucket}--none"))["code"] == "AccessDenied"
    assert key.call("GET", f"/{bucket}--small/train/cat/0001.png").code == "AccessDenied"


def test_a_view_of_samples_is_given_without_its_source(root: Mesh, eve: Mesh, s3: Any, bucket: str) -> None:
    ops = [{"op": "decode", "field": "image"}, {"op": "resize", "field": "image", "args": {"size": [4, 4]}}]
    array = {"kind": "zarr", "prefix": "train/", "fields": {"image": "png"}, "ops": ops, "chunk": 5}
    made = root.snapshot(f"s3://{bucket}/train/", {"image": {"ext": ["png"]}})
    plan = root.plan(made["snapshot"], ops)["plan"]
    views = {"array": array, "batches": {"kind": "batches", "plan": plan, "batch": 4}}
    keys = {"array": "image/c/1/0/0/0", "batches": "epoch=0/step=000001/rank=0-of-1.safetensors"}
    for name, view in views.items():
        wanted = {"bucket": bucket, "name": name, "view": view}
        assert refused(eve, "POST", "/-/views", wanted) == "AccessDenied"
        assert root.post("/-/views", wanted).status == 200
        shown = f"{bucket}--{name}"
        for target in (f"/{shown}/{keys[name]}", f"/{shown}?list-type=2"):
            assert eve.call("GET", target).code == "AccessDenied"
        open_to_eve(s3, shown, *reading(shown, ""))
        body = eve.call("GET", f"/{shown}/{keys[name]}").body
        assert body == s3.get_object(Bucket=shown, Key=keys[name])["Body"].read()
        assert keys[name].encode() in eve.call("GET", f"/{shown}?list-type=2").body
        assert eve.call("GET", f"/{bucket}/train/cat/0001.png").code == "AccessDenied"


def test_objects_are_loaded_for_those_who_may_read_them(
    s3: Any, root: Mesh, eve: Mesh, key: Mesh, bucket: str
) -> None:
    """Neither the count nor the code tells whether an object exists."""
    mine, secret, missing = (
        {"bucket": bucket, "keys": [name]} for name in ("train/dog/0000.png", "secret/cat/0.png", "secret/no")
    )
    assert root.post("/-/read-ahead", secret).status == 200
    assert key.post("/-/read-ahead", mine).status == 200
    both = {"bucket": bucket, "keys": [*mine["keys"], *secret["keys"]]}
    for document in (secret, missing, both):
        assert refused(key, "POST", "/-/read-ahead", document) == "AccessDenied"
    assert refused(eve, "POST", "/-/read-ahead", mine) == "AccessDenied"
    open_to_eve(s3, bucket, *reading(bucket, "train/"))
    assert eve.post("/-/read-ahead", mine).status == 200
    assert refused(eve, "POST", "/-/read-ahead", both) == "AccessDenied"
