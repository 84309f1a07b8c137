"""The scenes of `make powercuts` by name: what runs, what is written to it, and what else happens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from tests.powercuts import job_traffic
from tests.powercuts.control_scene import ControlScene
from tests.powercuts.derived_traffic import Derived
from tests.powercuts.mesh_scene import ManyNodesScene, MeshScene
from tests.powercuts.movement_scene import MovementScene, RollingScene
from tests.powercuts.operator_scene import OperatorScene
from tests.powercuts.origin_traffic import Loads, WriteBack, WriteThrough
from tests.powercuts.scene import Scene
from tests.powercuts.settings_traffic import Settings
from tests.powercuts.store_scene import StoreScene, Worker
from tests.powercuts.traffic import Conditional, Objects, Stock, Uploads, Versions
from tests.powercuts.usage_traffic import Usage
from tests.support.fork_server import ForkServers, forked_from
from tests.support.origin_fixtures import write_credentials
from tests.support.origin_places import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.powercuts.traffic import Traffic
    from tests.support.origin_places import Place

AnyScene = Scene | StoreScene | ManyNodesScene

_FULL: Final = ["--capacity", str(32 << 20)]
_DAMAGE: Final = ["--read-errors", "0.02", "--flips", "3"]
_DAEMONS: Final[dict[str, dict[str, Any]]] = {
    "objects": {"kinds": ["objects"]},
    "versions": {"kinds": ["versions"]},
    "uploads": {"kinds": ["uploads"]},
    "settings": {"kinds": ["settings"]},
    "derived": {"kinds": ["derived"]},
    "mixed": {"kinds": ["objects", "versions", "uploads", "settings"]},
    "full": {"kinds": ["objects", "versions"], "options": _FULL},
    "damage": {"kinds": ["objects", "versions"], "options": _DAMAGE, "damages": True},
    "daemon-syncs": {"kinds": ["objects", "versions"], "failing_syncs": True},
    "usage": {"kinds": ["objects", "versions", "uploads", "usage"]},
    "write-back": {"kinds": ["write-back", "write-through"]},
    "loads": {"kinds": ["loads", "derived"]},
    "jobs": {"kinds": ["jobs"], "args": job_traffic.ARGUMENTS},
}
_STORES: Final[dict[str, dict[str, Any]]] = {"store": {}, "syncs": {"failing_syncs": True}}
_MESHES: Final[dict[str, tuple[type[MeshScene], list[str]]]] = {
    "mesh": (MeshScene, ["objects", "conditional", "uploads"]),
    "mesh-write-back": (MeshScene, ["write-back", "write-through"]),
    "movement": (MovementScene, ["stock", "objects", "conditional"]),
    "rolling": (RollingScene, ["stock", "objects", "conditional"]),
    "mesh-jobs": (MovementScene, ["jobs"]),
}
BUGS: Final = {
    "data": ["--ignore", ".tar"],
    "directories": ["--ignore", "/"],
    "index": ["--ignore", "data.mdb"],
    "order": ["--late", ".tar"],
}
"""What a file system does as if the daemon had a fault: it does not sync data, names or its index, or data
only after the index that refers to it. Each is found within `BUG_CUTS` cuts of the scene `objects`."""
BUG_CUTS: Final = 20
_OPERATOR: Final = "operator"
_CONTROL: Final = "control"
SCENES: Final = (*_DAEMONS, *_STORES, *_MESHES, _OPERATOR, _CONTROL)
KINDS: Final[dict[str, Callable[[], Traffic]]] = {
    "objects": Objects,
    "stock": Stock,
    "conditional": Conditional,
    "versions": Versions,
    "uploads": Uploads,
    "settings": Settings,
    "derived": Derived,
    "usage": Usage,
    "jobs": job_traffic.Jobs,
}
_AT_ORIGIN: Final[dict[str, Callable[[Place], Traffic]]] = {
    "write-back": WriteBack,
    "write-through": WriteThrough,
    "loads": Loads,
}


class Stage:
    """What scenes share: processes that fork, and an origin, which starts when it is needed and does not lose
    power. Use it as a context manager."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._ending = scratch, ExitStack()
        self._origin: Place | None = None

    def __enter__(self) -> Self:
        self._worker = self._ending.enter_context(Worker())
        self._ending.enter_context(forked_from(self._ending.enter_context(ForkServers())))
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def scene(self, name: str, seed: int, *, relaxed: bool, options: Sequence[str] = ()) -> AnyScene:
        """A scene whose directory is new. `options` are of its file systems."""
        where = self._scratch / "scene"
        if name in _STORES:
            return StoreScene(where, seed, self._worker, relaxed=relaxed, options=options, **_STORES[name])
        if name == _CONTROL:
            return ControlScene(where, seed, options=options)
        if name == _OPERATOR:
            traffic = self._traffic(["stock", "objects", "settings"])
            return OperatorScene(where, seed, traffic=traffic, relaxed=relaxed, options=options)
        if name in _MESHES:
            mesh, kinds = _MESHES[name]
            return mesh(
                where,
                seed,
                traffic=self._traffic(kinds),
                relaxed=relaxed,
                options=options,
                args=[*self._arguments(kinds), *(job_traffic.ARGUMENTS if "jobs" in kinds else ())],
            )
        asked = dict(_DAEMONS[name])
        kinds, own = asked.pop("kinds"), asked.pop("options", ())
        return Scene(
            where,
            seed,
            traffic=self._traffic(kinds),
            relaxed=relaxed,
            options=[*own, *options],
            args=[*self._arguments(kinds), *asked.pop("args", ())],
            **asked,
        )

    def _traffic(self, kinds: Sequence[str]) -> list[Traffic]:
        return [
            _AT_ORIGIN[kind](self._at_origin()) if kind in _AT_ORIGIN else KINDS[kind]() for kind in kinds
        ]

    def _arguments(self, kinds: Sequence[str]) -> list[str]:
        if not _AT_ORIGIN.keys() & set(kinds):
            return []
        return ["--origin-credentials", str(self._scratch / "credentials")]

    def _at_origin(self) -> Place:
        if self._origin is None:
            for folder in ("origin", "credentials"):
                (self._scratch / folder).mkdir()
            self._origin = self._ending.enter_context(place(self._scratch / "origin"))
            write_credentials(self._scratch / "credentials", self._origin)
        return self._origin
