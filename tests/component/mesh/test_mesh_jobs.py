"""Jobs on a mesh: any node runs them and shows them, each output is where the map wants it, and a node that
dies leaves its job to another one."""

from __future__ import annotations

import json
import random
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.archive_files import archive_of
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.job_fixtures import done, ended, members, objects, start
from tests.support.plan_fixtures import await_status, fill, frame, make
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

require_etcd()

chance = random.Random(5)
FILES = {
    f"{n:03d}.{ext}": chance.randbytes(chance.randrange(1, 9000)) for n in range(40) for ext in ("a", "b")
}
KINDS = ("tar", "tgz", "zip", "tar.zst")
LEASE = 10.0
"""Seconds. On a busy machine a node may be silent for two: then its jobs are others'."""
SLOW = {"MESHD_FAILPOINTS": "jobs.output.done=sleep(1500):after 8"}
"""What makes a node take minutes for what others do in a second."""


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, lease=LEASE) as three:
        three.add("n4", env=SLOW)
        s3 = three["n1"].client()
        for bucket in ("samples", "made"):
            s3.create_bucket(Bucket=bucket)
        for name, body in FILES.items():
            s3.put_object(Bucket="samples", Key=f"plain/{name}", Body=body)
        names = sorted(FILES)
        for number, kind in enumerate(KINDS):
            part = {name: FILES[name] for name in names[number * 20 : number * 20 + 20]}
            s3.put_object(Bucket="samples", Key=f"packed/{number}.{kind}", Body=archive_of(kind, part))
        yield three


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _shows(node: Daemon, wanted: tuple[str, str]) -> bool:
    """Whether a node lists this job, at the node where it runs."""
    listed = json.loads(node.request("GET", "/-/jobs").body)["jobs"]
    return wanted in {(job["id"], job["node"]) for job in listed}


def _made_at(mesh: DaemonCluster, node_id: str, job: dict[str, Any]) -> dict[str, bytes]:
    """What a job makes that this node ran to its end. On a machine that has other things to do a node may be
    silent for longer than its lease: then another takes its job over, and this one is asked anew."""
    while True:
        prefix = f"{secrets.token_hex(4)}/"
        target = {"target": f"s3://made/{prefix}"}
        begun = start(mesh[node_id], **job, **target)
        assert (begun["node"], begun["run"]) == (node_id, 1)
        found = ended(mesh[node_id], begun)
        assert found["state"] == "done", found
        if found["node"] == node_id:
            return objects(mesh["n2"].client(), "made", prefix)
        marked = [mesh.metric(each, "meshd_cluster_marked_total") for each in mesh.nodes]
        assert sum(marked) > 0, found  # nobody's job is taken over who was not taken for gone
        mesh.await_healthy()


def test_every_node_makes_the_same(mesh: DaemonCluster) -> None:
    jobs: list[dict[str, Any]] = [
        {"kind": "shard", "source": "s3://samples/plain", "count": 5},
        {"kind": "reshard", "source": "s3://samples/packed", "count": 5},
        {"kind": "extract", "source": "s3://samples/packed"},
    ]
    made = [[_made_at(mesh, node_id, job) for job in jobs] for node_id in ("n1", "n2", "n3")]
    assert made[0] == made[1] == made[2]
    shards, again, files = made[0]
    assert members(*shards.values()) == members(*again.values()) == files == FILES


def test_all_nodes_show_a_job_and_stop_it(mesh: DaemonCluster) -> None:
    target = f"s3://made/stopped-{secrets.token_hex(4)}"
    job = start(mesh["n4"], kind="extract", source="s3://samples/packed", target=target)
    for node in mesh.nodes.values():
        await_true(partial(_shows, node, (job["id"], "n4")))
    assert mesh["n3"].request("DELETE", f"/-/jobs/{job['id']}").status == 200
    assert ended(mesh["n2"], job)["state"] == "cancelled"


