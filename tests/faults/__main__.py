"""Fault schedules by the hour. A failing seed is printed; keep it in test_schedules.py.

make faults SEEDS=20 LENGTH=12
"""

from __future__ import annotations

import argparse
import sys
from typing import cast, get_args

from tests.faults.running import run
from tests.faults.schedules import Kind


def main() -> int:
    """Exit code 1 when anything was wrong, or an ordinary client saw an error in a gentle schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--length", type=int, default=8, help="faults a schedule has")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--harsh", action="store_true", help="let faults overlap")
    parser.add_argument("--kinds", nargs="*", choices=get_args(Kind), help="only these")
    asked = parser.parse_args()
    kinds = cast("list[Kind] | None", asked.kinds)
    bad = 0
    for seed in range(asked.first, asked.first + asked.seeds):
        outcome = run(seed, asked.length, hosts=asked.hosts, harsh=asked.harsh, kinds=kinds)
        print(outcome, flush=True)
        bad += bool(outcome.faults) or (bool(outcome.unexpected) and not asked.harsh)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
