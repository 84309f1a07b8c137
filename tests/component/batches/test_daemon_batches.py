"""Batches while the processes that make them are killed: late at worst, never wrong."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Answer

STEPS, BATCH = 12, 8


@pytest.fixture(scope="module")
def pair() -> Iterator[Daemon]:
    """Two workers, a coordinator, two transforms, and a dataset whose frames do not fit the cache."""
    with Daemon.start(workers=2, args=("--transform-workers", "2", "--frame-cache", "1MiB")) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="photos")
            for number in range(STEPS * BATCH):
                key = f"train/class{number % 3}/{number:04}.png"
                client.put_object(Bucket="photos", Key=key, Body=picture(number))
        yield daemon


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (48, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def post(daemon: Daemon, path: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = daemon.request("POST", path, json.dumps(document).encode())
    assert answer.status == 200, answer.body
    result: dict[str, Any] = json.loads(answer.body)
    return result


@pytest.fixture(scope="module")
def plan(pair: Daemon) -> str:
    fields = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}
    snapshot = post(pair, "/-/snapshots", {"source": "s3://photos/train/", "kind": "auto", "fields": fields})
    ops = [
        {"op": "decode", "field": "image", "args": {}},
        {"op": "random_resized_crop", "field": "image", "args": {"size": 96}},
        {"op": "to_chw", "field": "image", "args": {}},
    ]
    spec = {
        "version": 1,
        "ops": ops,
        "seed": 7,
        "shuffle": {"kind": "global"},
        "tail": "pad",
        "on_bad": "raise",
        "max_bad": 0.0,
    }
    made = post(pair, "/-/plans", {"snapshot": snapshot["snapshot"], "spec": spec, "batch": BATCH})
    assert made["steps"] == STEPS
    return str(made["plan"])


def frame(daemon: Daemon, plan: str, epoch: int, step: int) -> bytes:
    """A frame, asked for until it comes: Busy and lost connections are what a client retries."""
    answer: Answer | None = None
    for _ in range(1200):
        with contextlib.suppress(OSError, http.client.IncompleteRead):
            answer = daemon.request("GET", f"/-/plans/{plan}/{epoch}/{step}?batch={BATCH}")
            if answer.status == 200:
                return answer.body
            assert answer.status == 503, answer.body
        threading.Event().wait(0.05)
    raise AssertionError(f"no frame: {answer}")


def test_a_frame_is_the_same_from_every_worker_and_after_a_restart(pair: Daemon, plan: str) -> None:
    first = frame(pair, plan, 0, 3)
    assert all(frame(pair, plan, 0, 3) == first for _ in range(6))


@pytest.mark.parametrize("victim", ["transform-0", "transform-1", "coordinator-0", "worker-0"])
def test_killing_a_process_delays_frames_and_changes_none(pair: Daemon, plan: str, victim: str) -> None:
    reference = [frame(pair, plan, 1, step) for step in range(STEPS)]
    for round_ in range(2):
        killer = threading.Timer(0.02 * (round_ + 1), pair.signal_child, [victim])
        killer.start()
        again = [frame(pair, plan, 1, step) for step in range(STEPS)]
        await_end(killer)
        wait_for(pair, victim)
        assert again == reference


def wait_for(daemon: Daemon, child: str) -> None:
    for _ in range(3000):
        with contextlib.suppress(OSError):
            if child in daemon.children() and daemon.request("GET", "/-/ready").status == 200:
                return
        threading.Event().wait(0.02)
    raise AssertionError(f"{child} did not come back")


def test_nothing_was_marked_bad_and_nothing_crashed_by_itself(pair: Daemon, plan: str) -> None:
    answer = pair.request("GET", f"/-/plans/{plan}/bad")
    assert (answer.status, json.loads(answer.body)) == (200, [])
    assert "Traceback" not in pair.output()
