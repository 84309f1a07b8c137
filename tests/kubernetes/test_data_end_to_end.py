"""Datasets, loads, views and training pods with the operator as the chart installs it: its own process, with
the rights of its ServiceAccount and no others, over a real daemon.

Law: the mesh is one for all scenes; each begins with nothing of what another one, or a try of its own, made.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Namespace, Node, Pod, Secret
from lightkube.types import PatchType

from meshoperator.planners.pod_admission import DONE, LABEL, SECRET
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import POOL, SPEC, Scene
from tests.kubernetes.test_crds_served import create
from tests.kubernetes.test_webhook import (
    GROUP_VERSION,
    dataset,
    host_of,
    install,
    pod,
    registered,
    serving,
    until,
)
from tests.support.certificates import Authority
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

pytestmark = pytest.mark.timeout(900)
PATIENCE = 240.0
BODY = b"x" * 1000
RACK = "topology.shardmesh.io/rack"
BUCKETS = {"shardmesh.io/store": "mesh", "shardmesh.io/topic": "buckets"}
CACHES = POOL | {
    "name": "c",
    "replicas": 2,
    "roles": ["cache"],
    "nodeSelector": {"gpus": "yes"},
    "tiers": [{"name": "disk", "class": "nvme", "hostPath": "/mnt/shardmesh", "quota": "1Gi"}],
}
MeshDataset: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshDataset", "meshdatasets")
fronts: list[Front] = []


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def installed(kubeconfig: Path, kube: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    program, place = helm(), tmp_path_factory.mktemp("kubelet")
    namespace = "mesh-data"
    kube.create(Namespace(metadata=ObjectMeta(name=namespace)))
    places: list[Scene] = []
    fronts.clear()
    try:
        with (
            Kubelet(kubeconfig, place, namespace) as kubelet,
            Front(lambda: places[0].places() if places else []) as front,
        ):
            places.append(Scene(kube, namespace, kubelet))
            fronts.append(front)
            kubelet.add_node("d0", {"topology.kubernetes.io/zone": "a", **POOL["nodeSelector"]})
            where = ["--namespace", namespace, "--kubeconfig", str(kubeconfig)]
            endpoint = {"name": "MESH_OPERATOR_ENDPOINT", "value": front.endpoint}
            eager = {"name": "MESH_OPERATOR_EAGER_SECONDS", "value": "0.5"}
            often = {"name": "MESH_OPERATOR_FIGURES_SECONDS", "value": "1"}
            values = {
                "webhook": {"enabled": False},
                "cluster": {
                    "create": True,
                    "spec": SPEC | {"copies": 1, "nodePools": [POOL | {"replicas": 1}]},
                },
                "operator": {"extraEnv": [endpoint, eager, often]},
            }
            run_helm(
                program, "install", "mesh", str(copied_chart(place)), *where, "--values", "-", given=values
            )
            try:
                yield places[0]
            finally:
                run_helm(program, "uninstall", "mesh", *where)
    finally:
        kube.delete(Namespace, namespace)


@pytest.fixture
def scene(installed: Scene) -> Scene:
    """One daemon at least, and no data."""
    unmake(installed)
    return installed


@pytest.fixture
def front(scene: Scene) -> Front:
    """The Service of the scene."""
    return fronts[0]


def unmake(scene: Scene) -> None:
    """Everything that a scene makes goes."""
    for each in scene.kube.list(Pod, namespace=scene.namespace, labels={LABEL: None}):
        scene.kube.delete(Pod, each.metadata.name, namespace=scene.namespace, grace_period=0)
    for kind in ("MeshView", "MeshLoad", "MeshDataset"):
        found: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")

        def left(found: Any = found) -> list[str]:
            return [each.metadata.name for each in scene.kube.list(found, namespace=scene.namespace)]

        for name in left():
            scene.kube.delete(found, name, namespace=scene.namespace)
        scene.until(lambda left=left: left() == [], f"rid of each {kind}")  # type: ignore[misc]  # bound at once


def status(scene: Scene, kind: str, name: str) -> dict[str, Any]:
    found: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")
    return dict(scene.kube.get(found, name, namespace=scene.namespace).status or {})


def test_data_comes_is_made_read_and_unmade(scene: Scene, kube: Client, tmp_path: Path) -> None:
    scene.change(nodePools=[POOL | {"replicas": 1}])
    scene.settled(1)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.bin").write_bytes(BODY)
    dataset(kube, scene.namespace, "photos", f"file://{source}")
    load = {"datasetRef": "photos", "paths": ["0", "1"]}
    make(scene, "MeshLoad", "some", load)
    view = {"clusterRef": "mesh", "bucket": "photos", "kind": "shards", "definition": {"count": 2}}
    make(scene, "MeshView", "packed", view)
    try:
        until(lambda: status(scene, "MeshLoad", "some").get("phase") == "Succeeded", PATIENCE)
        until(lambda: status(scene, "MeshView", "packed").get("ready"), PATIENCE)
        assert status(scene, "MeshLoad", "some")["bytesDone"] == 2 * len(BODY)
        told = status(scene, "MeshDataset", "photos")
        label = told["nodeLabel"]

        def labelled() -> bool:
            metadata = kube.get(Node, "d0").metadata
            return label in ((metadata.labels or {}) if metadata else {})

        until(labelled, PATIENCE)
        assert kube.create(
            pod("train", "nowhere", "photos", {SECRET: "train-keys"}), namespace=scene.namespace
        )

        def keys() -> dict[str, str]:
            every = {each.metadata.name: each for each in scene.kube.list(Secret, namespace=scene.namespace)}
            found = every.get("train-keys")
            return dict(found.data) if found else {}

        data = until(keys, PATIENCE)
        assert json.loads(b64decode(data["credentials.json"]))["AccessKeyId"].startswith("MSTS")
        unmake(scene)
        assert {"BucketMade", "Loading", "LoadSucceeded", "ViewMade"} <= scene.reasons()
    except AssertionError as error:
        raise AssertionError(f"{error}\n{scene.state()}") from error


def test_a_dataset_is_kept_in_the_rack_it_is_planned_for_and_pods_land_there(
    scene: Scene, kube: Client, kubeconfig: Path, front: Front, tmp_path: Path
) -> None:
    """Daemons that only cache, in two racks; from one to the other, too."""
    for name, rack in (("g1", "r1"), ("g2", "r2")):
        scene.kubelet.add_node(name, {"gpus": "yes", "pool": "gpus", RACK: rack})
    scene.change(nodePools=[POOL | {"replicas": 1}, CACHES])
    scene.settled(3)
    source = tmp_path / "near"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.bin").write_bytes(BODY)
    spec = {"placement": {"nodeSelector": {RACK: "r1"}}}
    dataset(kube, scene.namespace, "near", f"file://{source}", **spec)

    def placed(*hosts: str) -> bool:
        """All of it lies on the daemons of these machines, and nothing anywhere else."""
        time.sleep(1)
        poke = {"metadata": {"annotations": {"looked-at": str(time.time())}}}  # else once a minute
        kube.patch(MeshDataset, "near", poke, namespace=scene.namespace, patch_type=PatchType.MERGE)
        told = status(scene, "MeshDataset", "near")
        where = {name: status(scene, "MeshNode", name)["node"] for name in scene.pods()}
        found = {where[spot["node"]]: spot["bytes"] for spot in told.get("placement") or ()}
        conditions = {each["type"]: each["status"] for each in told.get("conditions") or ()}
        return conditions.get("Placed") == "True" and found == dict.fromkeys(hosts, 8 * len(BODY))

    def beside(name: str) -> str:
        """Where a pod that reads it is put."""
        kube.create(pod(name, "gpus", "near"), namespace=scene.namespace)
        host = host_of(kube, name, scene.namespace)
        kube.delete(Pod, name, namespace=scene.namespace, grace_period=0)
        return host

    try:
        until(lambda: planned(scene) == ["g1"], PATIENCE)
        make(scene, "MeshLoad", "all", {"datasetRef": "near"})
        until(lambda: placed("g1"), PATIENCE)
        client = scene.client(front.endpoint)
        assert client.get_object(Bucket="near", Key="7.bin")["Body"].read() == BODY
        label = status(scene, "MeshDataset", "near")["nodeLabel"]
        until(lambda: labelled(kube, label) == {"g1"}, PATIENCE)
        until(lambda: figures(scene, "g1").get("cachedBytes") == 8 * len(BODY), PATIENCE)
        (tier,) = figures(scene, "g1")["tiers"]
        assert (tier["name"], tier["class"]) == ("disk", "nvme")
        assert tier["capacity"] > tier["used"] > 0

        def is_of_three() -> bool:
            """A daemon that is late with its figures is not in it."""
            (whole,) = scene.mesh()["status"]["tiers"]
            return bool(whole["capacity"] > 2.5 * tier["capacity"])

        until(is_of_three, PATIENCE)
        authority = Authority(tmp_path / "authority")
        (tmp_path / "tls").mkdir()
        install(authority, tmp_path / "tls")
        with (
            serving(kubeconfig, tmp_path / "tls") as (_, hook, _),
            registered(kube, scene.namespace, authority, hook.port),
        ):
            until(lambda: admitted(kube, scene.namespace), PATIENCE)
            assert [beside(f"train-{number}") for number in range(3)] == ["g1"] * 3
            change = {"spec": {"placement": {"nodeSelector": {RACK: "r2"}}}}
            kube.patch(MeshDataset, "near", change, namespace=scene.namespace, patch_type=PatchType.MERGE)
            until(lambda: placed("g2"), PATIENCE)  # loaded there first, then let go
            until(lambda: labelled(kube, label) == {"g2"}, PATIENCE)
            names = (f"later-{number}" for number in itertools.count())
            until(lambda: beside(next(names)) == "g2", PATIENCE)  # when the scheduler knows the labels, too
        assert {"Moving", "Bringing", "Placed", "Released"} <= scene.reasons()
        unmake(scene)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{status(scene, 'MeshDataset', 'near')}\n{scene.state()}") from error


def planned(scene: Scene) -> list[str]:
    """Machines whose daemons are the homes of the dataset `near`, as the mesh has it."""
    every = {
        each.metadata.annotations["shardmesh.io/key"]: json.loads(each.data["value"])
        for each in scene.kube.list(ConfigMap, namespace=scene.namespace, labels=BUCKETS)
    }
    homes = every["buckets/near"]["origin"]["homes"] if "buckets/near" in every else ()
    return sorted(status(scene, "MeshNode", name)["node"] for name in homes)


def figures(scene: Scene, host: str) -> dict[str, Any]:
    """What is said of the daemon on a machine."""
    every = (status(scene, "MeshNode", name) for name in scene.pods())
    return next(found for found in every if found.get("node") == host)


def labelled(kube: Client, label: str) -> set[str]:
    every = ((each.metadata.name, each.metadata.labels or {}) for each in kube.list(Node) if each.metadata)
    return {str(name) for name, labels in every if label in labels}


def admitted(kube: Client, namespace: str) -> bool:
    """The API server hears of a new webhook a moment later."""
    name = f"probe-{uuid.uuid4().hex[:6]}"
    made = kube.create(pod(name, "nowhere", "near"), namespace=namespace)
    kube.delete(Pod, name, namespace=namespace, grace_period=0)
    return DONE in (made.metadata.annotations or {}) if made.metadata else False


def make(scene: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    create(scene.kube, scene.namespace, document)
