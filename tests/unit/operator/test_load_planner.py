"""What a MeshLoad with `warm` starts, and what its status says of samples."""

from __future__ import annotations

from typing import Any

import pytest

from meshoperator.planners.load_planner import (
    is_warm_up_due,
    job_documents,
    jobs_with_changed_rate,
    outcome,
    sum_jobs,
    warm_document,
)
from meshoperator.resources import MeshLoadSpec, ResourceError, parse

PLAN = "3f" * 32
REPORT = {
    "stored": 90,
    "there": 4,
    "bytes": 1 << 20,
    "cpu_seconds": 0.5,
    "left_out": {"no room in the decoded cache": 5},
    "bad": {"decode of image: it is cut short": 1},
    "refused": {},
}


def spec(**fields: Any) -> MeshLoadSpec:
    return parse(MeshLoadSpec, {"datasetRef": "photos", **fields})


def job(kind: str, state: str, **fields: Any) -> dict[str, Any]:
    progress = {"phase": "checking", "outputs": 4, "outputs_total": 4, "bytes": 40, "bytes_total": 40}
    progress |= {"samples": 100, "samples_total": 100}
    base = {"kind": kind, "state": state, "progress": progress, "failed": 0, "failures": [], "error": ""}
    return {**base, "spec": {"kind": kind, "source": "s3://photos/train/"}, **fields}


def test_samples_are_decoded_when_all_objects_are_loaded() -> None:
    wanted = spec(warm={"plan": PLAN}, paths=["train/"])
    assert warm_document(wanted, "photos", "v1/") == {
        "kind": "warm",
        "plan": PLAN,
        "source": "s3://photos/v1/",
    }
    assert [each["kind"] for each in job_documents(wanted, "photos", "v1/")] == ["prefetch"]
    assert not is_warm_up_due(wanted, [job("prefetch", "running"), job("prefetch", "done")])
    assert not is_warm_up_due(wanted, [job("prefetch", "failed")])
    assert is_warm_up_due(wanted, [job("prefetch", "done"), job("prefetch", "done")])
    assert not is_warm_up_due(wanted, [job("prefetch", "done"), job("warm", "done")])
    assert not is_warm_up_due(spec(), [job("prefetch", "done")])


def test_its_epoch_and_bandwidth_are_those_of_the_load() -> None:
    wanted = spec(warm={"plan": PLAN, "epoch": 3}, bandwidth="10Mi")
    found = warm_document(wanted, "photos", "")
    assert found == {
        "kind": "warm",
        "plan": PLAN,
        "source": "s3://photos/",
        "epoch": 3,
        "rate": 10 << 20,
    }
    running = job("warm", "running", spec={**found, "rate": 5})
    assert jobs_with_changed_rate([found], [running]) == [found]
    assert jobs_with_changed_rate([found], [job("warm", "running", spec=found)]) == []
    assert jobs_with_changed_rate([found], [job("prefetch", "running")]) == []


def test_a_status_tells_samples_from_objects() -> None:
    under_way = sum_jobs([job("prefetch", "done"), job("warm", "running")])
    assert (under_way.objects, under_way.bytes, under_way.samples) == ((4, 4), (40, 40), (100, 100))
    assert outcome(under_way) == ("Running", "Decoding", "100 of 100 samples decoded for the plan")
    done = sum_jobs([job("prefetch", "done"), job("warm", "done", report=REPORT)])
    phase, reason, message = outcome(done)
    assert (phase, reason) == ("Succeeded", "Done")
    assert message == (
        "4 objects, 40 bytes loaded; 94 samples decoded; 5 not: no room in the decoded cache; "
        "1 not: decode of image: it is cut short"
    )
    refused = job("warm", "failed", error="the decoded cache is off")
    assert outcome(sum_jobs([job("prefetch", "done"), refused])) == (
        "Failed",
        "JobFailed",
        "the decoded cache is off",
    )


@pytest.mark.parametrize("plan", ["", "3f9c01d2", "Z" * 64])
def test_a_plan_is_a_whole_hash(plan: str) -> None:
    with pytest.raises(ResourceError):
        spec(warm={"plan": plan})
