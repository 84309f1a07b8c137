"""Two snapshots of GPUs, host, jobs and nodes, and the rates between them.

Law: taking a snapshot waits only for the nodes; everything on the screen follows from two snapshots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshsdk.loader.stats_page import Figures, Job
from meshtools.top import gpus, hosts, nodes
from meshtools.top.loader_pages import read_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshtools.top.gpus import Gpus
    from meshtools.top.hosts import HostRates, HostSnapshot
    from meshtools.top.nodes import NodeRates, Nodes, NodeSnapshot, ReportedJob


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at the time `now` (monotonic seconds)."""

    now: float
    host: HostSnapshot
    gpus: Gpus
    jobs: dict[tuple[int, float], tuple[Job, Figures]]
    nodes: Sequence[NodeSnapshot]


@dataclass(frozen=True, slots=True)
class JobRates:
    """A rank of a job. `rate`: samples per second; `stall` and its parts, as far as they are known: shares of
    the time between two snapshots; `au`: since the job began; `state`: computing, waiting or idle (between
    two loops)."""

    job: Job
    epoch: int
    step: int
    steps: int
    state: str
    rate: float
    stall: float
    network: float
    preprocessing: float
    fetch: float
    au: float
    gpus: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        job = {name: getattr(self.job, name) for name in Job.__slots__}
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("job", "gpus")}
        return job | own | {"gpus": list(self.gpus)}


@dataclass(frozen=True, slots=True)
class Screen:
    """The content of the screen."""

    host: HostRates
    gpus: Gpus
    jobs: Sequence[JobRates]
    nodes: Sequence[NodeRates]
    reported: Sequence[ReportedJob]
    notes: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host.to_dict(),
            "gpus": [gpu.to_dict() for gpu in self.gpus.found],
            "jobs": [job.to_dict() for job in self.jobs],
            "nodes": [node.to_dict() for node in self.nodes],
            "reported": [job.to_dict() for job in self.reported],
            "notes": list(self.notes),
        }


def take_snapshot(whom: Nodes) -> Snapshot:
    """Takes a snapshot."""
    nodes = whom.scrape_all(time.monotonic)
    jobs = {(job.pid, job.started): (job, figures) for job, figures in read_pages()}
    return Snapshot(time.monotonic(), hosts.read_host(), gpus.read_gpus(), jobs, nodes)


def diff_snapshots(before: Snapshot, after: Snapshot, notes: Sequence[str] = ()) -> Screen:
    """Returns what happened between two snapshots."""
    held = {pid: gpu.index for gpu in after.gpus.found for pid in gpu.pids}
    jobs = [
        _job(job, figures, before.jobs.get(key, (job, None))[1], before.now, after.now, held)
        for key, (job, figures) in after.jobs.items()
    ]
    jobs.sort(key=lambda each: (each.job.name, each.job.source, each.job.plan, each.job.rank, each.job.pid))
    found = [nodes.rates(*pair) for pair in zip(before.nodes, after.nodes, strict=True)]
    why = [f"GPUs: {after.gpus.why}"] if after.gpus.why else []
    reported = nodes.loader_reports(before.nodes, after.nodes)
    return Screen(hosts.rates(before.host, after.host), after.gpus, jobs, found, reported, (*why, *notes))


def _job(
    job: Job, now: Figures, was: Figures | None, since: float, until: float, held: dict[int, str]
) -> JobRates:
    """Returns the rates of a job. If no batch came between the snapshots, or the job has just begun, the rate
    is that of the whole run."""
    seconds = max(until - since, 1e-6)
    earlier_waited = 0.0 if was is None else _waited_seconds(was, since)
    stalled = _waited_seconds(now, until) - earlier_waited
    fresh = was is None or now.batches <= was.batches
    base = Figures(*[0.0] * len(Figures.__slots__)) if fresh or was is None else was
    span = now.seconds if fresh else seconds
    waited = max(now.waited - base.waited, 1e-9)
    share = (now.waited / now.seconds if now.seconds else 0.0) if was is None else stalled / seconds
    share = min(max(share, 0.0), 1.0) if now.running else 0.0
    preprocessing = share * min((now.preprocessing - base.preprocessing) / waited, 1.0)
    fetch = share * min((now.fetch - base.fetch) / waited, 1.0)
    return JobRates(
        job,
        int(now.epoch),
        int(now.step),
        int(now.steps),
        "waiting" if now.waiting else "computing" if now.running else "idle",
        (now.samples - base.samples) / span if span > 0 else 0.0,
        share,
        max(share - preprocessing - fetch, 0.0),
        preprocessing,
        fetch,
        max(1 - now.steady_waited / now.steady, 0.0) if now.steady > 0 else 0.0,
        (held[job.pid],) if job.pid in held else (),
    )


def _waited_seconds(figures: Figures, now: float) -> float:
    """Returns the seconds waited, the present wait included."""
    return figures.waited + (max(now - figures.waiting, 0.0) if figures.waiting else 0.0)
