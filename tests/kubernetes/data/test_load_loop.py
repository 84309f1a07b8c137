"""MeshLoad: its loop against a real API server and a real daemon; killed at every call it makes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.kubernetes.data.operating import (
    PHOTO,
    backed,
    bucket_of,
    condition,
    killed_at_every_call,
)

if TYPE_CHECKING:
    from tests.kubernetes.data.operating import (
        Operator,
    )


def test_loads_run_in_order_pause_evict_and_go_by_themselves(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")
    operator.make(
        "MeshLoad",
        "second",
        {"datasetRef": "photos", "paths": ["val/"], "runAfter": ["first"], "suspend": True},
    )
    operator.make("MeshLoad", "first", {"datasetRef": "photos", "paths": ["train/"]})
    operator.look("MeshLoad", "second")
    assert operator.status("MeshLoad", "second")["phase"] == "Suspended"
    operator.change("MeshLoad", "second", {"spec": {"suspend": False}})
    operator.look("MeshLoad", "second")
    assert condition(operator.status("MeshLoad", "second"), "Complete")[2] == "runAfter: 'first' is missing"
    first = operator.until("MeshLoad", "first", lambda found: found["phase"] == "Succeeded")
    assert (first["objectsDone"], first["bytesDone"], first["bytesTotal"]) == (4, 4 * PHOTO, 4 * PHOTO)
    operator.until("MeshLoad", "second", lambda found: found["phase"] == "Succeeded")
    operator.look("MeshDataset", "photos")
    assert operator.status("MeshDataset", "photos")["cachedBytes"] == 8 * PHOTO
    operator.make(
        "MeshLoad",
        "away",
        {"datasetRef": "photos", "action": "Evict", "paths": ["train/"], "ttlSecondsAfterFinished": 60},
    )
    away = operator.until("MeshLoad", "away", lambda found: found["phase"] == "Succeeded")
    assert (away["objectsDone"], away["bytesDone"]) == (4, 4 * PHOTO)
    operator.look("MeshDataset", "photos")
    assert operator.status("MeshDataset", "photos")["cachedBytes"] == 4 * PHOTO
    operator.look("MeshLoad", "away")
    assert not operator.gone("MeshLoad", "away")
    operator.now = lambda: time.time() + 61
    operator.look("MeshLoad", "away")
    operator.look("MeshLoad", "away")
    assert operator.gone("MeshLoad", "away")


def test_loads_by_schedule_and_what_cannot_be_loaded(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")
    operator.make("MeshLoad", "nightly", {"datasetRef": "photos", "policy": "Cron", "schedule": "30 2 * * *"})
    operator.look("MeshLoad", "nightly")
    status = operator.status("MeshLoad", "nightly")
    assert (status["phase"], status["nextRunAt"][11:]) == ("Waiting", "02:30:00Z")
    operator.now = lambda: time.time() + 86400
    done = operator.until("MeshLoad", "nightly", lambda found: found["phase"] == "Succeeded")
    assert done["jobId"].endswith("/1")
    assert done["nextRunAt"] > status["nextRunAt"]
    operator.now = lambda: time.time() + 2 * 86400
    operator.until(
        "MeshLoad", "nightly", lambda found: found["phase"] == "Succeeded" and found["jobId"].endswith("/2")
    )
    operator.now = time.time
    operator.make("MeshLoad", "wrong", {"datasetRef": "photos", "policy": "Cron", "schedule": "99 2 * * *"})
    operator.look("MeshLoad", "wrong")
    assert "'99 2 * * *': Bad minute" in condition(operator.status("MeshLoad", "wrong"), "Complete")[2]
    s3 = operator.daemon.client()
    lists = f"{bucket_of(operator)}-lists"
    s3.create_bucket(Bucket=lists)
    (operator.source / "wanted.txt").write_text("train/0.bin\ntrain/none.bin\n")
    operator.make("MeshLoad", "some", {"datasetRef": "photos", "manifest": "wanted.txt"})
    failed = operator.until("MeshLoad", "some", lambda found: found["phase"] == "Failed")
    assert failed["failed"][0]["path"].endswith("train/none.bin")
    assert condition(failed, "Complete")[1] == "SomeFailed"


def test_loads_converge_wherever_the_operator_dies(operator: Operator) -> None:
    backed(operator)
    operator.look("MeshDataset", "photos")

    def make(name: str) -> None:
        operator.make("MeshLoad", name, {"datasetRef": "photos", "paths": [f"train/{name[-1]}"]})

    killed_at_every_call(operator, "MeshLoad", make, lambda found: found.get("phase") == "Succeeded", 29)
