"""Relayout on a rotational disk: what reaches the disk before and after, counted below the file system."""

from __future__ import annotations

import contextlib
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.component.batches.test_read_ahead_on_disk import Node
from tests.support.job_fixtures import done, ended, start
from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rotational_disk import ReadLog

COUNT, SIZE, BETWEEN, BATCH = 320, 64 << 10, 900 << 10, 40
FOLDER = "s3://photos/train/"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Photographs that were written in random order, with objects of another bucket in between."""
    with rotational_disk(tmp_path_factory.mktemp("drive"), size=768 * MIB) as disk:
        made = Node(disk, tmp_path_factory.mktemp("node"), "--read-ahead", "64MiB", "--durability", "relaxed")
        with contextlib.closing(made.daemon), contextlib.closing(made.daemon.client()) as client:
            for bucket in ("photos", "others"):
                client.create_bucket(Bucket=bucket)
            client.put_bucket_versioning(Bucket="photos", VersioningConfiguration={"Status": "Enabled"})
            for number in random.Random(1).sample(range(COUNT), COUNT):
                client.put_object(Bucket="photos", Key=f"train/{number:04d}.bin", Body=content(number))
                client.put_object(Bucket="others", Key=f"{number:04d}.bin", Body=bytes(BETWEEN))
            client.put_object(Bucket="photos", Key="train/0007.bin", Body=b"a newer version")
            client.delete_object(Bucket="photos", Key="train/0008.bin")
            for number in range(10, 60):
                tags = {"TagSet": [{"Key": "split", "Value": str(number)}]}
                client.put_object_tagging(Bucket="photos", Key=f"train/{number:04d}.bin", Tagging=tags)
            yield made


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def cold_epoch(node: Node, seed: int) -> ReadLog:
    plan = node.plan("photos", {"kind": "blocks", "shards": 1}, seed)
    node.await_rest()
    node.disk.drop_caches()
    for step in range((COUNT - 1) // BATCH):
        answer = node.daemon.request("GET", f"/-/plans/{plan}/0/{step}?batch={BATCH}")
        assert answer.status == 200, answer.body
    return node.disk.stats()


def state_of(node: Node) -> list[Any]:
    """Everything a client can see of the versions, but not where they are."""
    with contextlib.closing(node.daemon.client()) as client:
        listed = client.list_object_versions(Bucket="photos", MaxKeys=1000)
        return [listed["Versions"], listed["DeleteMarkers"]]


def test_scattered_objects_are_put_in_order_and_stay_what_they_are(node: Node) -> None:
    before, state = cold_epoch(node, 1), state_of(node)
    assert before.seeks > 0.5 * COUNT

    measured = done(node.daemon, kind="relayout", source=FOLDER, dry_run=True)
    report = measured["report"]
    assert (report["objects"], report["to_move"], report["moved"]) == (COUNT - 1, COUNT - 1, 0)
    assert report["before"]["seeks"] == pytest.approx(before.seeks, rel=0.3)
    assert report["expected"]["seeks"] <= 2
    assert report["before"]["disk_seconds"] > 5 * report["expected"]["disk_seconds"]
    assert cold_epoch(node, 2).seeks > 0.5 * COUNT  # nothing was moved

    slow = start(node.daemon, kind="relayout", source=FOLDER, rate=1 << 20)
    while not slow["progress"]["bytes"]:
        slow = json.loads(node.daemon.request("GET", f"/-/jobs/{slow['id']}").body)
        assert not slow["ended_ms"], slow
    node.daemon.request("DELETE", f"/-/jobs/{slow['id']}")
    assert ended(node.daemon, slow)["state"] == "cancelled"

    job = done(node.daemon, kind="relayout", source=FOLDER)
    report, progress = job["report"], job["progress"]
    assert (report["moved"], progress["bytes"]) == (COUNT - 1, progress["bytes_total"])
    assert report["after"]["seeks"] <= report["expected"]["seeks"] + 2
    after = cold_epoch(node, 3)
    assert after.seeks < 0.1 * before.seeks
    assert after.bytes < 1.2 * COUNT * SIZE
    assert state_of(node) == state
    with contextlib.closing(node.daemon.client()) as client:
        for version in state[0]:
            key, number = version["Key"], int(version["Key"][6:10])
            body = client.get_object(Bucket="photos", Key=key, VersionId=version["VersionId"])["Body"].read()
            assert body == (b"a newer version" if version["Size"] < SIZE else content(number))

    again = done(node.daemon, kind="relayout", source=FOLDER)
    assert (again["report"]["to_move"], again["report"].get("after")) == (0, None)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"source": "s3://nobody/"}, "there is no bucket"),
        ({"source": FOLDER, "dry_run": 1}, "dry_run: expected true or false"),
        ({"source": FOLDER, "target": "s3://others/"}, "target"),
    ],
)
def test_what_is_refused(node: Node, document: dict[str, Any], message: str) -> None:
    answer = node.daemon.request("POST", "/-/jobs", json.dumps({"kind": "relayout", **document}).encode())
    assert answer.status in (400, 404)
    assert message in answer.body.decode()
