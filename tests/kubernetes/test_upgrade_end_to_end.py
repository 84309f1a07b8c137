"""From an earlier commit to this one, as docs/kubernetes.md, "Upgrade" says: its definitions, chart, operator
and daemons on a real control plane, then those of this checkout, under a client that reads. At its end its
definitions are deleted before what they define, and come again ("Uninstall")."""

from __future__ import annotations

import os
import subprocess
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from lightkube.resources.core_v1 import Secret

from tests.kubernetes.apart import NAMESPACE, apart
from tests.kubernetes.control_plane import ROOT, define, undefine
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.releases import copied_chart, earlier, run_helm
from tests.kubernetes.scenes import POOL, SPEC, Reader, photographs
from tests.kubernetes.test_crds_served import BY_NAME, create, resource
from tests.kubernetes.test_webhook import GROUP_VERSION
from tests.support.front import Front
from tests.support.interpreters import program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kubernetes.scenes import Scene

pytestmark = pytest.mark.timeout(900)  # two releases, one after the other, on a slow machine
NAMES = ("mesh-s-0", "mesh-s-1")
KINDS = ("MeshCluster", "MeshNode", "MeshDataset", "MeshLoad", "MeshView")
FLAGS = ["--workers=1", "--transforms=1", "--lease=4", "--drain-timeout=1"]  # the earlier release's names
TWO = SPEC | {"nodePools": [POOL | {"replicas": 2, "extraArgs": FLAGS}]}


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the test; the kubelet ends them."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return earlier(tmp_path / "earlier")


@pytest.fixture
def scene(old: Path, tmp_path: Path) -> Iterator[tuple[Scene, Path]]:
    """With its kubeconfig."""
    with apart(tmp_path, 2, old / "helm" / "shardmesh" / "crds", {"earlier": old}) as found:
        yield found


def test_an_earlier_release_becomes_this_one_and_lost_definitions_cost_no_data(
    scene: tuple[Scene, Path], old: Path, tmp_path: Path
) -> None:
    """Users, buckets, datasets and views are there after the upgrade, and no read fails meanwhile. Deleted
    definitions take everything along but the data, which the next mesh finds."""
    mesh, kubeconfig = scene
    where = ["--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig), "--values", "-"]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.bin").write_bytes(b"a" * 1000)
    with Front(mesh.places) as front:
        was, now = (values(tag, front.endpoint) for tag in ("earlier", "present"))
        (tmp_path / "was").mkdir()
        chart = str(copied_chart(tmp_path / "was", old))
        run_helm(helm(), "install", "mesh", chart, *where, given=was)
        mesh.settled(2)
        client = mesh.client(front.endpoint)
        mesh.bodies = photographs(client)
        admin(mesh, front.endpoint, "user", "add", "ann")
        source = {"uri": f"file://{tmp_path}/source"}
        make(mesh, "MeshDataset", "data", {"clusterRef": "mesh", "source": source})
        packed = {"clusterRef": "mesh", "bucket": "photos", "kind": "shards", "definition": {"count": 2}}
        make(mesh, "MeshView", "packed", packed)
        mesh.until(lambda: "bucket" in status(mesh, "MeshDataset", "data"), "a bucket of the dataset")
        mesh.until(lambda: status(mesh, "MeshView", "packed").get("ready") is True, "a view")
        before = seen(client), {name: mesh.pods()[name].metadata.uid for name in NAMES}
        with Reader(client, mesh.bodies) as reader:
            define(kubeconfig)
            run_helm(helm(), "upgrade", "mesh", str(copied_chart(tmp_path)), *where, given=now)
            mesh.until(
                lambda: all(uid(mesh, name) not in ("", before[1][name]) for name in NAMES), "anew", 400
            )
            mesh.settled(2)
        assert reader.failed == []
        assert reader.read > 20
        assert seen(client) == before[0]
        assert client.get_object(Bucket="data", Key="a.bin")["Body"].read() == b"a" * 1000
        assert "ann" in admin(mesh, front.endpoint, "user", "ls")
        client.put_object(Bucket="photos", Key="later", Body=b"later")
        told = {each["type"]: each["status"] for each in mesh.mesh()["status"]["conditions"]}
        assert told["DisksApart"] == "True"  # which the earlier one did not know
        for kind in KINDS:  # MeshClusters first: the others wait for daemons that have ended
            undefine(kubeconfig, BY_NAME[kind].plural)
        mesh.until(lambda: served(mesh) == [], "without definitions")
        mesh.until(lambda: mesh.pods() == {}, "without daemons")
        define(kubeconfig)
        make(mesh, "MeshCluster", "mesh", now["cluster"]["spec"])
        mesh.settled(2)
        again = mesh.client(front.endpoint)
        assert again.get_object(Bucket="photos", Key="later")["Body"].read() == b"later"
        assert [each.restarts for each in mesh.kubelet.pods.values() if "operator" in each.name] == [0]
        run_helm(helm(), "uninstall", "mesh", *where[:4])


def values(tag: str, endpoint: str) -> dict[str, Any]:
    """Of the release whose images have this tag."""
    said = {"EAGER_SECONDS": "0.5", "ENDPOINT": endpoint}
    extra = [{"name": f"MESH_OPERATOR_{name}", "value": value} for name, value in said.items()]
    image = {"repository": "registry.example.com/shardmesh/operator", "tag": tag}
    spec = TWO | {"image": f"registry.example.com/shardmesh/meshd:{tag}"}
    return {"cluster": {"create": True, "spec": spec}, "operator": {"image": image, "extraEnv": extra}}


def admin(mesh: Scene, endpoint: str, *argv: str) -> str:
    """What `meshd admin` of this checkout prints."""
    data = mesh.kube.get(Secret, "mesh-root", namespace=NAMESPACE).to_dict()["data"]
    keys = {name: b64decode(value).decode() for name, value in data.items()}
    done = subprocess.run(
        [program("meshd"), "admin", *argv, "--endpoint", endpoint],
        env=os.environ | keys,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(mesh: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
    create(mesh.kube, NAMESPACE, document)


def status(mesh: Scene, kind: str, name: str) -> dict[str, Any]:
    return dict(mesh.kube.get(resource(BY_NAME[kind]), name, namespace=NAMESPACE).status or {})


def uid(mesh: Scene, name: str) -> str:
    pod = mesh.pods().get(name)
    return pod.metadata.uid if pod is not None else ""


def seen(client: Any) -> tuple[list[str], list[bytes]]:
    """Buckets, and what the view makes."""
    buckets = [each["Name"] for each in client.list_buckets()["Buckets"]]
    shards = [each["Key"] for each in client.list_objects_v2(Bucket="photos--packed")["Contents"]]
    return buckets, [client.get_object(Bucket="photos--packed", Key=key)["Body"].read() for key in shards]


def served(mesh: Scene) -> list[str]:
    """Of our kinds."""
    answer = mesh.kube._client._client.get(f"/apis/{GROUP_VERSION}")
    return [each["name"] for each in answer.json()["resources"]] if answer.status_code == 200 else []
