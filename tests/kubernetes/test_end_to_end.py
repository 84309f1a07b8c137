"""The chart, the operator and its daemons on a real control plane: installed, expanded, upgraded, drained, a
machine lost, removed. The kubelet is a small one of ours, the daemons real processes.

Law: the mesh is one for all scenes, for installing it takes longer than most of them; each begins when it is
whole and has its objects, whatever another scene, or a try of its own, left. The last one ends it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import threading
import time
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import ConfigMap, Event, Node, Pod, Secret
from lightkube.types import PatchType

from meshwire.cluster import parse_map
from tests.kubernetes.control_plane import ROOT
from tests.kubernetes.front import Front
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightkube import Client

    from meshwire.cluster import ClusterMap

PATIENCE = 100.0
pytestmark = pytest.mark.timeout(240)  # of a scene, on a slow machine
MeshCluster: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshCluster", "meshclusters")
MeshNode: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshNode", "meshnodes")
POOL: dict[str, Any] = {
    "name": "s",
    "replicas": 3,
    "roles": ["store", "cache", "compute"],
    "tiers": [{"name": "disk", "class": "nvme", "hostPath": "/mnt/shardmesh"}],
    "nodeSelector": {"disks": "nvme"},
    "weight": 1,
    "extraArgs": ["--workers=1", "--transforms=1", "--lease=2", "--drain-timeout=1"],
}
SPEC = {"image": "registry.example.com/shardmesh/meshd:0.1.0", "nodePools": [POOL]}


class Scene:
    """The mesh, as tests see it."""

    def __init__(self, kube: Client, namespace: str, kubelet: Kubelet) -> None:
        self.kube: Any = kube
        self.namespace, self.kubelet = namespace, kubelet
        self.bodies: dict[str, bytes] = {}

    def mesh(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kube.get(MeshCluster, "mesh", namespace=self.namespace).to_dict()
        return found

    def change(self, **spec: Any) -> None:
        self.kube.patch(
            MeshCluster, "mesh", {"spec": spec}, namespace=self.namespace, patch_type=PatchType.MERGE
        )

    def scale(self, replicas: int) -> None:
        self.change(nodePools=[POOL | {"replicas": replicas}])

    def map(self) -> ClusterMap:
        labels = {"shardmesh.io/store": "mesh", "shardmesh.io/topic": "cluster"}
        (found,) = self.kube.list(ConfigMap, namespace=self.namespace, labels=labels)
        return parse_map(found.data["value"])

    def pods(self) -> dict[str, Any]:
        labels = {"shardmesh.io/cluster": "mesh"}
        return {
            each.metadata.name: each for each in self.kube.list(Pod, namespace=self.namespace, labels=labels)
        }

    def evicted(self, name: str) -> bool:
        """As `kubectl drain` asks: whether the budget lets the pod go."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        metadata = {"name": name, "namespace": self.namespace}
        wish = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": metadata}
        answer = self.kube._client._client.post(path, json=wish)
        assert answer.status_code in (201, 429), answer.text
        return bool(answer.status_code == 201)

    def until(self, wanted: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        end = time.monotonic() + patience
        while not wanted():
            if time.monotonic() > end:
                raise AssertionError(f"not {what} in time\n{self.state()}")
            time.sleep(0.3)

    def settled(self, count: int) -> None:
        """All is as it should be, and the operator says so of the present spec."""

        def well() -> bool:
            found = self.mesh()
            status = found.get("status") or {}
            conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            updated = all(pool["updated"] == pool["desired"] for pool in status.get("pools") or ())
            states = [node.state for node in self.map().nodes] if current and status.get("ready") else []
            return (
                current
                and updated
                and (status["ready"], status["desired"]) == (count, count)
                and (conditions["Settled"], conditions["Progressing"]) == ("True", "False")
                and states == ["up"] * count
            )

        self.until(well, f"settled with {count} daemons")

    def state(self) -> str:
        mesh = self.mesh()
        said = json.dumps(mesh.get("status"), indent=1)
        events = [f"{e.reason}: {e.message}" for e in self.kube.list(Event, namespace=self.namespace)]
        return f"{said}\n{[(p, v.status.phase) for p, v in self.pods().items()]}\n" + "\n".join(
            [*events[-40:], self.kubelet.output()]
        )

    def reasons(self) -> set[str]:
        return {each.reason for each in self.kube.list(Event, namespace=self.namespace)}

    def places(self) -> list[tuple[str, int]]:
        """Where a connection to the Service goes."""
        return [
            (each.address, 9000)
            for each in list(self.kubelet.pods.values())
            if each.name.startswith("mesh-s-") and each.ready and not each.asked_to_end
        ]

    def client(self, endpoint: str) -> Any:
        keys = self.kube.get(Secret, "mesh-root", namespace=self.namespace).to_dict()["data"]
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=b64decode(keys["AWS_ACCESS_KEY_ID"]).decode(),
            aws_secret_access_key=b64decode(keys["AWS_SECRET_ACCESS_KEY"]).decode(),
            region_name="us-east-1",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 5}, s3={"addressing_style": "path"}
            ),
        )


