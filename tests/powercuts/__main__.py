"""Power cuts by the hour: a daemon, a store or a mesh on file systems that forget what was not synced, under
writers.

make powercuts CUTS=1000
make powercuts ARGS="--seed 7 --relaxed"
make powercuts ARGS="--scenes store syncs"
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.powercuts.mesh_scene import MeshScene
from tests.powercuts.movement_scene import MovementScene, RollingScene
from tests.powercuts.scene import Scene
from tests.powercuts.store_scene import StoreScene, Worker
from tests.powercuts.traffic import KINDS
from tests.support.fork_server import ForkServers, forked_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.powercuts.history import Report

AnyScene = Scene | StoreScene | MeshScene

_PER_SEED: Final = 10
_FULL: Final = ["--capacity", str(32 << 20)]
_DAMAGE: Final = ["--read-errors", "0.02", "--flips", "3"]


def _daemon(
    place: Path,
    seed: int,
    more: Sequence[str],
    *,
    kinds: Sequence[str],
    options: Sequence[str] = (),
    **how: Any,
) -> Scene:
    return Scene(place, seed, traffic=[KINDS[kind]() for kind in kinds], options=[*options, *more], **how)


_SCENES: Final[dict[str, dict[str, Any]]] = {
    "objects": {"kinds": ["objects"]},
    "versions": {"kinds": ["versions"]},
    "uploads": {"kinds": ["uploads"]},
    "settings": {"kinds": ["settings"]},
    "derived": {"kinds": ["derived"]},
    "mixed": {"kinds": ["objects", "versions", "uploads", "settings"]},
    "full": {"kinds": ["objects", "versions"], "options": _FULL},
    "damage": {"kinds": ["objects", "versions"], "options": _DAMAGE, "damages": True},
    "daemon-syncs": {"kinds": ["objects", "versions"], "failing_syncs": True},
}
"""Daemons, and what is written to them. Besides these there are `store`; `syncs`, a store of whose syncs one
fails in each life; and meshes of three daemons and an etcd."""
_MESHES: Final[dict[str, tuple[type[MeshScene], list[str]]]] = {
    "mesh": (MeshScene, ["objects", "conditional", "uploads"]),
    "movement": (MovementScene, ["stock", "objects", "conditional"]),
    "rolling": (RollingScene, ["stock", "objects", "conditional"]),
}
_ALL: Final = [*_SCENES, "store", "syncs", *_MESHES]


def _scene_of(name: str, worker: Worker, options: Sequence[str]) -> Callable[[Path, int, bool], AnyScene]:
    if name in _SCENES:
        return lambda place, seed, relaxed: _daemon(place, seed, options, relaxed=relaxed, **_SCENES[name])
    if name in _MESHES:
        mesh, kinds = _MESHES[name]
        return lambda place, seed, relaxed: mesh(
            place, seed, traffic=[KINDS[kind]() for kind in kinds], relaxed=relaxed, options=options
        )
    failing = name == "syncs"
    return lambda place, seed, relaxed: StoreScene(
        place, seed, worker, relaxed=relaxed, failing_syncs=failing, options=options
    )


def _cut(scene: AnyScene, seconds: float) -> Report:
    with ExitStack() as ending:
        if isinstance(scene, MeshScene):
            ending.callback(scene.close)
        while scene.report.cuts < _PER_SEED and not scene.report.wrong:
            scene.cut(seconds)
        cuts = scene.report.cuts
        if not scene.report.wrong:
            scene.finish()
        scene.report.cuts = cuts
        return scene.report


def main() -> int:
    """Exit code 1 when anything was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=20, help="how many, over both modes")
    parser.add_argument("--first", type=int, default=1, help=f"the first seed, of {_PER_SEED} cuts")
    parser.add_argument("--scenes", nargs="+", choices=_ALL, default=_ALL, help="by turns; by default, all")
    parser.add_argument("--seconds", type=float, default=1.5, help="of writing before each cut")
    parser.add_argument("--relaxed", action="store_true", help="only with durability: relaxed")
    parser.add_argument("--commit", action="store_true", help="only with durability: commit")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="END", help="syncs of these do nothing"
    )
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="that each sync takes")
    asked = parser.parse_args()
    logging.getLogger("meshd").setLevel(logging.CRITICAL)  # what stores in this process say of each cut
    modes = [mode for mode, only in ((False, asked.relaxed), (True, asked.commit)) if not only]
    options = [word for end in asked.ignore for word in ("--ignore", end)]
    options += ["--delay", str(asked.delay)]
    cuts = acknowledged = wrong = 0
    with (
        Worker() as worker,
        ForkServers() as servers,
        forked_from(servers),
        tempfile.TemporaryDirectory() as place,
    ):
        for seed in range(asked.first, asked.first + -(-asked.cuts // _PER_SEED)):
            relaxed = modes[seed % len(modes)]
            name = asked.scenes[seed // len(modes) % len(asked.scenes)]
            report = _cut(_scene_of(name, worker, options)(Path(place), seed, relaxed), asked.seconds)
            print(f"seed {seed} {name} {'relaxed' if relaxed else 'commit'}: {report}", flush=True)
            cuts, acknowledged = cuts + report.cuts, acknowledged + report.acknowledged
            wrong += len(report.wrong)
    print(f"{cuts} cuts, {acknowledged} acknowledged writes, {wrong} lost or wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
