"""Scenes of the release: `helm install` to `helm uninstall`; a mesh of the chart's values, on https."""

from __future__ import annotations

import time
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from lightkube import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import StatefulSet
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, PersistentVolumeClaim, Pod, Secret, Service
from lightkube.resources.networking_v1 import NetworkPolicy

from tests.e2e import client_scenes
from tests.e2e.cluster_client import EndToEndError
from tests.e2e.data_scenes import MeshDataset
from tests.e2e.rights import granted
from tests.e2e.stage import DAEMONS
from tests.kubernetes.scenes import MeshCluster, MeshNode
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.stage import Stage

PodDisruptionBudget: Any = create_namespaced_resource(
    "policy", "v1beta1", "PodDisruptionBudget", "poddisruptionbudgets"
)
KINDS = (
    *(MeshCluster, MeshNode, StatefulSet, Pod, Service, ConfigMap, Secret, Lease),
    *(PersistentVolumeClaim, PodDisruptionBudget, NetworkPolicy),
)


def install(stage: Stage) -> None:
    """The chart with its defaults, and a MeshCluster of three."""
    cluster = stage.cluster
    cluster.create_namespace()
    with stage.step("helm install until the operator is ready"):
        stage.helm("install")
        stage.until_operator()
    stage.granted = granted(cluster)
    spec = {"image": stage.image, "nodePools": [stage.pool()], "copies": 2, "s3": stage.s3}
    document = {"metadata": {"name": "mesh", "namespace": cluster.namespace}, "spec": spec}
    with stage.step(f"a MeshCluster of {DAEMONS} until it is settled"):
        cluster.kube.create(MeshCluster(**document))
        stage.until_settled()


def reinstall(stage: Stage) -> None:
    """Daemons go on without the release; the next one continues with them."""
    cluster = stage.cluster
    with stage.step("helm uninstall; clients for 10 s") as told:
        stage.helm("uninstall")
        time.sleep(10)
        stage.tell_load(told)
    with stage.step("helm install again, until the operator works on the mesh") as told:
        stage.helm("install")
        stage.until_operator()
        generation = cluster.change(update={"paused": False})
        cluster.until(lambda: cluster.mesh()["status"].get("observedGeneration") == generation, "it is seen")
        stage.tell_load(told)


def remove(stage: Stage) -> None:
    """All of it is deleted, in the documented order."""
    cluster = stage.cluster
    with stage.step("the MeshCluster is deleted, helm uninstall, the namespace is deleted"):
        cluster.delete_pod("load")
        cluster.kube.delete(MeshDataset, "photos")
        cluster.until(lambda: not list(cluster.kube.list(MeshDataset)), "the dataset is gone")
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        stage.helm("uninstall")
        cluster.delete_namespace()


def mesh_of_values(stage: Stage) -> None:
    """A mesh made by the chart's own values, on https: installed, upgraded while a job trains, deleted with
    its data."""
    cluster = stage.cluster
    cluster.create_namespace()
    create_certificate(stage)
    kept = names_of_all(stage)
    pool = stage.pool()
    pool["tiers"] = [tier | {"hostPath": f"{tier['hostPath']}-tls"} for tier in pool["tiers"]]
    tls = {"s3": stage.s3 | {"tls": {"secretRef": {"name": "mesh-tls"}}}}
    spec = {"nodePools": [pool], "copies": 2, "deletionPolicy": "Delete"} | tls
    with stage.step("helm install with the mesh in its values, on https, until it is settled"):
        stage.helm("install", cluster={"create": True, "name": "mesh", "spec": spec})
        stage.until_operator()
        stage.until_settled()
    authority = {"secretKeyRef": {"name": "mesh-tls", "key": "ca.crt"}}
    keys = [*stage.keys("https"), {"name": "E2E_AUTHORITY", "valueFrom": authority}]
    with stage.step("a pod reads and writes through the Service, on https, for 10 s") as told:
        stage.start_load(keys)
        time.sleep(10)
        stage.tell_load(told)
    epoch = client_scenes.train(stage, ", on https", keys)
    with stage.step("helm upgrade to another image under a training job, until all daemons have it") as told:
        client_scenes.begin_epoch(stage, "train-on")
        tag = stage.next_image.rpartition(":")[2]
        daemon = {"image": stage.values["daemon"]["image"] | {"tag": tag}}
        stage.helm("upgrade", daemon=daemon)
        cluster.until(lambda: cluster.mesh()["spec"]["image"] == stage.next_image, "the spec has the image")
        stage.until_settled()
        stage.tell_load(told)
    client_scenes.finish_epoch(stage, "train-on", epoch, ", on https")
    with stage.step(
        "the MeshCluster is deleted with its data (deletionPolicy: Delete), helm uninstall"
    ) as told:
        cluster.delete_pod("load")
        client_scenes.forget_training(stage, "train-on")
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        stage.helm("uninstall")
        cluster.until(lambda: names_of_all(stage) <= kept, "all is gone", 90)
        told["left"] = ", ".join(sorted(names_of_all(stage) - kept)) or "nothing"
    cluster.delete_namespace()


def create_certificate(stage: Stage, days: int = 30, names: Sequence[str] = ()) -> None:
    """Create or replace the Secret `mesh-tls`, as cert-manager would: a certificate of `days`, with its
    authority; `names`: others than the mesh's.

    The authority is `tls/ca.pem` in the stage's place, and a new one each time.
    """
    authority = Authority(stage.place / "tls")
    pair = authority.issue(names=names or server_names(stage.cluster.namespace), days=days)
    files = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.cert}
    data = {name: b64encode(path.read_bytes()).decode() for name, path in files.items()}
    metadata = {"name": "mesh-tls", "namespace": stage.cluster.namespace}
    secret = Secret.from_dict(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "kubernetes.io/tls",
            "data": data,
        }
    )
    stage.cluster.kube.apply(secret, field_manager="mesh-e2e")


def server_names(namespace: str) -> tuple[str, str]:
    """Return the names of the mesh's daemons: the Service's, and each one's own."""
    return f"mesh-s3.{namespace}.svc", f"*.mesh-nodes.{namespace}.svc"


def names_of_all(stage: Stage) -> set[str]:
    """Return KIND/NAME of everything in the namespace that a mesh or the release could leave."""
    found = set()
    for kind in KINDS:
        try:
            found |= {f"{kind.__name__}/{each.metadata.name}" for each in stage.cluster.kube.list(kind)}
        except ApiError as error:
            if error.status.code != 404:
                raise EndToEndError(f"{kind.__name__}: {error}") from error
    return {each for each in found if "-token-" not in each}  # Kubernetes' own, of service accounts
