"""The operator is killed (SIGKILL) right after one of its writes, before it hears that it took place, in each
kind of its work, on a real control plane with real daemons. The next one finishes: what is there then is what
is there after the same work without a kill, nothing twice, nothing left over, no daemon started once more.

`MESH_TEST_KILLS=all` kills after each write of each step, one after the other, `MESH_TEST_KILLS=5-9` after
the fifth to the ninth; otherwise one or two writes of each step are drawn by the commit.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.models.rbac_v1 import PolicyRule
from lightkube.resources.core_v1 import Namespace, Node, Pod, Secret
from lightkube.resources.rbac_authorization_v1 import ClusterRole
from lightkube.types import PatchType

from meshoperator.planners.pod_admission import SECRET
from tests.kubernetes.census import census, differences
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.operator_process import OperatorProcess
from tests.kubernetes.scenes import POOL, SPEC, MeshCluster, MeshNode, Scene
from tests.kubernetes.test_crds_served import create
from tests.kubernetes.test_webhook import GROUP_VERSION, dataset, pod
from tests.support import sampling
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from lightkube import Client

    from tests.kubernetes.census import Census

KILLS = os.environ.get("MESH_TEST_KILLS", "")
pytestmark = pytest.mark.timeout(7200 if KILLS else 900)
PATIENCE = 300.0
STILL = 3.0
"""Seconds for which nothing may change any more before a step counts as finished."""
BODY = b"x" * 1000
DAEMON_RULES = [
    PolicyRule(
        apiGroups=[""],
        resources=["configmaps", "secrets"],
        verbs=["get", "list", "watch", "create", "update", "delete"],
    ),
    PolicyRule(
        apiGroups=["coordination.k8s.io"],
        resources=["leases"],
        verbs=["get", "list", "create", "update", "delete"],
    ),
]


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as a test's kubelet, which ends them."""


@dataclass(frozen=True)
class Step:
    """`begin` is what somebody does, `over` whether the operator has finished it."""

    name: str
    begin: Callable[[Scene], object]
    over: Callable[[Scene], bool]


