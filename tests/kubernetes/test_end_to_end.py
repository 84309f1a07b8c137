"""The chart, the operator and its daemons on a real control plane: installed, expanded, upgraded, drained, a
machine lost, removed. The kubelet is a small one of ours, the daemons real processes.

Law: the mesh is one for all scenes, for installing it takes longer than most of them; each begins when it is
whole and has its objects, whatever another scene, or a try of its own, left. The last one ends it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Namespace, Node, Secret
from lightkube.types import PatchType

from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import SPEC, MeshCluster, MeshNode, Reader, Scene, photographs
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

pytestmark = pytest.mark.timeout(600)  # of a scene, on a slow machine


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def installed(kubeconfig: Path, kube: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if os.environ.get("MESH_TEST_KUBECONFIG") and list(kube.list(Node)):
        pytest.skip("this cluster has nodes of its own; machines of the tests must not be among them")
    program, place = helm(), tmp_path_factory.mktemp("kubelet")
    namespace = f"mesh-end-to-end-{secrets.token_hex(3)}"  # the one of a try before may be ending still
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
            run_helm(
                program, "install", "mesh", str(copied_chart(place)), *where, "--values", "-", given=values
            )
            try:
                yield Scene(kube, namespace, kubelet)
            finally:
                run_helm(program, "uninstall", "mesh", *where)
    finally:
        kube.delete(Namespace, namespace)


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


def test_a_wrong_image_is_told_and_put_right(scene: Scene, front: str) -> None:
    """One daemon is tried with it, and no other; `kubectl get meshclusters` has why, and reads go on."""
    right = scene.mesh()["spec"]["image"]
    before = {name: pod.metadata.uid for name, pod in scene.pods().items()}
    with Reader(scene.client(front), scene.bodies) as reader:
        scene.change(image="registry.example.com/shardmesh/mehsd:0.1.0")
        scene.until(lambda: scene.mesh()["status"].get("trouble") == "Image: mesh-s-0", "told")
        told = {each["type"]: each["message"] for each in scene.mesh()["status"]["conditions"]}
        assert 'mesh-s-0 ImagePullBackOff: Back-off pulling image "registry.example.com' in told["Available"]
        assert "to do: correct the image" in told["Available"]
        assert "mesh-s-1 is outdated; waiting" in told["Progressing"]
        assert _anew(scene, before) == {"mesh-s-0"}
        scene.change(image=right)
        scene.settled(3)
    assert reader.failed == []
    assert scene.mesh()["status"].get("trouble") is None
    assert _anew(scene, before) == {"mesh-s-0"}
    _all_there(scene, front)


def _anew(scene: Scene, before: dict[str, str]) -> set[str]:
    return {name for name, pod in scene.pods().items() if pod.metadata.uid != before[name]}


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
        return bool(node and node.leaving and all(share.node_id != name for share in cluster.current_shares))

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


def test_a_mesh_that_is_made_again_finds_every_disk(scene: Scene, front: str) -> None:
    """Deleted with Retain and applied again while one machine takes no pods: its daemon comes up on another
    one, perhaps on that of a third daemon. Each returns to its directory; there is no webhook here."""
    before = {name: _host(scene, name) for name in scene.pods()}
    spec = scene.mesh()["spec"]
    scene.kube.delete(MeshCluster, "mesh", namespace=scene.namespace)
    scene.until(lambda: not _exists(scene) and scene.pods() == {}, "gone")
    scene.kubelet.cordon(before["mesh-s-0"])
    document = {"metadata": {"name": "mesh", "namespace": scene.namespace}, "spec": spec}
    scene.kube.create(MeshCluster.from_dict(document))
    scene.until(lambda: _host(scene, "mesh-s-0") != "", "scheduled elsewhere")
    assert _host(scene, "mesh-s-0") != before["mesh-s-0"]
    scene.kubelet.cordon(before["mesh-s-0"], back=True)
    scene.settled(3)
    assert {name: _host(scene, name) for name in scene.pods()} == before
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