def test_a_job_is_known_everywhere_when_its_start_is_answered(mesh: DaemonCluster) -> None:
    for number in range(20):
        target = f"s3://made/known-{number}-{secrets.token_hex(4)}"
        job = start(mesh["n1"], kind="extract", source="s3://samples/packed", target=target)
        for name in ("n2", "n3", "n1"):
            assert mesh[name].request("GET", f"/-/jobs/{job['id']}").status == 200, name
        assert mesh["n3"].request("DELETE", f"/-/jobs/{job['id']}").status == 200
        ended(mesh["n2"], job)


def test_outputs_that_are_none_any_more_go(mesh: DaemonCluster) -> None:
    fewer, s3 = f"fewer-{secrets.token_hex(4)}", mesh["n3"].client()
    job: dict[str, Any] = {
        "kind": "extract",
        "source": f"s3://samples/{fewer}",
        "target": f"s3://made/{fewer}",
    }
    late = {f"late-{number}": b"late" for number in range(5)}
    s3.put_object(Bucket="samples", Key=f"{fewer}/0.tar", Body=archive_of("tar", FILES))
    s3.put_object(Bucket="samples", Key=f"{fewer}/9.tar", Body=archive_of("tar", late))
    done(mesh["n1"], **job)
    assert objects(s3, "made", f"{fewer}/") == FILES | late
    s3.delete_object(Bucket="samples", Key=f"{fewer}/9.tar")
    found = done(mesh["n2"], **job)["progress"]
    assert (found["removed"], found["there"], found["written"]) == (5, len(FILES), 0)
    assert objects(s3, "made", f"{fewer}/") == FILES


def test_a_job_whose_node_is_killed_is_taken_over(mesh: DaemonCluster) -> None:
    taken, s3 = f"taken-{secrets.token_hex(4)}", mesh["n3"].client()
    job = start(mesh["n4"], kind="extract", source="s3://samples/packed", target=f"s3://made/{taken}")
    while s3.list_objects_v2(Bucket="made", Prefix=f"{taken}/")["KeyCount"] < 5:
        threading.Event().wait(0.05)
    mesh.kill("n4")
    found = ended(mesh["n2"], job)
    assert (found["state"], found["run"]) == ("done", 2), found
    assert found["node"] in ("n1", "n2", "n3")
    assert objects(s3, "made", f"{taken}/") == FILES


def test_a_plan_removed_while_a_node_is_away_is_gone_there_too_and_can_be_made_again(
    mesh: DaemonCluster,
) -> None:
    names = ("n1", "n2", "n3")
    fill(mesh["n1"])
    snapshot, plan = make(mesh["n2"])
    bodies = {name: frame(mesh[name], plan) for name in names}
    assert {status for status, _ in bodies.values()} == {200}
    mesh.stop("n3")
    mesh.await_state("n3", "away")
    kept = json.loads(mesh["n1"].request("GET", "/-/cluster").body)["documents"]
    assert kept["plans"]["count"] >= 1
    assert kept["snapshots"]["bytes"] > 0
    listed = json.loads(mesh["n1"].request("GET", "/-/documents/plans").body)
    assert plan in {row["hash"] for row in listed["plans"]}
    assert "n3" in listed["silent"]
    refused = mesh["n1"].request("DELETE", f"/-/documents/plans/{plan}")
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (409, "InUse")
    named = mesh["n1"].request("DELETE", f"/-/documents/snapshots/{snapshot}?force=1")
    assert f"plan {plan}" in json.loads(named.body)["error"]["detail"]["kept_by"]
    done = json.loads(mesh["n1"].request("DELETE", f"/-/documents/plans/{plan}?force=1").body)
    assert done["removed"] == plan
    assert "n3" in done["silent"]
    await_status(mesh["n2"], plan, 410)
    mesh.up("n3")
    mesh.await_metric("n3", "meshd_documents_cleared_total", 1)
    mesh.await_state("n3", "up")
    for name in names:  # nobody brought it back
        await_status(mesh[name], plan, 410)
        error = json.loads(frame(mesh[name], plan)[1])["error"]
        assert error["code"] == "Gone"
        assert "was removed by root on" in error["message"]
        assert "create it again" in error["help"]
    assert make(mesh["n2"]) == (snapshot, plan)
    for name in names:
        await_status(mesh[name], plan, 200)
        assert frame(mesh[name], plan) == bodies[name]
