"""Plans of a few texts, made and asked over HTTP."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

FIELDS = {"text": {"ext": ["txt"]}}


def fill(daemon: Daemon) -> None:
    s3 = daemon.client()
    if "texts" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:  # tried again
        s3.create_bucket(Bucket="texts")
    for number in range(4):
        s3.put_object(Bucket="texts", Key=f"a/{number}.txt", Body=b"text %d" % number)


def make(daemon: Daemon, seed: int = 7) -> tuple[str, str]:
    """A snapshot and a plan of it; their hashes."""
    body = json.dumps({"source": "s3://texts/a/", "fields": FIELDS}).encode()
    answer = daemon.request("POST", "/-/snapshots", body)
    assert answer.status == 200, answer.body
    snapshot = json.loads(answer.body)["snapshot"]
    body = json.dumps({"snapshot": snapshot, "spec": {"seed": seed, "ops": []}, "batch": 4}).encode()
    answer = daemon.request("POST", "/-/plans", body)
    assert answer.status == 200, answer.body
    return snapshot, json.loads(answer.body)["plan"]


def frame(daemon: Daemon, plan: str) -> tuple[int, bytes]:
    answer = daemon.request("GET", f"/-/plans/{plan}/0/0?batch=4")
    return answer.status, answer.body


def await_status(daemon: Daemon, plan: str, status: int) -> None:
    """A change of the control store is on its way to every process for a moment."""
    for _ in range(1200):
        if frame(daemon, plan)[0] == status:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"not {status}, but {frame(daemon, plan)}\n{daemon.output()}")