class Reader:
    """A client that reads all the time, with ordinary retries."""

    def __init__(self, client: Any, bodies: dict[str, bytes]) -> None:
        self._client, self._bodies = client, bodies
        self.read, self.failed = 0, list[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        names, choose = sorted(self._bodies), random.Random(7)
        while not self._stop.is_set():
            name = choose.choice(names)
            try:
                body = self._client.get_object(Bucket="photos", Key=name)["Body"].read()
                if body != self._bodies[name]:
                    self.failed.append(f"{name}: {len(body)} other bytes")
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}")
            self.read += 1
            self._stop.wait(0.02)


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def installed(kubeconfig: Path, kube: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import Namespace

    if os.environ.get("MESH_TEST_KUBECONFIG") and list(kube.list(Node)):
        pytest.skip("this cluster has nodes of its own; machines of the tests must not be among them")
    program, place = helm(), tmp_path_factory.mktemp("kubelet")
    namespace = "mesh-end-to-end"
    kube.create(Namespace(metadata=ObjectMeta(name=namespace)))
    try:
        with Kubelet(kubeconfig, place, namespace) as kubelet:
            for number in range(6):
                zone = {"topology.kubernetes.io/zone": "abc"[number % 3]}
                kubelet.add_node(f"k{number}", {"disks": "nvme", **zone})
            kubelet.add_node("office", {"disks": "none"})
            where = ["--namespace", namespace, "--kubeconfig", str(kubeconfig)]
            values = {
                "webhook": {"enabled": False},
                "cluster": {"create": True, "spec": SPEC},
                "operator": {
                    "nodeSelector": {"disks": "none"},  # a scene loses a machine; it is to be a daemon's
                    "extraEnv": [{"name": "MESH_OPERATOR_EAGER_SECONDS", "value": "0.5"}],
                },
            }
            _helm(program, "install", "mesh", str(_chart(place)), *where, "--values", "-", given=values)
            try:
                yield Scene(kube, namespace, kubelet)
            finally:
                _helm(program, "uninstall", "mesh", *where)
    finally:
        kube.delete(Namespace, namespace)


def _chart(place: Path) -> Path:
    """As it is, but for old API servers, too; the definitions are there already."""
    target = place / "shardmesh"
    shutil.copytree(ROOT / "helm" / "shardmesh", target, ignore=shutil.ignore_patterns("crds"))
    lines = (target / "Chart.yaml").read_text().splitlines()
    (target / "Chart.yaml").write_text("\n".join(line for line in lines if "kubeVersion" not in line))
    return target


def _helm(*argv: str, given: object = None) -> None:
    done = subprocess.run(
        argv, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def front(installed: Scene) -> Iterator[str]:
    with Front(installed.places) as front:
        yield front.endpoint


@pytest.fixture
def scene(installed: Scene, front: str) -> Scene:
    """Three daemons, settled, on machines that all take pods, with photographs."""
    for name in installed.kubelet.nodes:
        installed.kubelet.cordon(name, back=True)
    installed.scale(3)
    installed.settled(3)
    if not installed.bodies:
        installed.bodies = photographs(installed.client(front))
    return installed


def photographs(client: Any) -> dict[str, bytes]:
    """What is in the bucket now."""
    client.create_bucket(Bucket="photos")
    bodies = {}
    for number in range(60):
        body = random.Random(number).randbytes(1000 + 3000 * (number % 7))
        client.put_object(Bucket="photos", Key=f"{number:03}.bin", Body=body)
        bodies[f"{number:03}.bin"] = body
    return bodies


def test_install(scene: Scene) -> None:
    """helm install → a mesh that takes data; and what the operator says of it."""
    mesh = scene.mesh()
    assert mesh["status"]["phase"] == "Running"
    assert mesh["status"]["endpoint"] == f"http://mesh-s3.{scene.namespace}.svc:9000"
    nodes = {
        each.metadata.name: each.to_dict() for each in scene.kube.list(MeshNode, namespace=scene.namespace)
    }
    assert sorted(nodes) == ["mesh-s-0", "mesh-s-1", "mesh-s-2"]
    assert {each["status"]["state"] for each in nodes.values()} == {"up"}
    assert {each["status"]["zone"] for each in nodes.values()} == {"a", "b", "c"}


def test_expand_and_shrink(scene: Scene, front: str) -> None:
    """3 → 5 → 3: daemons go when the map proves that they are empty; every object is still there."""
    scene.scale(5)
    scene.settled(5)
    with Reader(scene.client(front), scene.bodies) as reader:
        scene.scale(3)
        scene.settled(3)
    assert reader.failed == []
    assert sorted(scene.pods()) == ["mesh-s-0", "mesh-s-1", "mesh-s-2"]
    assert {"Draining", "Scaled", "Left"} <= scene.reasons()
    _all_there(scene, front)


def test_roll_out(scene: Scene, front: str) -> None:
    """Every pod is replaced, one after the other, where its disk is, and no read fails."""
    before = {name: pod.metadata.uid for name, pod in scene.pods().items()}
    hosts = {name: _host(scene, name) for name in before}
    with Reader(scene.client(front), scene.bodies) as reader:
        release = {"example.com/release": secrets.token_hex(4)}
        scene.change(podTemplate={"metadata": {"annotations": release}})
        scene.until(lambda: not _same(before, scene), "rolled out")
        scene.settled(3)
    assert reader.failed == []
    assert reader.read > 20
    assert {name: _host(scene, name) for name in before} == hosts
    _all_there(scene, front)


def _same(before: dict[str, str], scene: Scene) -> set[str]:
    now = scene.pods()
    return {name for name, uid in before.items() if name not in now or now[name].metadata.uid == uid}


def test_a_cordoned_node_is_drained(scene: Scene, front: str) -> None:
    """kubectl cordon → its daemon gives everything away; the pod is evicted once the budget lets it, and
    gets its share again elsewhere."""
    name = "mesh-s-1"
    host = scene.pods()[name].spec.nodeName
    scene.kubelet.cordon(host)

    def empty() -> bool:
        cluster = scene.map()
        node = cluster.node(name)
        return bool(node and node.leaving and all(share.node_id != name for share in cluster.present))

    scene.until(empty, "drained")
    scene.until(lambda: scene.evicted(name), "evicted")
    scene.until(lambda: _host(scene, name) not in ("", host), "moved")
    scene.settled(3)
    scene.kubelet.cordon(host, back=True)
    _all_there(scene, front)


def _host(scene: Scene, name: str) -> str:
    pod = scene.pods().get(name)
    return (pod.spec.nodeName or "") if pod is not None and not pod.metadata.deletionTimestamp else ""


def test_a_machine_is_lost(scene: Scene, front: str) -> None:
    """With its disk: another one takes the daemon, and the copies are made again."""
    name = "mesh-s-2"
    host, before = _host(scene, name), scene.map()
    turned = max(node.turned for node in before.nodes)
    with Reader(scene.client(front), scene.bodies) as reader:
        scene.kubelet.lose(host)
        scene.until(lambda: _host(scene, name) not in ("", host), "replaced")
        scene.until(lambda: _turned(scene, name) > turned, "noticed by the mesh")
        scene.settled(3)
    assert reader.failed == []
    assert "Replacing" in scene.reasons()
    _all_there(scene, front)


def _turned(scene: Scene, name: str) -> int:
    """The map version under which a node went or came last."""
    node = scene.map().node(name)
    return node.turned if node else 0


def test_a_control_store_that_was_deleted_is_put_back_from_a_backup(scene: Scene, front: str) -> None:
    """As docs/kubernetes.md says; the daemons run on meanwhile, and found no other mesh."""
    kinds: dict[str, Any] = {"ConfigMap": ConfigMap, "Secret": Secret}
    labels, where = {"shardmesh.io/store": "mesh"}, scene.namespace

    def stored() -> list[tuple[str, Any]]:
        return [
            (kind, each)
            for kind in kinds
            for each in scene.kube.list(kinds[kind], namespace=where, labels=labels)
        ]

    nodes, saved = {node.node_id for node in scene.map().nodes}, stored()
    pods = {name: pod.metadata.uid for name, pod in scene.pods().items()}
    client = scene.client(front)

    def refused() -> bool:
        try:
            client.list_objects_v2(Bucket="photos")
        except ClientError as error:
            return str(error.response["Error"]["Code"]) == "InvalidAccessKeyId"
        return False

    def restore() -> None:
        for kind, each in saved:
            metadata = each.metadata
            metadata.resourceVersion = metadata.uid = metadata.managedFields = None
            scene.kube.patch(
                kinds[kind],
                each.metadata.name,
                each.to_dict(),
                namespace=where,
                patch_type=PatchType.APPLY,
                field_manager="restore",
                force=True,
            )

    try:
        for kind, each in saved:
            scene.kube.delete(kinds[kind], each.metadata.name, namespace=where)
        scene.until(refused, "without the keys that were deleted")
    finally:
        restore()

    def written() -> bool:
        try:
            client.put_object(Bucket="photos", Key="000.bin", Body=scene.bodies["000.bin"])
        except ClientError:
            return False
        return True

    scene.until(written, "written to again")
    scene.settled(3)
    assert {node.node_id for node in scene.map().nodes} == nodes
    assert {name: pod.metadata.uid for name, pod in scene.pods().items()} == pods
    _all_there(scene, front)


def test_the_mesh_goes_and_its_data_stays(installed: Scene) -> None:
    """The finalizer waits for the daemons; with Retain the map and the keys are still there."""
    scene = installed
    if _exists(scene):  # else a try before has done it
        scene.settled(3)
        scene.kube.delete(MeshCluster, "mesh", namespace=scene.namespace)
    scene.until(lambda: not _exists(scene), "gone")
    assert scene.pods() == {}
    assert scene.map().nodes
    assert scene.kube.get(Secret, "mesh-root", namespace=scene.namespace)
    assert {"Deleted"} <= scene.reasons()


def _exists(scene: Scene) -> bool:
    found = scene.kube.list(MeshCluster, namespace=scene.namespace)
    return any(each.metadata.name == "mesh" for each in found)


def _all_there(scene: Scene, front: str) -> None:
    client = scene.client(front)
    found = client.list_objects_v2(Bucket="photos")
    assert [each["Key"] for each in found["Contents"]] == sorted(scene.bodies)
    for name, body in scene.bodies.items():
        assert client.get_object(Bucket="photos", Key=name)["Body"].read() == body
