"""A MeshCluster's life over an emulated API, in scenes: what somebody does, and how it ends; played by an
operator that may be killed."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

from lightkube import ApiError

from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.kube.client import Kube
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.settings import OperatorSettings
from tests.kubernetes.emulated import Api, Fault, KilledError
from tests.kubernetes.world import NAME, NAMESPACE, World, mesh_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = "2030-01-01T00:00:10Z"
Scene = tuple[str, "Callable[[World], None]", "Callable[[World], bool]"]


def change(world: World, **spec: Any) -> None:
    """As somebody does with kubectl."""
    found = world.api.find("meshclusters", NAME)
    assert found is not None
    found = copy.deepcopy(found)
    found["spec"] |= spec
    found["metadata"]["generation"] += 1
    world.api.put("meshclusters", found)


def settled(world: World, count: int) -> bool:
    found = world.api.find("meshclusters", NAME) or {"metadata": {"generation": 0}}
    status = found.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    cluster = world.map()
    return bool(
        status.get("observedGeneration") == found["metadata"]["generation"]
        and conditions.get("Settled") == "True"
        and conditions.get("Progressing") == "False"
        and (status["ready"], status["desired"]) == (count, count)
        and cluster
        and [node.state for node in cluster.nodes] == ["up"] * count
        and sorted(world.pods()) == [f"mesh-s-{number}" for number in range(count)]
        and len(world.api.of("meshnodes")) == count
    )


def pool(replicas: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mesh_cluster(replicas)["spec"]["nodePools"]
    return found


def rolled(world: World) -> bool:
    labels = [pod["metadata"]["labels"].get("release") for pod in world.pods().values()]
    return settled(world, 2) and labels == ["2"] * 2


def delete(world: World) -> None:
    found = world.api.find("meshclusters", NAME)
    assert found is not None
    found["metadata"].setdefault("deletionTimestamp", "2030-01-01T00:00:00Z")
    world.api.put("meshclusters", found)


def gone(world: World) -> bool:
    return not world.api.of("meshclusters") and not world.pods() and not world.api.of("statefulsets")


def void(_: object) -> None: ...


SCENES: list[Scene] = [
    (
        "install",
        lambda world: void(world.api.put("meshclusters", mesh_cluster(2))),
        lambda world: settled(world, 2),
    ),
    ("grow", lambda world: change(world, nodePools=pool(3)), lambda world: settled(world, 3)),
    ("shrink", lambda world: change(world, nodePools=pool(2)), lambda world: settled(world, 2)),
    (
        "roll out",
        lambda world: change(world, podTemplate={"metadata": {"labels": {"release": "2"}}}),
        rolled,
    ),
    ("delete", delete, gone),
]


class Operator:
    """One life of an operator."""

    def __init__(self, api: Api) -> None:
        kube = Kube(api.client())
        self.loop = ClusterController(kube, OperatorSettings(), EventRecorder(kube, lambda: NOW), lambda: NOW)


async def play(world: World, scenes: list[Scene], *, begun: bool = False) -> None:
    """Every scene, until it is over; an operator that is killed is followed by another."""
    operator = Operator(world.api)
    for name, begin, over in scenes:
        if not begun:
            begin(world)
        begun = False
        for _ in range(120):
            try:
                await operator.loop.reconcile(NAMESPACE, NAME)
            except KilledError:
                operator = Operator(world.api)
                continue
            except ApiError:
                continue
            if over(world):
                break
            world.tick()
        else:
            raise AssertionError(f"{name} never ends: {world.api.of('meshclusters')} {world.map()}")


def killed_everywhere(scenes: list[Scene], scene: Scene) -> None:
    start = Api()
    world = World(start)
    asyncio.run(play(world, scenes))
    start.effects, start.changed = 0, []
    before = copy.deepcopy(start.objects), start.version
    asyncio.run(play(world, [scene]))
    assert start.effects > 3
    points = [point for point in range(start.effects) if not point or start.changed[point - 1] != "events"]
    for point in points:
        api = Api(copy.deepcopy(before[0]), before[1])
        api.fault = Fault(lambda method, _, effects, point=point: effects == point and method != "GET")  # type: ignore[misc]
        again = World.__new__(World)
        again.api = api
        asyncio.run(play(again, [scene]))
        assert api.fault is None, f"{scene[0]} was not killed at {point}"


def on_claims(size: str, **claim: str) -> list[dict[str, Any]]:
    tier = {"name": "a", "class": "nvme", "volumeClaim": {"size": size} | claim}
    return [pool(2)[0] | {"tiers": [tier]}]


def claims(world: World) -> dict[str, str]:
    """What each asks for, once it has it."""
    every = world.api.of("persistentvolumeclaims")
    return {
        each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"]
        for each in every
        if (each.get("status") or {}).get("capacity") == each["spec"]["resources"]["requests"]
    }


CLAIMED: list[Scene] = [
    (
        "install on claims",
        lambda world: void(world.api.put("meshclusters", mesh_cluster(2, nodePools=on_claims("1Ti")))),
        lambda world: settled(world, 2) and len(claims(world)) == 2,
    )
]
EXPANDED: Scene = (
    "expand",
    lambda world: change(world, nodePools=on_claims("2Ti")),
    lambda world: settled(world, 2) and set(claims(world).values()) == {"2Ti"},
)


def told(api: Api, kind: str) -> dict[str, Any]:
    """A condition of the MeshCluster."""
    found = api.find("meshclusters", NAME)
    assert found is not None
    return dict(next(each for each in found["status"]["conditions"] if each["type"] == kind))
