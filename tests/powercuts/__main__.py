"""Power cuts by the hour: a daemon on a file system that forgets what was not synced, under writers.

make powercuts CUTS=1000
make powercuts ARGS="--seed 7 --relaxed"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.powercuts.scene import Scene
from tests.support.fork_server import ForkServers, forked_from

_PER_SEED = 10


def main() -> int:
    """Exit code 1 when anything was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=20, help="how many, over both modes")
    parser.add_argument("--first", type=int, default=1, help=f"the first seed, of {_PER_SEED} cuts")
    parser.add_argument("--seconds", type=float, default=1.5, help="of writing before each cut")
    parser.add_argument("--relaxed", action="store_true", help="only with durability: relaxed")
    parser.add_argument("--commit", action="store_true", help="only with durability: commit")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="END", help="syncs of these do nothing"
    )
    parser.add_argument(
        "--fail-sync", type=int, default=0, metavar="N", help="the Nth sync of each life fails"
    )
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="that each sync takes")
    asked = parser.parse_args()
    modes = [mode for mode, only in ((False, asked.relaxed), (True, asked.commit)) if not only]
    options = [word for end in asked.ignore for word in ("--ignore", end)]
    options += ["--fail-sync", str(asked.fail_sync), "--delay", str(asked.delay)]
    cuts = acknowledged = wrong = 0
    with ForkServers() as servers, forked_from(servers), tempfile.TemporaryDirectory() as place:
        for seed in range(asked.first, asked.first + -(-asked.cuts // _PER_SEED)):
            relaxed = modes[seed % len(modes)]
            scene = Scene(Path(place), seed, relaxed=relaxed, options=options)
            while scene.report.cuts < _PER_SEED and not scene.report.wrong:
                scene.cut(asked.seconds)
            if not scene.report.wrong:
                scene.finish()
            print(f"seed {seed} {'relaxed' if relaxed else 'commit'}: {scene.report}", flush=True)
            cuts, acknowledged = (
                cuts + min(_PER_SEED, scene.report.cuts),
                acknowledged + scene.report.acknowledged,
            )
            wrong += len(scene.report.wrong)
    print(f"{cuts} cuts, {acknowledged} acknowledged writes, {wrong} lost or wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
