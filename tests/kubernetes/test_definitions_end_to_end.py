"""Definitions that are deleted before what they define, and come again: docs/kubernetes.md, "Uninstall", on a
real control plane with a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.kubernetes.apart import NAMESPACE, apart
from tests.kubernetes.control_plane import GROUP_VERSION, define, undefine
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import POOL, SPEC
from tests.kubernetes.test_crds_served import BY_NAME, create, resource
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kubernetes.scenes import Scene

pytestmark = pytest.mark.timeout(480)  # a mesh, its end, and another one, on a slow machine
ONE = SPEC | {"copies": 1, "nodePools": [POOL | {"replicas": 1}]}
KINDS = ("MeshCluster", "MeshNode", "MeshDataset", "MeshLoad", "MeshView")


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the test; the kubelet ends them."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Scene, Path]]:
    """With its kubeconfig."""
    with apart(tmp_path, 1) as found:
        yield found


def test_definitions_that_are_deleted_take_everything_along_and_it_is_found_again(
    scene: tuple[Scene, Path], tmp_path: Path
) -> None:
    mesh, kubeconfig = scene
    where = ["--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig)]
    (tmp_path / "source").mkdir()
    with Front(mesh.places) as front:
        run_helm(
            helm(),
            "install",
            "mesh",
            str(copied_chart(tmp_path)),
            *where,
            "--values",
            "-",
            given=values(front.endpoint),
        )
        mesh.settled(1)
        client = mesh.client(front.endpoint)
        client.create_bucket(Bucket="own")
        client.put_object(Bucket="own", Key="k", Body=b"kept")
        source = {"uri": f"file://{tmp_path}/source"}
        make(mesh, "MeshDataset", "data", {"clusterRef": "mesh", "source": source})
        packed = {"clusterRef": "mesh", "bucket": "own", "kind": "shards", "definition": {"count": 2}}
        make(mesh, "MeshView", "packed", packed)
        mesh.until(lambda: "bucket" in status(mesh, "MeshDataset", "data"), "a bucket of the dataset")
        mesh.until(lambda: status(mesh, "MeshView", "packed").get("ready") is True, "a view")
        for kind in KINDS:  # MeshClusters first: the others wait for daemons that have ended
            undefine(kubeconfig, BY_NAME[kind].plural)
        mesh.until(lambda: served(mesh) == [], "without definitions")
        mesh.until(lambda: mesh.pods() == {}, "without daemons")
        define(kubeconfig)
        make(mesh, "MeshCluster", "mesh", ONE)
        mesh.settled(1)
        assert mesh.client(front.endpoint).get_object(Bucket="own", Key="k")["Body"].read() == b"kept"
        assert [each.restarts for each in mesh.kubelet.pods.values() if "operator" in each.name] == [0]
        run_helm(helm(), "uninstall", "mesh", *where)


def values(endpoint: str) -> dict[str, Any]:
    said = {"EAGER_SECONDS": "0.5", "ENDPOINT": endpoint}
    extra = [{"name": f"MESH_OPERATOR_{name}", "value": value} for name, value in said.items()]
    return {"cluster": {"create": True, "spec": ONE}, "operator": {"extraEnv": extra}}


def make(mesh: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    create(mesh.kube, NAMESPACE, document)


def status(mesh: Scene, kind: str, name: str) -> dict[str, Any]:
    return dict(mesh.kube.get(resource(BY_NAME[kind]), name, namespace=NAMESPACE).status or {})


def served(mesh: Scene) -> list[str]:
    """Of our kinds."""
    answer = mesh.kube._client._client.get(f"/apis/{GROUP_VERSION}")
    return [each["name"] for each in answer.json()["resources"]] if answer.status_code == 200 else []
