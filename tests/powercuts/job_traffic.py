"""What a node or a mesh makes by jobs, which a power cut interrupts: objects of views written as ordinary
ones, members of archives, and a decoded cache filled for a plan. A job goes on after the cut by itself, and
what it leaves is what an undisturbed run has left.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from tests.component.batches.test_decoded_cache_daemon import BATCH, frame, picture, plan_of
from tests.powercuts.traffic import Traffic, ask
from tests.support.archive_files import archive_of
from tests.support.job_fixtures import done, ended, objects

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable

    from tests.support.daemons import Daemon

_FILES: Final = {f"{number:03}.txt": b"file %d\n" % number * 3000 for number in range(32)}
_JOBS: Final = {
    "materialize": {"kind": "materialize", "source": "s3://files--v/"},
    "extract": {"kind": "extract", "source": "s3://files/packed"},
}
_PICTURES: Final = 2 * BATCH
_EPOCHS: Final = 4
_RATE: Final = 256 << 10
"""Bytes of pictures a second, so that a job to warm the cache takes longer than most lives."""
ARGUMENTS: Final = ("--decoded-cache", "256MiB")


class Jobs(Traffic):
    """Jobs with targets of their own, and jobs that warm the decoded cache for an epoch of a plan.
    `interrupted`: how many a cut has interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self._started = 0
        self._plan = ""
        self._right: dict[str, dict[str, bytes]] = {}
        self._frames: dict[int, list[bytes]] = {}
        self._cut_ms = 0.0
        self._cut_off = set[str]()

    def prepare(self, daemon: Daemon, client: Any) -> None:
        self.histories.clear()  # each job has ended: see `find`
        if self._plan:
            return
        for bucket in ("files", "photos", "made", "right"):
            self._create_bucket(client, bucket)
        for name, body in _FILES.items():
            client.put_object(Bucket="files", Key=f"in/{name}", Body=body)
        client.put_object(Bucket="files", Key="packed/all.tar", Body=archive_of("tar", _FILES))
        for number in range(_PICTURES):
            client.put_object(Bucket="photos", Key=f"train/{number:04}.jpg", Body=picture(number))
        view = {"kind": "shards", "prefix": "in/", "count": 2}
        ask(daemon, "POST", "/-/views", {"bucket": "files", "name": "v", "view": view})
        for kind, job in _JOBS.items():
            done(daemon, **job, target=f"s3://right/{kind}")
            self._right[kind] = objects(client, "right", f"{kind}/")
        plan = plan_of(daemon)
        self._frames = {epoch: _epoch(daemon, plan, epoch) for epoch in range(_EPOCHS)}
        time.sleep(3.0)  # relaxed stores keep what is that old
        self._plan = plan

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        kind = chance.choice((*_JOBS, "warm"))
        if kind == "warm":
            epoch = chance.randrange(_EPOCHS)
            name, job = f"warm-{epoch}", {"kind": "warm", "plan": self._plan, "epoch": epoch, "rate": _RATE}
        else:
            with self._counting:
                self._started += 1
                name = f"{kind}-{self._started}"
            job = {**_JOBS[kind], "target": f"s3://made/{name}"}
        with self.changing(name, "done"):
            ask(daemon, "POST", "/-/jobs", job)
        time.sleep(chance.uniform(0.1, 0.6))

    def cut_off(self) -> None:
        self._cut_ms = 1e3 * time.time()

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        for job in ask(daemon, "GET", "/-/jobs")["jobs"]:
            if _name(job["spec"]) == name:
                job = ended(daemon, job)
                if job["started_ms"] < self._cut_ms < job["ended_ms"]:
                    self._cut_off.add(job["id"])
                    self.interrupted = len(self._cut_off)
                return self._outcome(daemon, client, name, job)
        return None

    def _outcome(self, daemon: Daemon, client: Any, name: str, job: dict[str, Any]) -> str:
        kind = job["spec"]["kind"]
        if kind == "warm":
            report, epoch = job["report"], job["spec"]["epoch"]
            kept, left_out = report["stored"] + report["there"], sum(report["left_out"].values())
            # In a mesh, each node has its share, or all.
            if report["bad"] or report["refused"] or not kept or (kept + left_out) % _PICTURES:
                return f"{job['state']}, {report}"
            same = _epoch(daemon, self._plan, epoch) == self._frames[epoch]
        else:
            same = objects(client, "made", f"{name}/") == self._right[kind]
        return str(job["state"]) + ("" if same else ", and other bytes than an undisturbed run's")


def _name(spec: dict[str, Any]) -> str:
    """How histories call a job."""
    return f"warm-{spec['epoch']}" if spec["kind"] == "warm" else spec["target"].split("/")[-2]


def _epoch(daemon: Daemon, plan: str, epoch: int) -> list[bytes]:
    return [frame(daemon, plan, epoch, step) for step in range(_PICTURES // BATCH)]
