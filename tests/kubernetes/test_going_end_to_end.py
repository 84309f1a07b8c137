"""What goes, what stays, and what hangs when the operator is taken away too early: docs/kubernetes.md,
"Uninstall", on a real control plane with a real daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.admissionregistration_v1 import MutatingWebhookConfiguration
from lightkube.resources.core_v1 import Namespace, Pod
from lightkube.resources.rbac_authorization_v1 import ClusterRole
from lightkube.types import PatchType

from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import POOL, SPEC, Scene
from tests.kubernetes.test_webhook import dataset, pod
from tests.support.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

pytestmark = pytest.mark.timeout(600)
MeshDataset: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshDataset", "meshdatasets")
NAMESPACE, BUCKET = "mesh-going", "kept"
KINDS = ("MeshLoad", "MeshView", "MeshDataset", "MeshCluster")


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """Daemons live as long as the module here; the kubelet ends them."""


@pytest.fixture(scope="module")
def scene(kubeconfig: Path, kube: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("kubelet")
    kube.create(Namespace(metadata=ObjectMeta(name=NAMESPACE)))
    with Kubelet(kubeconfig, place, NAMESPACE) as kubelet:
        kubelet.add_node("u0", POOL["nodeSelector"])
        yield Scene(kube, NAMESPACE, kubelet)


@pytest.fixture(scope="module")
def endpoint(scene: Scene) -> Iterator[str]:
    with Front(scene.places) as front:
        yield front.endpoint


@pytest.fixture
def release(
    kubeconfig: Path, endpoint: str, tmp_path: Path
) -> tuple[list[str], list[str], dict[str, object]]:
    """How it is installed, how uninstalled; the values."""
    where = ["--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig)]
    eager = {"name": "MESH_OPERATOR_EAGER_SECONDS", "value": "0.5"}
    answers = {"name": "MESH_OPERATOR_ENDPOINT", "value": endpoint}
    spec = SPEC | {"copies": 1, "nodePools": [POOL | {"replicas": 1}]}
    values = {"cluster": {"create": True, "spec": spec}, "operator": {"extraEnv": [eager, answers]}}
    chart = str(copied_chart(tmp_path))
    return (
        [helm(), "install", "mesh", chart, *where, "--values", "-"],
        [helm(), "uninstall", "mesh", *where],
        values,
    )


def test_a_release_that_goes_leaves_the_daemons_their_rights_and_one_that_comes_finds_all(
    scene: Scene,
    kube: Client,
    endpoint: str,
    release: tuple[list[str], list[str], dict[str, object]],
    tmp_path: Path,
) -> None:
    install, uninstall, values = release
    run_helm(*install, given=values)
    scene.settled(1)
    uid = scene.pods()["mesh-s-0"].metadata.uid
    dataset(kube, NAMESPACE, "photos", f"file://{tmp_path}")
    scene.until(lambda: "BucketMade" in scene.reasons(), "a bucket of the dataset")
    run_helm(*uninstall)
    there = {each.metadata.name for each in scene.kube.list(MutatingWebhookConfiguration)}
    assert not any("mesh-going" in name for name in there)
    assert kube.get(ClusterRole, f"mesh-shardmesh-{NAMESPACE}-daemon")
    client = scene.client(endpoint)
    client.create_bucket(Bucket=BUCKET)  # written to the control store
    client.put_object(Bucket=BUCKET, Key="a", Body=b"kept")
    kube.create(pod("train", "nowhere", "photos"), namespace=NAMESPACE)  # nothing holds it up
    kube.delete(Pod, "train", namespace=NAMESPACE, grace_period=0)
    run_helm(*install, given=values)
    kube.delete(MeshDataset, "photos", namespace=NAMESPACE)
    scene.until(lambda: not list(scene.kube.list(MeshDataset, namespace=NAMESPACE)), "seen to by an operator")
    scene.settled(1)
    assert scene.pods()["mesh-s-0"].metadata.uid == uid
    assert client.get_object(Bucket=BUCKET, Key="a")["Body"].read() == b"kept"
    run_helm(*uninstall)


def test_a_namespace_that_is_deleted_without_an_operator_hangs_until_finalizers_are_taken_away(
    scene: Scene, kube: Client
) -> None:
    kube.delete(Namespace, NAMESPACE)
    scene.until(lambda: "shardmesh.io/daemons" in waiting_for(kube), "waiting for finalizers")
    for kind in KINDS:  # as the page says
        found: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", kind, f"{kind.lower()}s")
        for each in scene.kube.list(found, namespace=NAMESPACE):
            none = {"metadata": {"finalizers": None}}
            kube.patch(found, each.metadata.name, none, namespace=NAMESPACE, patch_type=PatchType.MERGE)
    end_of(scene, kube)


def waiting_for(kube: Client) -> str:
    """What the deletion of the namespace waits for, as Kubernetes says."""
    status = kube.get(Namespace, NAMESPACE).status
    said = (status.conditions if status else None) or ()
    return " ".join(each.message or "" for each in said if each.type == "NamespaceFinalizersRemaining")


def end_of(scene: Scene, kube: Client) -> None:
    def gone() -> bool:
        try:
            kube.get(Namespace, NAMESPACE)
        except ApiError as error:
            return error.status.code == 404
        return False

    scene.until(gone, "gone")
