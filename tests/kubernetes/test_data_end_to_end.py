"""Datasets, loads, views and training pods with the operator as the chart installs it: its own process, with
the rights of its ServiceAccount and no others, over a real daemon."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace, Node, Pod, Secret

from meshoperator.admission import SECRET
from tests.kubernetes.front import Front
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.test_crds_served import create
from tests.kubernetes.test_end_to_end import POOL, SPEC, Scene, _chart, _helm
from tests.kubernetes.test_webhook import GROUP_VERSION, dataset, pod, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

pytestmark = pytest.mark.timeout(240)
PATIENCE = 100.0
BODY = b"x" * 1000


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def scene(kubeconfig: Path, kube: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    program, place = helm(), tmp_path_factory.mktemp("kubelet")
    namespace = "mesh-data"
    kube.create(Namespace(metadata=ObjectMeta(name=namespace)))
    places: list[Scene] = []
    try:
        with (
            Kubelet(kubeconfig, place, namespace) as kubelet,
            Front(lambda: places[0].places() if places else []) as front,
        ):
            places.append(Scene(kube, namespace, kubelet))
            kubelet.add_node("d0", {"topology.kubernetes.io/zone": "a", **POOL["nodeSelector"]})
            where = ["--namespace", namespace, "--kubeconfig", str(kubeconfig)]
            endpoint = {"name": "MESH_OPERATOR_ENDPOINT", "value": front.endpoint}
            eager = {"name": "MESH_OPERATOR_EAGER_SECONDS", "value": "0.5"}
            values = {
                "webhook": {"enabled": False},
                "cluster": {
                    "create": True,
                    "spec": SPEC | {"copies": 1, "nodePools": [POOL | {"replicas": 1}]},
                },
                "operator": {"extraEnv": [endpoint, eager]},
            }
            _helm(program, "install", "mesh", str(_chart(place)), *where, "--values", "-", given=values)
            try:
                yield places[0]
            finally:
                _helm(program, "uninstall", "mesh", *where)
    finally:
        kube.delete(Namespace, namespace)


def status(scene: Scene, kind: str, name: str) -> dict[str, Any]:
    found: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")
    return dict(scene.kube.get(found, name, namespace=scene.namespace).status or {})


def test_data_comes_is_made_and_read(scene: Scene, kube: Client, tmp_path: Path) -> None:
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
    except AssertionError as error:
        raise AssertionError(f"{error}\n{scene.state()}") from error


def test_what_was_made_is_unmade(scene: Scene, kube: Client) -> None:
    for kind, name in (("MeshView", "packed"), ("MeshLoad", "some"), ("MeshDataset", "photos")):
        found: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")
        kube.delete(found, name, namespace=scene.namespace)

        def gone(found: Any = found, name: str = name) -> bool:
            return name not in {
                each.metadata.name for each in scene.kube.list(found, namespace=scene.namespace)
            }

        until(gone, PATIENCE)
    kube.delete(Pod, "train", namespace=scene.namespace)
    assert {"BucketMade", "Loading", "LoadSucceeded", "ViewMade"} <= scene.reasons()


def make(scene: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    create(scene.kube, scene.namespace, document)
