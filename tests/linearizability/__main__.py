"""Schedules of faults under many clients on few names, each name's history checked for linearizability.

    python -m tests.linearizability --seeds 3                     three schedules of 60 seconds each
    python -m tests.linearizability --first 100 --minutes 60      seeds 100 and following, for an hour
    python -m tests.linearizability --kinds kill-process pause    only these faults
    python -m tests.linearizability --kinds none                  no fault at all
    python -m tests.linearizability --check DIR/seed-7/*.jsonl    judge kept histories again, and show them

Each seed makes a mesh of its own. A line a seed says how many names' histories are

    linearizable     one order of all operations explains every answer
    inversion        the same, but for two reads that went from new to old while the write was under way
    unacknowledged   a read gave a write whose client was never told that it took place, and which did not;
                     or a listing of versions lacked one that was under way
    violation        anything else: docs/promises.md does not allow it
    undecided        the search took too long

and the exit code is 1 if any is of the last two kinds. Those are kept under --keep: seed-N/BUCKET-NAME.jsonl
is the whole history, .shrunk.jsonl what contradicts itself, .txt both to be read, beside the nodes' logs and
maps.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import get_args

from tests.linearizability.checker import ALLOWED
from tests.linearizability.faults import KINDS, Kind
from tests.linearizability.history import History
from tests.linearizability.running import SIZE, run


def main() -> int:
    """Exit code 1 when a name's history is not what docs/promises.md allows."""
    asked = _arguments()
    # What was started and mounted is taken away again.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if asked.check:
        return max([_show(path) for path in asked.check])
    kinds = [] if asked.kinds == ["none"] else asked.kinds
    bad = number = 0
    minutes = 0.0
    while minutes < asked.minutes if asked.minutes else number < asked.seeds:
        seed = asked.first + number
        outcome = run(
            seed, asked.seconds, hosts=asked.hosts, clients=asked.clients, kinds=kinds, keep=asked.keep
        )
        print(outcome, flush=True)
        for history in outcome.wrong:
            name = f"{history.bucket}/{history.key}"
            print(f"  {name}: {history.why()}; see {asked.keep}/seed-{seed}", flush=True)
        bad += len(outcome.wrong)
        minutes += outcome.seconds / 60
        number += 1
    print(f"{number} seeds, {minutes:.1f} minutes of schedules, {bad} names that violate the promises")
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    lines = [f"  {kind:<16} {what}" for kind, what in KINDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m tests.linearizability",
        description=__doc__,
        epilog="\n".join(["faults:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a seed's schedule is")
    parser.add_argument("--minutes", type=float, help="as many seeds as that takes, instead of --seeds")
    parser.add_argument("--hosts", type=int, default=3, help="how many nodes")
    parser.add_argument("--clients", type=int, default=SIZE, help="how many connections at once")
    parser.add_argument(
        "--kinds", nargs="*", choices=[*get_args(Kind), "none"], metavar="KIND", help="only these faults"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path(".linearizability"), metavar="DIR", help="where violations are kept"
    )
    parser.add_argument("--check", nargs="*", type=Path, metavar="FILE", help="run nothing; judge these")
    return parser.parse_args()


def _show(path: Path) -> int:
    history = History.load(path)
    verdict = history.verdict
    print(f"{path}: {verdict}", history.shrink().timeline(), sep="\n")
    return 0 if verdict in ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
