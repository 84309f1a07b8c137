"""Four jobs at once over the same photographs: ours share one pass, a peer's are four copies.

Law: all processes are started, and have imported torch, before the clock starts; it stops with the last batch
of the last job, not when the interpreters have come to their end. A peer's copies have one worker each: eight
on two cores would only be in each other's way.
"""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from bench import photo_dataset
from bench.interleave import turns
from bench.loader_timing import OURS, TIMEOUT_S, argv_of
from bench.results import Figure
from bench.timing import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.loader_timing import Turn
    from bench.rows import Scale

NAME: Final = "sharing"
JOBS: Final = 4
PEERS: Final = ("webdataset", "litdata")
LEAST: Final = 6.0
SEED: Final = 500
"""Another order than the loaders' row had: none of its batches is one of these."""


class JobError(RuntimeError):
    """A job that did not begin, or ended with an error."""


def title(scale: Scale) -> str:
    """What is asked for."""
    return f"Four jobs at once, {scale.photographs:,} photographs each"


def together(turn: Turn, scale: Scale, root: Path, number: int) -> Figure:
    """All jobs' samples over the time until the last is done."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(_start(turn, scale, root, number, job)) for job in range(JOBS)]
        for job in jobs:
            stack.callback(job.kill)
        try:
            _await(jobs)
            began = time.perf_counter()
            for job in jobs:
                _tell(job)
            passes = [_pass_of(job) for job in jobs]
            samples = sum(one.samples for one in passes)
            seconds = max(one.ended for one in passes) - began
        except (JobError, OSError, subprocess.TimeoutExpired) as error:
            return Figure(turn.name, number, {}, str(error)[:300])
    wanted = JOBS * scale.photographs
    problem = "" if samples == wanted else f"{samples} samples instead of {wanted}"
    return Figure(turn.name, number, {"rate": samples / seconds}, problem)


def _await(jobs: Sequence[subprocess.Popen[str]]) -> None:
    """Until all have said that they are ready."""
    for job in jobs:
        assert job.stdout is not None
        if job.stdout.readline() != "ready\n":
            _, errors = job.communicate(timeout=TIMEOUT_S)
            said = [line for line in errors.splitlines() if line.strip()][-1:] or ["no output"]
            raise JobError(f"a job did not begin: {said[0]}")


def _tell(job: subprocess.Popen[str]) -> None:
    assert job.stdin is not None
    job.stdin.write("go\n")
    job.stdin.flush()


def _start(turn: Turn, scale: Scale, root: Path, number: int, job: int) -> subprocess.Popen[str]:
    argv = argv_of(turn, scale, root / f"job-{job}", root, number + SEED)
    more = ["--share", f"four-{number}"]
    if turn.loader not in OURS:
        more = ["--together", "--passes", "1", "--workers", "1"]
    pipe, environment = subprocess.PIPE, photo_dataset.environment(turn.server)
    return subprocess.Popen(
        [*argv, *more],
        cwd=photo_dataset.ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def _pass_of(job: subprocess.Popen[str]) -> Pass:
    out, _ = job.communicate(timeout=TIMEOUT_S)
    lines = [json.loads(line[2:]) for line in out.splitlines() if line.startswith("@ ")]
    if job.returncode or not lines:
        raise JobError(f"a job ended with {job.returncode}")
    return Pass(**lines[0])


def measure(
    jobs: Sequence[Turn], rounds: int, scale: Scale, root: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Each of them in its turn."""
    named = {job.name: job for job in jobs}
    for number, name in turns(NAME, named, rounds, say):
        yield together(named[name], scale, root, number)
