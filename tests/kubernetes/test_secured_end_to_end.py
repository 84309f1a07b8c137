"""A mesh on volume claims that speaks https, with the operator as the chart installs it: its own process,
with the rights that it is granted. The authority is the test's, the storage plug-in the tests' kubelet."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import StatefulSet
from lightkube.resources.core_v1 import Namespace, PersistentVolumeClaim, Secret
from lightkube.resources.storage_v1 import StorageClass
from lightkube.types import PatchType

from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import POOL, SPEC, MeshNode, Scene
from tests.kubernetes.test_data_end_to_end import status
from tests.support.certificates import Authority
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

pytestmark = pytest.mark.timeout(600)
CLAIMS = POOL | {
    "replicas": 2,
    "tiers": [{"name": "disk", "class": "nvme", "volumeClaim": {"size": "5Gi", "storageClass": "elastic"}}],
}
ELASTIC = StorageClass(
    metadata=ObjectMeta(name="elastic"), provisioner="tests.shardmesh.io/kubelet", allowVolumeExpansion=True
)


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def scene(
    kubeconfig: Path, kube: Client, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    program, place = helm(), tmp_path_factory.mktemp("kubelet")
    namespace = "mesh-secured"
    kube.create(Namespace(metadata=ObjectMeta(name=namespace)))
    kube.create(ELASTIC)
    scenes: list[Scene] = []
    try:
        with (
            Kubelet(kubeconfig, place, namespace) as kubelet,
            Front(lambda: scenes[0].places() if scenes else []) as front,
        ):
            scenes.append(Scene(kube, namespace, kubelet))
            for number in range(3):
                kubelet.add_node(f"t{number}", POOL["nodeSelector"])
            pair = authority.issue("mesh", ["127.0.0.1", *kubelet.addresses(30)])
            files = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.cert}
            kube.create(
                Secret(
                    metadata=ObjectMeta(name="mesh-tls", namespace=namespace),
                    type="kubernetes.io/tls",
                    stringData={name: file.read_text() for name, file in files.items()},
                )
            )
            where = ["--namespace", namespace, "--kubeconfig", str(kubeconfig)]
            spec = SPEC | {"nodePools": [CLAIMS], "s3": {"tls": {"secretRef": {"name": "mesh-tls"}}}}
            endpoint = front.endpoint.replace("http://", "https://")
            said = {"ENDPOINT": endpoint, "EAGER_SECONDS": "0.5", "FIGURES_SECONDS": "1"}
            values = {
                "webhook": {"enabled": False},
                "cluster": {"create": True, "spec": spec},
                "operator": {
                    "extraEnv": [{"name": f"MESH_OPERATOR_{name}", "value": v} for name, v in said.items()]
                },
            }
            run_helm(
                program, "install", "mesh", str(copied_chart(place)), *where, "--values", "-", given=values
            )
            try:
                yield scenes[0]
            finally:
                run_helm(program, "uninstall", "mesh", *where)
    finally:
        kube.delete(StorageClass, "elastic")
        kube.delete(Namespace, namespace)


def client(scene: Scene, authority: Authority, name: str) -> Any:
    """Of one daemon, by its own address."""
    (address,) = (each.address for each in scene.kubelet.pods.values() if each.name == name)
    data = scene.kube.get(Secret, "mesh-root", namespace=scene.namespace).to_dict()["data"]
    keys = [b64decode(data[key]).decode() for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    return boto3.client(
        "s3",
        endpoint_url=f"https://{address}:9000",
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        region_name="us-east-1",
        verify=str(authority.cert),
        config=Config(s3={"addressing_style": "path"}),
    )


def filled(scene: Scene, authority: Authority) -> list[Any]:
    """Clients of both daemons, by which objects were put: any of them passes on, and copies, over TLS."""
    clients = [client(scene, authority, f"mesh-s-{number}") for number in range(2)]
    clients[0].create_bucket(Bucket="photos")
    for number in range(30):
        clients[number % 2].put_object(Bucket="photos", Key=f"{number}", Body=b"%d" % number * 2000)
    return clients


def claims(scene: Scene) -> dict[str, str]:
    """Name → uid, of those that are bound."""
    every = scene.kube.list(PersistentVolumeClaim, namespace=scene.namespace)
    return {each.metadata.name: each.metadata.uid for each in every if each.status.phase == "Bound"}


def test_daemons_on_claims_speak_https_with_everybody(scene: Scene, authority: Authority) -> None:
    scene.settled(2)
    assert scene.mesh()["status"]["endpoint"].startswith("https://")
    assert set(claims(scene)) == {f"disk-mesh-s-{number}" for number in range(2)}
    clients = filled(scene, authority)
    for number in range(30):
        found = clients[(number + 1) % 2].get_object(Bucket="photos", Key=f"{number}")["Body"].read()
        assert found == b"%d" % number * 2000

    def measured() -> bool:
        return all(status(scene, "MeshNode", name).get("bytes", 0) > 0 for name in ("mesh-s-0", "mesh-s-1"))

    scene.until(measured, "spoken with by the operator, each of them")


def test_volumes_grow_under_running_daemons(scene: Scene) -> None:
    before = {name: pod.metadata.uid for name, pod in scene.pods().items()}
    claim = {"size": "8Gi", "storageClass": "elastic"}
    scene.change(nodePools=[CLAIMS | {"tiers": [CLAIMS["tiers"][0] | {"volumeClaim": claim}]}])

    def grown() -> bool:
        every = scene.kube.list(PersistentVolumeClaim, namespace=scene.namespace)
        return [(each.status.capacity or {}).get("storage") for each in every] == ["8Gi", "8Gi"]

    scene.until(grown, "grown")
    scene.settled(2)
    assert {name: pod.metadata.uid for name, pod in scene.pods().items()} == before
    (made,) = scene.kube.list(StatefulSet, namespace=scene.namespace)
    assert made.spec.volumeClaimTemplates[0].spec.resources.requests == {"storage": "8Gi"}
    scene.until(lambda: owners(scene) == {made.metadata.uid}, "taken up again by their StatefulSet")


def owners(scene: Scene) -> set[str]:
    """Of the daemons' pods."""
    every = (pod.metadata.ownerReferences or () for pod in scene.pods().values())
    return {reference.uid for references in every for reference in references}


def test_a_decommissioned_daemon_goes_with_its_claim(scene: Scene, authority: Authority) -> None:
    scene.settled(2)
    filled(scene, authority)
    before = claims(scene)
    wanted = {"spec": {"desiredState": "Decommissioned"}}
    scene.kube.patch(MeshNode, "mesh-s-1", wanted, namespace=scene.namespace, patch_type=PatchType.MERGE)
    old = before["disk-mesh-s-1"]
    scene.until(lambda: claims(scene).get("disk-mesh-s-1", old) != old, "on a new volume")
    scene.settled(2)
    after = claims(scene)
    assert {name for name in after if after[name] != before.get(name)} == {"disk-mesh-s-1"}
    new = client(scene, authority, "mesh-s-1")
    for number in range(30):
        assert new.get_object(Bucket="photos", Key=f"{number}")["Body"].read() == b"%d" % number * 2000