class Stage:
    """One namespace with machines, an operator that can be killed, and what each step leads to."""

    def __init__(self, scene: Scene, operator: OperatorProcess) -> None:
        self.scene, self.operator = scene, operator
        self.after: dict[str, tuple[Census, int, list[str]]] = {}
        self._kept: Census = {}  # jobs that have ended, of the steps before

    def learn(self, steps: Sequence[Step]) -> None:
        """Play all steps without a kill, and remember what is there after each."""
        for step in steps:
            self.operator.kill_after(0)
            started = self.scene.kubelet.admitted
            self._play(step)
            found, writes = self._at_rest(), list(self.operator.writes)
            self.after[step.name] = found, self.scene.kubelet.admitted - started, writes
            print(f"{step.name}: {len(writes)} writes", file=sys.stderr)
        last = self.after[steps[-1].name][0]
        self._kept = {key: each for key, each in last.items() if key.startswith("configmaps/jobs/")}

    def kill_in(self, step: Step, write: int) -> bool:
        """Play a step, with a kill after this write; return whether it came to that. What there is then is
        what there was without the kill."""
        expected, pods, _ = self.after[step.name]
        expected = expected | self._kept
        self.operator.kill_after(write)
        began, started = time.monotonic(), self.scene.kubelet.admitted
        self._play(step)
        wrong = [f"{step.name} has not ended"]

        def same() -> bool:
            wrong[:] = differences(expected, census(self.scene))
            return not wrong

        self.until(same, lambda: "\n".join(wrong))
        time.sleep(STILL)
        assert same(), f"{step.name}, killed after write {write}, did not stay as it was: {wrong}"
        assert self.scene.kubelet.admitted - started == pods, (
            f"{step.name}, killed after write {write}: other pods were started than without the kill: "
            f"{self.scene.kubelet.placements(started)}"
        )
        writes, kills = list(self.operator.writes), self.operator.kills
        at = writes[write - 1] if kills else "not reached"
        print(
            f"{step.name}: killed after write {write}, {at}: {time.monotonic() - began:.0f} s",
            file=sys.stderr,
        )
        return kills == 1

    def _play(self, step: Step) -> None:
        step.begin(self.scene)
        self.until(lambda: step.over(self.scene), lambda: step.name)

    def until(self, wanted: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait. Fails with all there is to see, at once if the operator has ended by itself."""
        end = time.monotonic() + PATIENCE
        while not wanted():
            if time.monotonic() > end or self.operator.ended:
                said = f"{self.operator.output()}\n{self.scene.kubelet.output()}"
                raise AssertionError(f"never: {what()}\nwrites: {self.operator.writes}\n{said}")
            time.sleep(0.2)

    def _at_rest(self) -> Census:
        """What is there once it no longer changes."""
        before, since = census(self.scene), time.monotonic()
        end = since + PATIENCE
        while time.monotonic() < since + STILL:
            time.sleep(0.3)
            now = census(self.scene)
            if now != before:
                before, since = now, time.monotonic()
            assert time.monotonic() < end, differences(before, now)
        return before


def play(stage: Stage, steps: Sequence[Step], rounds: int, between: Callable[[], None]) -> None:
    """Play the steps once without a kill, and then with kills: after each write of each, or in so many rounds
    after one of each."""
    stage.learn(steps)
    counts = {step.name: len(stage.after[step.name][2]) for step in steps}
    assert min(counts.values()) > 0, counts
    reached, draw = list[tuple[str, int, bool]](), random.Random(sampling.commit())
    for number in numbers(max(counts.values())) if KILLS else range(rounds):
        between()
        for step in steps:
            write = number if KILLS else draw.randint(1, max(1, counts[step.name] * 3 // 4))
            if write > counts[step.name]:
                write = 0  # all of this one's writes had their kill
            hit = stage.kill_in(step, write)
            reached += [(step.name, write, hit)] if write else []
    between()
    # A pass that comes a moment later makes fewer writes, and so does one on a machine that is less busy.
    assert 2 * sum(hit for *_, hit in reached) >= len(reached), f"too few kills: {reached} of {counts}"
    print(f"killed {sum(hit for *_, hit in reached)} times of {len(reached)}", file=sys.stderr)


def numbers(most: int) -> range:
    """Return which writes `MESH_TEST_KILLS` names, of so many."""
    first, _, last = KILLS.partition("-")
    return range(1, most + 1) if KILLS == "all" else range(int(first), min(int(last), most) + 1)


@pytest.fixture
def stage(kubeconfig: Path, kube: Client, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes the stage of a test with so many machines, which take no other test's pods."""
    if os.environ.get("MESH_TEST_KUBECONFIG") and list(kube.list(Node)):
        pytest.skip("this cluster has nodes of its own; machines of the tests must not be among them")
    namespace = f"mesh-killed-{secrets.token_hex(3)}"
    role = ClusterRole(metadata=ObjectMeta(name=namespace), rules=DAEMON_RULES)
    kube.create(Namespace(metadata=ObjectMeta(name=namespace)))
    kube.create(role)
    scenes: list[Scene] = []
    try:
        with (
            Kubelet(kubeconfig, tmp_path, namespace) as kubelet,
            Front(lambda: scenes[0].places() if scenes else []) as front,
            OperatorProcess(
                *(kubeconfig, tmp_path, namespace, front.endpoint),
                EAGER_SECONDS="0.5",
                DAEMON_ROLE=namespace,
                FIGURES_SECONDS="3600",
            ) as operator,
        ):
            scenes.append(Scene(kube, namespace, kubelet))

            def made(machines: int) -> Stage:
                for number in range(machines):
                    kubelet.add_node(f"{namespace[-6:]}-{number}", {"disks": namespace})
                return Stage(scenes[0], operator)

            yield made
            unmake(scenes[0])
    finally:
        kube.delete(Namespace, namespace)
        kube.delete(ClusterRole, namespace)


def unmake(scene: Scene) -> None:
    """All that needs the operator to go."""
    for kind in ("MeshView", "MeshLoad", "MeshDataset", "MeshCluster"):
        found = resource(kind)
        for each in scene.kube.list(found, namespace=scene.namespace):
            scene.kube.delete(found, each.metadata.name, namespace=scene.namespace)
        scene.until(partial(are_gone, scene, found), f"rid of each {kind}")


def are_gone(scene: Scene, kind: Any) -> bool:
    return not names(scene, kind)


def resource(kind: str) -> Any:
    return create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")


def names(scene: Scene, kind: Any) -> list[str]:
    return sorted(each.metadata.name for each in scene.kube.list(kind, namespace=scene.namespace))


def status(scene: Scene, kind: str, name: str) -> dict[str, Any]:
    return dict(scene.kube.get(resource(kind), name, namespace=scene.namespace).status or {})


# --- a MeshCluster ----------------------------------------------------------------------------------------


def spec_of(scene: Scene, replicas: int) -> dict[str, Any]:
    pool = POOL | {"replicas": replicas, "nodeSelector": {"disks": scene.namespace}}
    return SPEC | {"nodePools": [pool], "copies": 2, "deletionPolicy": "Delete"}


def create_mesh(scene: Scene, replicas: int = 2) -> None:
    document = {"metadata": {"name": "mesh", "namespace": scene.namespace}, "spec": spec_of(scene, replicas)}
    scene.kube.create(MeshCluster(**document))


def is_settled(scene: Scene, count: int) -> bool:
    mesh = scene.mesh()
    found = mesh.get("status") or {}
    conditions = {each["type"]: each["status"] for each in found.get("conditions") or ()}
    return bool(
        found.get("observedGeneration") == mesh["metadata"]["generation"]
        and (found.get("ready"), found.get("desired")) == (count, count)
        and (conditions.get("Settled"), conditions.get("Progressing")) == ("True", "False")
        and all(each["updated"] == each["desired"] for each in found.get("pools") or ())
        and [node.state for node in scene.map().nodes] == ["up"] * count
        and len(scene.pods()) == len(names(scene, MeshNode)) == count
    )


def scale(scene: Scene, replicas: int) -> None:
    scene.change(nodePools=spec_of(scene, replicas)["nodePools"])


def release(scene: Scene) -> None:
    scene.change(podTemplate={"metadata": {"annotations": {"example.com/release": "2"}}})


def delete_mesh(scene: Scene) -> None:
    scene.kube.delete(MeshCluster, "mesh", namespace=scene.namespace)


def is_gone(scene: Scene) -> bool:
    return not names(scene, MeshCluster) and not scene.pods()


LIFE = [
    Step("a MeshCluster of two is made", create_mesh, lambda scene: is_settled(scene, 2)),
    Step("its daemons are restarted for another template", release, lambda scene: is_settled(scene, 2)),
    Step("two become three", lambda scene: scale(scene, 3), lambda scene: is_settled(scene, 3)),
    Step("three become two", lambda scene: scale(scene, 2), lambda scene: is_settled(scene, 2)),
    Step("the MeshCluster is deleted", delete_mesh, is_gone),
]


@pytest.mark.sampled(3)
def test_a_mesh_is_made_changed_and_deleted_whenever_the_operator_dies(
    stage: Callable[..., Stage],
) -> None:
    found = stage(4)
    before = census(found.scene)
    play(found, LIFE, 1, found.scene.kubelet.empty_disks)
    shared = {"serviceaccounts/shardmesh-daemon", "rolebindings/shardmesh-daemon"}  # of all its meshes
    assert [
        each for each in differences(before, census(found.scene)) if each.split(":")[0] not in shared
    ] == []


# --- data in a mesh ---------------------------------------------------------------------------------------


def poke(scene: Scene, kind: str, name: str) -> None:
    """Have it looked at now: what daemons do is no event."""
    change = {"metadata": {"annotations": {"looked-at": str(time.time())}}}
    scene.kube.patch(resource(kind), name, change, namespace=scene.namespace, patch_type=PatchType.MERGE)


def make(scene: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    create(scene.kube, scene.namespace, document)


def unmade(kind: str, name: str) -> Step:
    found = resource(kind)

    def delete(scene: Scene) -> None:
        scene.kube.delete(found, name, namespace=scene.namespace)

    return Step(f"the {kind} is deleted", delete, lambda scene: name not in names(scene, found))


def is_kept(scene: Scene) -> bool:
    """All of the dataset is where it was planned, and kept there."""
    time.sleep(0.5)
    poke(scene, "MeshDataset", "photos")
    found = status(scene, "MeshDataset", "photos")
    conditions = {each["type"]: each["status"] for each in found.get("conditions") or ()}
    kept = (conditions.get("Placed"), conditions.get("Warm")) == ("True", "True")
    return kept and found["phase"] == "Ready" and any(found["nodeLabel"] in each for each in labels(scene))


def labels(scene: Scene) -> list[str]:
    return list(census(scene)["nodes"])


def has_keys(scene: Scene) -> bool:
    every = {each.metadata.name: each for each in scene.kube.list(Secret, namespace=scene.namespace)}
    return "train-keys" in every and "credentials.json" in (every["train-keys"].data or {})


def delete_pod(scene: Scene) -> None:
    scene.kube.delete(Pod, "train", namespace=scene.namespace, grace_period=0)


def data_steps(source: Path) -> list[Step]:
    view = {"clusterRef": "mesh", "bucket": "photos", "kind": "shards", "definition": {"count": 2}}
    load = {"datasetRef": "photos", "paths": ["0", "1"]}
    pinned = {"placement": {"pin": True}}
    return [
        Step(
            "a MeshDataset is made and loaded",
            lambda scene: dataset(scene.kube, scene.namespace, "photos", f"file://{source}", **pinned),
            is_kept,
        ),
        Step(
            "a MeshLoad is run",
            lambda scene: make(scene, "MeshLoad", "some", load),
            lambda scene: status(scene, "MeshLoad", "some").get("phase") == "Succeeded",
        ),
        Step(
            "a MeshLoad is run and expires",
            lambda scene: make(scene, "MeshLoad", "once", load | {"ttlSecondsAfterFinished": 0}),
            lambda scene: "once" not in names(scene, resource("MeshLoad")),
        ),
        Step(
            "a MeshView is made",
            lambda scene: make(scene, "MeshView", "packed", view),
            lambda scene: bool(status(scene, "MeshView", "packed").get("ready")),
        ),
        Step(
            "a training pod gets keys",
            lambda scene: scene.kube.create(
                pod("train", "nowhere", "photos", {SECRET: "train-keys"}), namespace=scene.namespace
            ),
            has_keys,
        ),
    ]


ENDS = [unmade("MeshView", "packed"), unmade("MeshLoad", "some"), unmade("MeshDataset", "photos")]


@pytest.mark.sampled(2)
def test_data_comes_and_goes_whenever_the_operator_dies(stage: Callable[..., Stage], tmp_path: Path) -> None:
    found = stage(2)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.bin").write_bytes(BODY)
    create_mesh(found.scene, 1)
    found.until(lambda: is_settled(found.scene, 1), lambda: "one daemon")
    play(found, [*data_steps(source), *ENDS], 2, lambda: forget_pod(found.scene))
    buckets = found.scene.client(found.operator.service).list_buckets()["Buckets"]
    assert [each["Name"] for each in buckets] == []


def forget_pod(scene: Scene) -> None:
    """The training pod goes, and its keys with it."""
    if "train" in {each.metadata.name for each in scene.kube.list(Pod, namespace=scene.namespace)}:
        delete_pod(scene)
    scene.until(lambda: not has_keys(scene), "without the pod's keys")


# --- a machine that is lost -------------------------------------------------------------------------------


def test_the_status_names_a_silent_daemon_when_its_lease_has_ended(stage: Callable[..., Stage]) -> None:
    """Kubernetes knows nothing of it for 40 s, and no pass is due for minutes: the cluster map says so."""
    found = stage(3)
    scene = found.scene
    create_mesh(scene, 3)
    found.until(lambda: is_settled(scene, 3), lambda: "three daemons")
    machine = scene.pods()["mesh-s-1"].spec.nodeName
    scene.kubelet.silence(machine)
    began = time.monotonic()

    def named() -> bool:
        conditions = {each["type"]: each for each in scene.mesh()["status"]["conditions"]}
        degraded = conditions["Degraded"]
        return degraded["status"] == "True" and "mesh-s-1 away" in degraded["message"]

    try:
        scene.until(named, "told that mesh-s-1 is away", 30)
        print(f"named after {time.monotonic() - began:.1f} s", file=sys.stderr)
        assert status(scene, "MeshNode", "mesh-s-1")["state"] == "away"
        assert scene.pods()["mesh-s-1"].status.conditions[0].status == "True", "Kubernetes knew of it"
    finally:
        scene.kubelet.silence(machine, back=True)  # pods of a silent machine never end
