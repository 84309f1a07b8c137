"""Datasets and loads, as far as they are decided without asking anybody."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshoperator.cluster_model import HostNode
from meshoperator.planners.dataset_model import (
    DatasetUsage,
    dataset_location,
    dataset_mark,
    origin_changes,
    origin_document,
    shared_with,
)
from meshoperator.planners.load_planner import (
    RunHistory,
    ScheduleError,
    job_documents,
    jobs_with_changed_rate,
    next_time,
    outcome,
    parse_history,
    plan_load,
    sum_jobs,
)
from meshoperator.planners.placement_inputs import (
    DatasetHomes,
    Holding,
    MeshGround,
    PlacementBoard,
    holders,
    inventory_of,
    label_change,
    labels_wanted,
)
from meshoperator.planners.placement_model import Demand, FreeGpus
from meshoperator.planners.placement_planner import plan_placement
from meshoperator.resources import MeshDatasetSpec, MeshLoadSpec, ResourceError, parse
from meshoperator.resources.cluster import Topology
from meshoperator.settings import OperatorSettings

START = datetime(2026, 11, 21, 16, 30, 12, tzinfo=UTC)
RACK = "topology.shardmesh.io/rack"


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("30 2 * * *", "2026-11-22T02:30"),
        ("*/15 * * * *", "2026-11-21T16:45"),
        ("0 0 1 jan *", "2027-01-01T00:00"),
        ("0 12 * * mon-fri", "2026-11-23T12:00"),
        ("0 12 1 * sun", "2026-11-22T12:00"),  # either
        ("0 12 1 * 7", "2026-11-22T12:00"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
        ("5/20 17 * * *", "2026-11-21T17:05"),
        ("0 0 */2 * mon", "2026-11-23T00:00"),  # both: one begins with *
        ("0 0 L * *", "2026-11-30T00:00"),
        ("0 0 * * mon#2", "2026-12-14T00:00"),
    ],
)
def test_schedules(text: str, then: str) -> None:
    assert next_time(text, START).isoformat()[:16] == then


def test_a_day_that_never_comes() -> None:
    with pytest.raises(ScheduleError):
        next_time("0 0 31 2 *", START)


@pytest.mark.parametrize(
    "text",
    [
        "* * * *",
        "60 * * * *",
        "* * 0 * *",
        "5-1 * * * *",
        "*/0 * * * *",
        "x * * * *",
        "* * * * * *",
        "@daily",
    ],
)
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(ScheduleError):
        next_time(text, START)


@settings(deadline=None)
@given(st.integers(0, 59), st.integers(0, 23), st.datetimes(datetime(2024, 1, 1), datetime(2032, 1, 1)))
def test_the_next_time_is_later_and_within_a_day(minute: int, hour: int, moment: datetime) -> None:
    now = moment.replace(tzinfo=UTC)
    found = next_time(f"{minute} {hour} * * *", now)
    assert (found.minute, found.hour) == (minute, hour)
    assert timedelta(0) < found - now <= timedelta(days=1)


def load(**spec: Any) -> MeshLoadSpec:
    return parse(MeshLoadSpec, {"datasetRef": "photos"} | spec)


def test_steps_of_a_load() -> None:
    running = RunHistory("Running", ("a/1",), 10, 0)
    assert plan_load(load(), RunHistory(), 0).action == "start"
    assert plan_load(load(), RunHistory(), 0, "it is not there").phase == "Waiting"
    assert plan_load(load(), running, 20).action == "follow"
    assert plan_load(load(suspend=True), running, 20).action == "cancel"
    assert plan_load(load(suspend=True), RunHistory("Suspended"), 20).action == "none"
    assert plan_load(load(), RunHistory("Suspended", ("a/1",)), 20).action == "start"
    done = RunHistory("Succeeded", ("a/1",), 10, 20)
    assert plan_load(load(), done, 99).action == "none"
    assert plan_load(load(ttlSecondsAfterFinished=60), done, 79).action == "none"
    assert plan_load(load(ttlSecondsAfterFinished=60), done, 80).action == "delete"


def test_a_load_by_schedule_waits_runs_and_waits() -> None:
    spec, now = load(policy="Cron", schedule="0 3 * * *"), START.timestamp()
    first = plan_load(spec, RunHistory(), now)
    assert (first.action, first.phase) == ("none", "Waiting")
    begun = plan_load(spec, RunHistory("Waiting", (), 0, 0, first.next_run), first.next_run)
    assert (begun.action, begun.next_run) == ("start", first.next_run + 86400)
    after = plan_load(spec, RunHistory("Succeeded", ("a/1",), 1, 2, begun.next_run), first.next_run + 60)
    assert (after.action, after.phase) == ("none", "Succeeded")


def test_jobs_of_a_load() -> None:
    assert [job["source"] for job in job_documents(load(), "b", "")] == ["s3://b/"]
    assert [job["source"] for job in job_documents(load(paths=["x/", "/y"]), "b", "p/")] == [
        "s3://b/p/x/",
        "s3://b/p/y",
    ]
    assert job_documents(load(manifest="m.txt"), "b", "")[0]["manifest"] == "s3://b/m.txt"
    assert parse_history({"jobId": "a/1,b/2", "startedAt": "1970-01-01T00:00:10Z"}) == RunHistory(
        "", ("a/1", "b/2"), 10
    )


def job(phase: str, state: str = "running", **progress: Any) -> dict[str, Any]:
    told = {"outputs": 0, "outputs_total": 0, "bytes": 0, "bytes_total": 0, "phase": phase} | progress
    return {"kind": "prefetch", "state": state, "progress": told, "failures": [], "failed": 0, "error": ""}


def test_a_load_is_at_its_end_when_the_last_home_is_full() -> None:
    listing = sum_jobs([job("listing", outputs_total=3, bytes_total=30)])
    assert outcome(listing) == ("Running", "Listing", "0 bytes loaded; the source is still being listed")
    half: dict[str, Any] = {"outputs": 4, "outputs_total": 8, "bytes": 40, "bytes_total": 80, "copies": 2}
    filling = sum_jobs([job("fetching", **half)])
    assert outcome(filling)[2] == "40 of 80 bytes loaded, on 2 daemons in total"
    assert not sum_jobs([job("fetching", **half), job("", "queued")]).listed
    whole = half | {"outputs": 8, "bytes": 80}
    assert outcome(sum_jobs([job("checking", "done", **whole)]))[:2] == ("Succeeded", "Done")
    figures = DatasetUsage.from_holdings(spec_of("s3://a/"), [], job("checking", "done", **whole))
    assert figures.source == (4, 40)  # what there is, however often it is kept


def test_the_bandwidth_of_a_load_is_dealt_out_to_its_jobs() -> None:
    wanted = job_documents(load(paths=["x/", "y/"], bandwidth="1Mi"), "b", "")
    assert [each["rate"] for each in wanted] == [512 << 10] * 2
    assert "rate" not in job_documents(load(), "b", "")[0]
    with pytest.raises(ResourceError, match="less than 1 byte per second"):
        job_documents(load(bandwidth="0"), "b", "")
    jobs = [job("fetching") | {"spec": each} for each in wanted]
    assert jobs_with_changed_rate(wanted, jobs) == []
    other = job_documents(load(paths=["x/", "y/"], bandwidth="2Mi"), "b", "")
    assert (
        jobs_with_changed_rate(other, [jobs[0], jobs[1] | {"state": "done"}]) == other[:1]
    )  # what is over stays so
    assert jobs_with_changed_rate(job_documents(load(paths=["x/"]), "b", ""), jobs) == []


def spec_of(uri: str, **more: Any) -> MeshDatasetSpec:
    return parse(MeshDatasetSpec, {"clusterRef": "mesh", "source": {"uri": uri}} | more)


def test_where_a_dataset_is() -> None:
    assert dataset_location(spec_of("s3://cloud/train"), "photos") == ("photos", "")
    assert dataset_location(spec_of("s3://cloud/train", bucket="other"), "photos") == ("other", "")
    assert dataset_location(spec_of("mesh://texts/words"), "photos") == ("texts", "words/")
    assert dataset_location(spec_of("mesh://texts"), "photos") == ("texts", "")
    assert dataset_mark("a", "photos") != dataset_mark("b", "photos")
    assert len(dataset_mark("a" * 63, "p" * 50)) <= 63


def test_a_dataset_is_read_only_and_as_fresh_as_it_should_be() -> None:
    spec = spec_of("s3://cloud/train", quota="1Gi", placement={"pin": True})
    wanted = origin_document(spec, "keys", refresh=False)
    assert wanted["write"] == "off"
    assert (wanted["ttl"], wanted["quota"], wanted["pins"]) == (300, 1 << 30, [""])
    assert origin_changes(wanted | {"pins": ("",), "endpoint": ""}, wanted) == {}
    assert origin_changes(wanted, origin_document(spec, "keys", refresh=True)) == {"ttl": 0.0}
    never = spec_of("s3://cloud/train", refresh={"policy": "Never"})
    assert origin_document(never, "", refresh=False)["immutable"]
    assert not origin_document(never, "", refresh=True)["immutable"]


def test_who_may_read_a_dataset() -> None:
    def document(said: str) -> dict[str, Any]:
        return {"metadata": {"namespace": "a", "annotations": {"shardmesh.io/namespaces": said}}}

    assert shared_with(document(""), "a")
    assert not shared_with(document(""), "b")
    assert shared_with(document("b, c"), "c")
    assert shared_with(document("*"), "z")


PLACES = {
    name: HostNode(name, {RACK: rack, "topology.kubernetes.io/zone": "z1"}, gpus=8)
    for name, rack in (("k1", "r1"), ("k2", "r1"), ("k3", "r2"))
}


def test_labels_are_of_where_data_lies_and_only_ours_change() -> None:
    wanted = labels_wanted({"photos.1": {"k1"}, "words.2": {"k1", "k3"}}, PLACES, Topology())
    assert wanted["k2"] == {
        "rack.shardmesh.io/photos.1",
        "zone.shardmesh.io/photos.1",
        "rack.shardmesh.io/words.2",
        "zone.shardmesh.io/words.2",
    }
    assert "host.shardmesh.io/words.2" in wanted["k3"]
    assert "rack.shardmesh.io/photos.1" not in wanted["k3"]
    old = HostNode(
        "k1", {"mine": "1", "host.shardmesh.io/gone.3": "copy", "host.shardmesh.io/photos.1": "copy"}
    )
    change = label_change(old, {"host.shardmesh.io/photos.1", "rack.shardmesh.io/photos.1"})["metadata"][
        "labels"
    ]
    assert change == {"host.shardmesh.io/gone.3": None, "rack.shardmesh.io/photos.1": "near"}
    assert label_change(old, {"host.shardmesh.io/photos.1", "host.shardmesh.io/gone.3"}) == {}
    assert label_change(old, {"host.shardmesh.io/photos.1"}, {"gone.3"}) == {}
    earlier = HostNode("k1", {"host.shardmesh.io/photos.1": "", "host.shardmesh.io/gone.3": ""})
    taken_over = label_change(earlier, {"host.shardmesh.io/photos.1"}, {"gone.3"})
    assert taken_over == {"metadata": {"labels": {"host.shardmesh.io/photos.1": "copy"}}}


def test_a_dataset_lies_where_about_as_much_is_as_anywhere() -> None:
    assert holders([Holding("a", 1, 100), Holding("b", 1, 60), Holding("c", 1, 40), Holding("d", 0, 0)]) == {
        "a",
        "b",
    }
    assert holders([Holding("a", 0, 0)]) == set()


def pod(name: str, gpus: int, datasets: str = "", node: str = "") -> dict[str, Any]:
    labels = {"shardmesh.io/dataset": datasets} if datasets else {}
    container = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {"containers": [container]} | ({"nodeName": node} if node else {}),
    }


def test_from_what_is_seen_to_a_plan() -> None:
    board = PlacementBoard()
    board.record_holdings(
        "ns", "photos", [Holding("m-0", 3, 100, 10_000, 100), Holding("m-1", 0, 0, 10_000, 0)]
    )
    mesh_nodes = [
        {
            "metadata": {"namespace": "ns"},
            "spec": {"nodeId": f"m-{number}", "pool": "s"},
            "status": {"node": host, "state": "up", "zone": "z1", "rack": rack},
        }
        for number, (host, rack) in enumerate((("k1", "r1"), ("k3", "r2")))
    ]
    datasets = {("ns", "photos"): spec_of("s3://a/b")}
    ground = MeshGround(Topology(), {"s": (("store",), "nvme")})
    pods = [pod("here", 4, "photos", "k3"), pod("other", 2, "", "k1"), pod("waits", 1, "photos")]
    found, names = inventory_of(datasets, board, mesh_nodes, PLACES, pods, ground)
    assert found.demand == (Demand("ns/photos", "", "", "", 1), Demand("ns/photos", "z1", "r2", "k3", 4))
    assert found.free_gpus == (
        FreeGpus("z1", "r1", "k1", 6),
        FreeGpus("z1", "r1", "k2", 8),
        FreeGpus("z1", "r2", "k3", 4),
    )
    assert found.current == {"ns/photos": ("m-0",)}
    assert (found.nodes[1].host, found.nodes[1].capacity, found.datasets[0].size) == ("k3", 10_000, 100)
    board.record_plan(plan_placement(found, OperatorSettings()), names)
    spots = board.copy_locations("ns", "photos")
    assert [spot.node for spot in spots] == ["m-1", "m-0"]  # near its GPUs; and where it is until then
    assert "GPUs in the same host" in spots[0].reason
    board.record_holdings(
        "ns", "photos", board.holdings["ns", "photos"], DatasetHomes(("m-0", "m-1"), ("m-0",))
    )
    found, _ = inventory_of(datasets, board, mesh_nodes, PLACES, pods, ground)
    assert (set(found.moving), found.current["ns/photos"]) == ({"ns/photos"}, ("m-0", "m-1"))
    assert "is removed once" in board.copy_locations("ns", "photos")[1].reason
    mesh_nodes[0]["spec"]["desiredState"] = "Cordoned"
    mesh_nodes[1]["status"]["state"] = "away"
    found, _ = inventory_of(datasets, board, mesh_nodes, PLACES, pods, ground)
    assert [(node.accepting, node.keeping) for node in found.nodes] == [(False, True)] * 2
    assert not plan_placement(found, OperatorSettings()).moves  # what is there stays
    elsewhere = MeshGround(Topology(rack="row"), {"s": (("compute",), "")})
    found, _ = inventory_of(datasets, board, mesh_nodes, PLACES, pods, elsewhere)
    assert [(node.accepting, node.keeping) for node in found.nodes] == [(False, False)] * 2
    assert found.demand[1] == Demand("ns/photos", "z1", "", "k3", 4)  # it has no label of this name
    board.forget("ns", "photos")
    assert board.copy_locations("ns", "photos") == []
