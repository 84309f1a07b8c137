"""Power cuts by the hour: a daemon, a store or a mesh on file systems that forget what was not synced, under
writers.

make powercuts CUTS=1000
make powercuts ARGS="--seed 7 --relaxed"
make powercuts ARGS="--scenes store syncs"
make powercuts BUG=order
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.powercuts.mesh_scene import ManyNodesScene
from tests.powercuts.scenes import BUG_CUTS, BUGS, SCENES, Stage
from tests.powercuts.shrink import keep

if TYPE_CHECKING:
    from tests.powercuts.history import Report
    from tests.powercuts.scenes import AnyScene

_PER_SEED: Final = 10


def _cut(scene: AnyScene, seconds: float) -> Report:
    with ExitStack() as ending:
        if isinstance(scene, ManyNodesScene):
            ending.callback(scene.close)
        while scene.report.cuts < _PER_SEED and not scene.report.wrong:
            scene.cut(seconds)
        cuts = scene.report.cuts
        if not scene.report.wrong:
            scene.finish()
        scene.report.cuts = cuts
        return scene.report


def _found(scene: AnyScene, seconds: float) -> Report:
    """After as many cuts as it takes to find a deliberate fault."""
    while scene.report.cuts < BUG_CUTS and not scene.report.wrong:
        scene.cut(seconds)
    return scene.report


def _try_bug(stage: Stage, asked: argparse.Namespace) -> int:
    """Exit code 1 when the deliberate fault was not found."""
    cuts = []
    for seed in range(asked.first, asked.first + -(-asked.cuts // BUG_CUTS)):
        report = _found(stage.scene("objects", seed, relaxed=False, options=BUGS[asked.bug]), asked.seconds)
        print(f"seed {seed}, without the sync of {asked.bug}: {report}", flush=True)
        cuts.append(report.cuts if report.wrong else None)
    print(f"{asked.bug}: found at cut {', '.join(str(cut or 'never') for cut in cuts)}")
    return 1 if None in cuts else 0


def _kept(scene: AnyScene, folder: Path) -> str:
    return scene.keep(folder) if isinstance(scene, ManyNodesScene) else keep(scene, folder)


def main() -> int:
    """Exit code 1 when anything was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=20, help="how many, over both modes")
    parser.add_argument("--first", type=int, default=1, help=f"the first seed, of {_PER_SEED} cuts")
    parser.add_argument(
        "--scenes", nargs="+", choices=SCENES, default=SCENES, help="by turns; by default, all"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of writing before each cut")
    parser.add_argument("--relaxed", action="store_true", help="only with durability: relaxed")
    parser.add_argument("--commit", action="store_true", help="only with durability: commit")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="END", help="syncs of these do nothing"
    )
    parser.add_argument(
        "--bug", choices=BUGS, help=f"a deliberate fault, which is found within {BUG_CUTS} cuts of each seed"
    )
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="that each sync takes")
    parser.add_argument(
        "--keep", type=Path, default=Path(".powercuts"), metavar="FOLDER", help="for cuts that were found"
    )
    asked = parser.parse_args()
    logging.getLogger("meshd").setLevel(logging.CRITICAL)  # what stores in this process say of each cut
    if asked.bug:
        with tempfile.TemporaryDirectory() as scratch, Stage(Path(scratch)) as stage:
            return _try_bug(stage, asked)
    modes = [mode for mode, only in ((False, asked.relaxed), (True, asked.commit)) if not only]
    options = [word for end in asked.ignore for word in ("--ignore", end)]
    options += ["--delay", str(asked.delay)] if asked.delay else []
    cuts = acknowledged = wrong = 0
    with tempfile.TemporaryDirectory() as scratch, Stage(Path(scratch)) as stage:
        for seed in range(asked.first, asked.first + -(-asked.cuts // _PER_SEED)):
            relaxed = modes[seed % len(modes)]
            name = asked.scenes[seed // len(modes) % len(asked.scenes)]
            scene = stage.scene(name, seed, relaxed=relaxed, options=options)
            try:
                report = _cut(scene, asked.seconds)
            except pytest.skip.Exception as reason:
                print(f"seed {seed} {name}: not run, {reason}", flush=True)
                continue
            print(f"seed {seed} {name} {'relaxed' if relaxed else 'commit'}: {report}", flush=True)
            if report.wrong:
                print(_kept(scene, asked.keep / f"{name}-{seed}"), flush=True)
            cuts, acknowledged = cuts + report.cuts, acknowledged + report.acknowledged
            wrong += len(report.wrong)
    print(f"{cuts} cuts, {acknowledged} acknowledged writes, {wrong} lost or wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
