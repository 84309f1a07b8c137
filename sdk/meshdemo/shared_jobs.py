"""Several jobs over the same plan: the daemon decodes once for all of them.

Law: the jobs are processes of their own, as in a sweep; what was decoded is read from the daemon's /metrics.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from meshdemo.screen import ClaimError, check, fact, progress

if TYPE_CHECKING:
    from meshdemo.daemon import Daemon
    from meshdemo.scale import Scale

DECODED = "meshd_transform_samples_total"
SLACK = 1.25
"""A job that falls behind the window has its batch built again for itself; a larger lag is not sharing."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the jobs did together: `decoded` samples by the daemon for `asked` by the jobs; times in
    seconds.
    """

    jobs: int
    asked: int
    decoded: int
    seconds: float
    waited_share: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job's process and its two pipes."""

    process: subprocess.Popen[str]
    to: IO[str]
    back: IO[str]


def start_job(stack: ExitStack, daemon: Daemon, scale: Scale) -> Job:
    """Start a job that opens its dataset, registers its plan, and waits for the start."""
    argv = [sys.executable, "-m", "meshdemo.job", "sweep", str(scale.photo_batch)]
    process = subprocess.Popen(
        argv, env=daemon.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    if process.stdin is None or process.stdout is None:
        raise ClaimError("a job has its pipes")
    return Job(process, process.stdin, process.stdout)


def run_jobs(daemon: Daemon, scale: Scale) -> tuple[list[dict[str, Any]], float]:
    """Start the jobs, let them begin together; their figures, and the seconds until the last had ended."""
    with ExitStack() as stack, progress() as bars:
        task = bars.add_task(f"{scale.jobs} jobs", total=scale.jobs, note="starting")
        jobs = [start_job(stack, daemon, scale) for _ in range(scale.jobs)]
        for job in jobs:
            job.back.readline()
        start = time.perf_counter()
        bars.update(task, note="running")
        for job in jobs:
            print("go", file=job.to, flush=True)
        figures = []
        for job in jobs:
            figures.append(json.loads(job.back.readline() or "{}"))
            bars.advance(task)
        bars.update(task, note="")
        return figures, time.perf_counter() - start


def sweep(daemon: Daemon, scale: Scale) -> Sweep:
    """Run the jobs; check that all saw the same epoch and that it was decoded about once."""
    before = daemon.metric(DECODED)
    figures, seconds = run_jobs(daemon, scale)
    decoded = round(daemon.metric(DECODED) - before)
    check(all(figures), f"all {scale.jobs} jobs ended well")
    asked = sum(each["samples"] for each in figures)
    hashes = {each["epoch_hash"] for each in figures}
    check(len(hashes) == 1, f"each saw the same epoch ({hashes.pop()})")
    limit = SLACK * asked / scale.jobs
    check(decoded <= limit, f"{asked:,} samples asked for, {decoded:,} decoded", f"more than {limit:.0f}")
    fact(f"{decoded * scale.jobs / asked:.2f} decode passes for {scale.jobs} jobs")
    loop = sum(each["seconds"] for each in figures)
    waited = sum(each["waited"] for each in figures) / loop
    return Sweep(scale.jobs, asked, decoded, seconds, waited, sum(each["cpu"] for each in figures))
