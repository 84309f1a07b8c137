"""Concurrent committers to one table: of delta-rs, icechunk and Lance.

Eight processes make fifty commits each, one row a commit, to one table: at the end each row is there once.
Then the same to another table, while three of the processes are killed at random moments: what was
acknowledged is there, nothing is there twice, and nothing that nobody committed.
"""

from __future__ import annotations

import collections
import json
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.compat.conformance.knowing import PASSED
from tests.compat.suites.places import ProgramError, Result, end
from tests.compat.suites.python_suites import INSIDE, version

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.compat.suites.places import Place

WRITERS, COMMITS, KILLS = 8, 50, 3
_LIMIT = 1500.0
_PROGRAM = str(INSIDE / "committer.py")


@dataclass(frozen=True, slots=True)
class Journal:
    """What the processes wrote down: rows they began to commit, rows acknowledged, commits tried again."""

    begun: frozenset[str]
    done: tuple[str, ...]
    again: int

    @classmethod
    def of(cls, lines: Iterable[str]) -> Journal:
        """Of the journals' lines; the last one of a killed process may be cut off."""
        words = [line.split() for line in lines]
        pairs = [(pair[0], pair[1]) for pair in words if len(pair) == 2]
        by_verb = {verb: [row for v, row in pairs if v == verb] for verb in ("begin", "done", "again")}
        return cls(frozenset(by_verb["begin"]), tuple(by_verb["done"]), len(by_verb["again"]))


def verdicts(journal: Journal, rows: Sequence[str]) -> dict[str, str]:
    """What is asked of every run, by name."""
    counts = collections.Counter(rows)
    lost = [row for row in journal.done if row not in counts]
    twice = [row for row, number in counts.items() if number > 1]
    invented = [row for row in counts if row not in journal.begun]
    wrong = {
        "nothing acknowledged is lost": lost,
        "nothing is there twice": twice,
        "nothing is there that nobody committed": invented,
    }
    return {
        name: f"{len(found)} of {len(counts)}: {', '.join(sorted(found)[:5])}" if found else PASSED
        for name, found in wrong.items()
    }


def run(place: Place, *, library: str, package: str) -> Result:
    """Both runs, each with a table of its own."""
    outcomes: dict[str, str] = {}
    notes = []
    for name, kills in (("all run to the end", 0), (f"{KILLS} of them killed", KILLS)):
        bucket = f"commits-{kills}"
        place.daemon.client().create_bucket(Bucket=bucket)
        told = partial(_told, place, library, bucket)
        told("create")
        begin = time.monotonic()
        journal, killed, codes = _race(place, library, bucket, kills)
        print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)
        rows = [json.loads(line) for line in told("rows").splitlines() if line.startswith('"')]
        for what, verdict in verdicts(journal, rows).items():
            outcomes[f"{name}: {what}"] = verdict
        outcomes[f"{name}: the others made all their commits"] = _others(journal, killed, codes)
        notes.append(
            f"{name}: {len(journal.done)} acknowledged, {len(rows)} present, {journal.again} retried"
        )
    return Result(outcomes, version(place, package), "; ".join(notes))


def _told(place: Place, library: str, bucket: str, verb: str) -> str:
    command = [place.python, _PROGRAM, library, verb]
    return place.run(command, environment={"BUCKET": bucket}, limit=300)


def _others(journal: Journal, killed: Sequence[int], codes: Mapping[int, int]) -> str:
    """Whether those that were not killed came to their end with all their rows acknowledged."""
    done = collections.Counter(row.partition("-")[0] for row in journal.done)
    short = [
        f"w{writer}: exit code {codes[writer]}, {done[f'w{writer}']} commits"
        for writer in range(WRITERS)
        if writer not in killed and (codes[writer] != 0 or done[f"w{writer}"] != COMMITS)
    ]
    return "; ".join(short) or PASSED


def _race(place: Place, library: str, bucket: str, kills: int) -> tuple[Journal, list[int], dict[int, int]]:
    """Let them commit; also who was killed, and with which code each ended."""
    journals = place.scratch / f"journals-{bucket}"
    journals.mkdir()
    chance = random.Random()
    at = sorted(chance.sample(range(WRITERS, WRITERS * COMMITS // 2), kills), reverse=True)
    processes = {
        writer: place.start(
            [
                *(place.python, _PROGRAM, library, "commit", "--writer", str(writer)),
                *("--commits", str(COMMITS), "--journal", str(journals / str(writer))),
            ],
            environment={"BUCKET": bucket},
        )[0]
        for writer in range(WRITERS)
    }
    try:
        killed = _kill_some(processes, at, chance, lambda: len(_read(journals).done))
        codes = {writer: process.wait(_LIMIT) for writer, process in processes.items()}
    finally:
        for process in processes.values():
            end(process)
    return _read(journals), killed, codes


def _kill_some(
    processes: Mapping[int, subprocess.Popen[bytes]],
    at: list[int],
    chance: random.Random,
    acknowledged: Callable[[], int],
) -> list[int]:
    """Kill one, chosen by chance, each time so many commits are acknowledged as the last of `at` says."""
    killed: list[int] = []
    deadline = time.monotonic() + _LIMIT
    while at:
        running = [writer for writer, process in processes.items() if process.poll() is None]
        if not running or time.monotonic() > deadline:
            raise ProgramError(f"only {acknowledged()} commits were acknowledged; none was left to kill")
        if acknowledged() >= at[-1]:
            at.pop()
            time.sleep(chance.random() / 10)  # anywhere within a commit
            killed.append(chance.choice(running))
            end(processes[killed[-1]])
        time.sleep(0.02)
    return killed


def _read(journals: Path) -> Journal:
    return Journal.of(line for file in journals.iterdir() for line in file.read_text().splitlines())
