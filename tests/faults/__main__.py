"""Fault schedules by the hour. A failing seed is printed; keep it in test_schedules.py.

make faults SEEDS=20 LENGTH=12
make faults ARGS="--faults 1000 --json report.json"
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import cast, get_args

from tests.faults.campaign import Campaign
from tests.faults.schedules import Kind
from tests.support.fork_server import ForkServers, forked_from


def main() -> int:
    """Exit code 1 when anything was wrong, or an ordinary client saw an error in a gentle schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--faults", type=int, help="as many seeds as it takes for so many faults, instead")
    parser.add_argument("--length", type=int, default=8, help="faults a schedule has before its loss")
    parser.add_argument("--hosts", type=int, default=3)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--harsh", action="store_true", help="let faults overlap")
    mode.add_argument("--mixed", action="store_true", help="let them overlap in three schedules of four")
    parser.add_argument("--kinds", nargs="*", choices=get_args(Kind), help="only these")
    parser.add_argument("--json", type=Path, help="write a report to this file, after each schedule")
    asked = parser.parse_args()
    campaign = Campaign(
        asked.length,
        hosts=asked.hosts,
        harsh=4 if asked.harsh else 3 if asked.mixed else 0,
        kinds=cast("list[Kind] | None", asked.kinds),
        report=asked.json,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and nodes are removed
    with ForkServers() as servers, forked_from(servers):
        campaign.run(asked.first, asked.seeds, asked.faults)
    print(campaign.summary(), flush=True)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
