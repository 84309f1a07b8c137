"""A dataset that is placed, loaded, moved, shown by a view, driven off a daemon that is drained, and deleted,
by an operator that is killed after each single change it makes, anywhere."""

from __future__ import annotations

import asyncio
import copy
import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.controllers.dataset_controller import DatasetController
from meshoperator.controllers.load_controller import LoadController
from meshoperator.controllers.placement_controller import PlacementController
from meshoperator.controllers.view_controller import ViewController
from meshoperator.kube.client import Kube
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.planners.placement_inputs import PlacementBoard
from meshoperator.settings import OperatorSettings
from meshwire.cluster import transitions
from tests.kubernetes.dying import Calls, DiedError
from tests.kubernetes.emulated import Api
from tests.kubernetes.fake_daemons import OBJECTS, SIZE, FakeDaemons, State, resource
from tests.kubernetes.world import NAME, NAMESPACE, World, mesh_cluster
from tests.support import sampling

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(600)  # it does nothing but compute
ZONE = "topology.kubernetes.io/zone"
NOW = "2030-01-01T00:00:10Z"
KINDS = {"MeshDataset": "meshdatasets", "MeshLoad": "meshloads", "MeshView": "meshviews"}
OPS = [{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]


class Scene:
    """A mesh of three, one a zone, and what is said of it."""

    def __init__(self, api: Api, state: State) -> None:
        self.world = World.__new__(World)
        self.world.api = self.api = api
        self.daemons = FakeDaemons(self.world, state)

    def copied(self) -> Scene:
        api = Api(copy.deepcopy(self.api.objects), self.api.version)
        return Scene(api, copy.deepcopy(self.daemons.state))

    def version(self) -> tuple[int, int]:
        return self.api.version, self.daemons.state.version

    def tick(self) -> None:
        self.world.tick()
        self.daemons.tick()

    def put(self, kind: str, name: str, /, **spec: Any) -> None:
        self.api.put(KINDS[kind], resource(kind, name, **spec))

    def change(self, kind: str, name: str, **spec: Any) -> None:
        found = copy.deepcopy(self.api.find(kind, name))
        assert found is not None
        found["spec"] |= spec
        found["metadata"]["generation"] += 1
        self.api.put(kind, found)

    def status(self, kind: str, name: str) -> dict[str, Any]:
        found = self.api.find(KINDS[kind], name)
        return dict((found or {}).get("status") or {})

    def delete(self) -> None:
        for plural in KINDS.values():
            for each in self.api.of(plural):
                found = copy.deepcopy(each)
                found["metadata"]["deletionTimestamp"] = NOW
                self.api.put(plural, found)

    def in_zone(self, zone: str) -> str:
        """The daemon there."""
        hosts = {each["metadata"]["name"]: each["metadata"]["labels"][ZONE] for each in self.api.of("nodes")}
        pods = self.world.pods().items()
        return next(name for name, pod in pods if hosts[pod["spec"]["nodeName"]] == zone)

    def placed(self, node: str, size: int) -> bool:
        """It is kept there, and nowhere else; its status, and the labels of the machines, say so."""
        status = self.status("MeshDataset", "photos")
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        held = {name: each["photos"] for name, each in self.daemons.state.held.items() if each.get("photos")}
        spots = {spot["node"]: spot["bytes"] for spot in status.get("placement") or ()}
        label = status.get("nodeLabel")
        labelled = {
            each["metadata"]["name"] for each in self.api.of("nodes") if label in each["metadata"]["labels"]
        }
        return (
            conditions.get("Placed") == "True"
            and self.daemons.homes("photos") == (node,)
            and held == ({node: size // SIZE} if size else {})
            and spots == {node: size}
            and labelled == ({self.world.pods()[node]["spec"]["nodeName"]} if size else set())
        )


class Mortal:
    """`target`, whose calls count when they change something; the one that is chosen is the last."""

    def __init__(self, target: Any, scene: Scene, calls: Calls) -> None:
        self._target, self._scene, self._calls = target, scene, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @wraps(found)
        async def counted(*args: Any, **options: Any) -> Any:
            before = self._scene.version()
            try:
                return await found(*args, **options)
            finally:
                if self._scene.version() != before:
                    self._calls.tick()

        return counted


class Operator:
    """One life: nothing is remembered from the one before."""

    def __init__(self, scene: Scene, calls: Calls) -> None:
        api = Kube(scene.api.client())
        kube: Any = Mortal(api, scene, calls)
        daemons: Any = Mortal(scene.daemons, scene, calls)
        recorder = EventRecorder(
            api, lambda: NOW
        )  # nobody reads events: to die after one is to die before it
        board, now = PlacementBoard(), scene.daemons.now
        self.scene, self.settings = scene, OperatorSettings()
        self.placement = PlacementController(kube, self.settings, board)
        self.clusters = ClusterController(kube, self.settings, recorder, lambda: NOW)
        self.loops = (
            DatasetController(kube, daemons, recorder, now, board),
            LoadController(kube, daemons, recorder, now),
            ViewController(kube, daemons, recorder, now),
        )

    async def run(self, *, clusters: bool) -> None:
        """Every loop once."""
        if clusters:
            await self.clusters.reconcile(NAMESPACE, NAME)
        for loop in self.loops:
            for each in list(self.scene.api.of(KINDS[loop.kind])):
                await loop.reconcile(NAMESPACE, each["metadata"]["name"])
        await self.placement.plan_and_label()


async def play(scene: Scene, over: Callable[[Scene], bool], calls: Calls, *, clusters: bool = False) -> None:
    """Passes and ticks until it is over; an operator that died is followed by another."""
    operator = Operator(scene, calls)
    for _ in range(60):
        try:
            await operator.run(clusters=clusters)
        except DiedError:
            operator = Operator(scene, calls)
            continue
        if over(scene):
            return
        scene.tick()
    raise AssertionError(f"never ends: {scene.daemons.state} {scene.status('MeshDataset', 'photos')}")


def founded() -> Scene:
    api = Api()
    World(api)  # its machines
    scene = Scene(api, State())
    scene.api.put("meshclusters", mesh_cluster(3))

    def settled(scene: Scene) -> bool:
        cluster = scene.world.map()
        return (
            cluster is not None
            and [node.state for node in cluster.nodes] == ["up"] * 3
            and not cluster.is_rebalancing
        )

    asyncio.run(play(scene, settled, Calls(), clusters=True))
    asyncio.run(Operator(scene, Calls()).run(clusters=True))  # and the statuses say so
    return scene


def test_what_is_made_with_its_load_is_loaded_where_it_is_to_stay() -> None:
    """A load that began before the first plan failed at the daemons that were not chosen."""
    scene = founded()
    operator = Operator(scene, Calls())
    asyncio.run(operator.placement.plan_and_label())  # there is somebody who plans
    scene.put("MeshDataset", "photos", clusterRef=NAME, source={"uri": "s3://a/b"}, placement={"pin": True})
    scene.put("MeshLoad", "all", datasetRef="photos")

    async def pass_over(*kinds: str) -> None:
        for loop in operator.loops:
            if loop.kind in kinds:
                await loop.reconcile(NAMESPACE, "photos" if loop.kind == "MeshDataset" else "all")

    asyncio.run(pass_over("MeshDataset", "MeshLoad"))
    assert scene.daemons.state.jobs == {}
    assert scene.status("MeshLoad", "all")["phase"] == "Waiting"
    assert "has no planned homes yet" in scene.status("MeshLoad", "all")["conditions"][0]["message"]
    asyncio.run(operator.placement.plan_and_label())
    for _ in range(3):
        asyncio.run(pass_over("MeshDataset", "MeshLoad"))
    assert scene.daemons.homes("photos")
    assert scene.daemons.state.jobs
    assert scene.status("MeshLoad", "all")["phase"] in ("Running", "Succeeded")


def killed_after_every_change(
    scene: Scene,
    begin: Callable[[Scene], None],
    over: Callable[[Scene], bool],
    least: int,
    *,
    clusters: bool = False,
) -> None:
    """The same from the same beginning: undisturbed, and with a death after each change (in CI, after a third
    of them). `scene` goes on."""
    start, calls = scene.copied(), Calls()
    begin(scene)
    asyncio.run(play(scene, over, calls, clusters=clusters))
    assert calls.made >= least
    for at in sampling.points(range(1, calls.made + 1), 3, sampling.commit()):
        again, deadly = start.copied(), Calls(at)
        begin(again)
        try:
            asyncio.run(play(again, over, deadly, clusters=clusters))
        except AssertionError as error:
            raise AssertionError(f"killed after change {at} of {calls.made}: {error}") from error
        assert deadly.made >= at


def test_data_comes_moves_and_goes_wherever_the_operator_dies() -> None:
    scene, whole = founded(), OBJECTS * SIZE
    a, b = scene.in_zone("a"), scene.in_zone("b")
    source = {"uri": "s3://somewhere/photos"}

    def placement(zone: str) -> dict[str, Any]:
        return {"placement": {"nodeSelector": {ZONE: zone}}}

    killed_after_every_change(
        scene,
        lambda scene: scene.put("MeshDataset", "photos", clusterRef="mesh", source=source, **placement("a")),
        lambda scene: "photos" in scene.daemons.state.buckets and scene.placed(a, 0),
        6,
    )
    killed_after_every_change(
        scene,
        lambda scene: scene.put("MeshLoad", "all", datasetRef="photos"),
        lambda scene: scene.status("MeshLoad", "all").get("phase") == "Succeeded" and scene.placed(a, whole),
        6,
    )
    assert scene.status("MeshLoad", "all")["bytesDone"] == whole
    killed_after_every_change(
        scene,
        lambda scene: scene.change("meshdatasets", "photos", **placement("b")),
        lambda scene: scene.placed(b, whole),
        10,
    )
    assert {"Moving", "Bringing", "Placed", "Released"} <= {each["reason"] for each in scene.api.of("events")}
    view = {"clusterRef": "mesh", "bucket": "photos", "kind": "transform", "ops": OPS}
    killed_after_every_change(
        scene,
        lambda scene: scene.put("MeshView", "small", **view),
        lambda scene: scene.status("MeshView", "small").get("ready") is True,
        3,
    )

    def drain(scene: Scene) -> None:
        scene.change("meshdatasets", "photos", placement={})
        scene.change("meshnodes", b, desiredState="Drained")

    def drained(scene: Scene) -> bool:
        status = (scene.api.find("meshnodes", b) or {}).get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        homes = list(scene.daemons.homes("photos"))
        return conditions.get("Drained") == "True" and b not in homes and scene.placed(homes[0], whole)

    killed_after_every_change(scene, drain, drained, 10, clusters=True)

    def gone(scene: Scene) -> bool:
        state = scene.daemons.state
        running = [job for job in state.jobs.values() if job["state"] == "running"]
        left = [each for plural in KINDS.values() for each in scene.api.of(plural)]
        held = [count for each in state.held.values() for count in each.values()]
        return not (left or state.buckets or state.views or any(held) or running)

    killed_after_every_change(scene, Scene.delete, gone, 4)


def test_a_pinned_copy_outlasts_a_drain_that_does_not_wait_for_it() -> None:
    """`kubectl drain` ends the daemon with the only copy before another one has a byte."""
    scene = founded()
    source = {"uri": "s3://somewhere/photos"}
    spec = {"clusterRef": NAME, "source": source, "placement": {"pin": True}}
    scene.put("MeshDataset", "photos", **spec)
    whole = OBJECTS * SIZE

    def loaded(scene: Scene) -> bool:
        homes = tuple(scene.daemons.homes("photos")) if scene.daemons.state.buckets else ()
        return len(homes) == 1 and scene.placed(homes[0], whole)

    asyncio.run(play(scene, loaded, Calls(), clusters=True))
    (old,) = scene.daemons.homes("photos")
    operator = Operator(scene, Calls())
    asyncio.run(operator.run(clusters=True))
    pod = scene.world.pods()[old]
    host = copy.deepcopy(scene.api.find("nodes", pod["spec"]["nodeName"]))
    assert host is not None
    host["spec"]["unschedulable"] = True
    scene.api.put("nodes", host)
    silent(scene, old)

    async def passes(count: int) -> None:
        for _ in range(count):
            await operator.run(clusters=False)

    asyncio.run(passes(3))
    homes, status = set(scene.daemons.homes("photos")), scene.status("MeshDataset", "photos")
    assert old in homes
    assert len(homes) == 2
    assert status["phase"] in ("Loading", "Placing")
    conditions = {each["type"]: each for each in status["conditions"]}
    assert (conditions["Placed"]["status"], conditions["Placed"]["reason"]) == ("False", "Moving")
    assert f"{old} (does not answer) keeps its copy" in conditions["Placed"]["message"]
    assert conditions["Warm"]["status"] == "False"
    for _ in range(8):
        scene.daemons.tick()
        asyncio.run(passes(2))
    (new,) = scene.daemons.homes("photos")
    assert new != old
    assert scene.daemons.count(new, "photos") == OBJECTS
    assert scene.daemons.count(old, "photos") == OBJECTS  # it was not asked
    assert scene.status("MeshDataset", "photos")["phase"] == "Ready"


def silent(scene: Scene, name: str) -> None:
    """A daemon that the mesh calls away."""
    cluster = scene.world.map()
    assert cluster is not None
    scene.world.set_map(transitions.mark_node_away(cluster, name))
    scene.daemons.state.whole.clear()  # what it has cannot be read
