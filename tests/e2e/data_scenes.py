"""Scenes of the resources for data: a MeshDataset of an S3 source with a MeshLoad, and a MeshView."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Secret

from tests.e2e.cluster_client import EndToEndError

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

SAMPLES = 400
SHARDS = 4
MeshDataset: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshDataset", "meshdatasets")
MeshLoad: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshLoad", "meshloads")
MeshView: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshView", "meshviews")


def load_from_source(stage: Stage) -> None:
    """A dataset whose source is an S3 service (this mesh's own), and a MeshLoad that fetches all of it."""
    with stage.step("a MeshDataset of an S3 source, whose keys the kubelets deliver, and a MeshLoad") as told:
        create_dataset(stage)
        finish_load(stage, told)
        delete_dataset(stage)
        stage.tell_load(told)


def create_dataset(stage: Stage) -> None:
    """Create the dataset `fetched` of an S3 source with its Secret, and a MeshLoad of it."""
    cluster, namespace = stage.cluster, stage.cluster.namespace
    root = cluster.kube.get(Secret, "mesh-root").to_dict()["data"]
    endpoint = b64encode(f"http://mesh-s3.{namespace}.svc:9000".encode()).decode()
    keys = {name: root[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key")}
    keys |= {"aws_endpoint": endpoint}
    metadata = {"name": "fetched", "namespace": namespace}
    cluster.kube.create(Secret.from_dict({"metadata": metadata, "data": keys}))
    source = {"uri": "s3://samples/", "secretRef": {"name": "fetched"}}
    cluster.kube.create(MeshDataset(metadata=metadata, spec={"clusterRef": "mesh", "source": source}))
    cluster.kube.create(MeshLoad(metadata=metadata, spec={"datasetRef": "fetched", "action": "Load"}))


def finish_load(stage: Stage, told: dict[str, Any]) -> None:
    """Wait until the MeshLoad has all samples; put into `told` how many. Raises EndToEndError."""
    try:
        stage.cluster.until(
            lambda: status(stage, MeshLoad, "fetched").get("phase") in ("Succeeded", "Failed"),
            "the load has ended",
            240,
        )
    except EndToEndError as error:
        raise EndToEndError(f"the load: {status(stage, MeshLoad, 'fetched')}") from error
    found = status(stage, MeshLoad, "fetched")
    told["phase"], told["objects"] = found["phase"], found["objectsDone"]
    told["bytes"] = f"{found['bytesDone']:,}"
    if found["phase"] != "Succeeded" or found["objectsDone"] < SAMPLES:
        raise EndToEndError(f"the load: {found}")


def delete_dataset(stage: Stage) -> None:
    """Delete what `create_dataset` created, and wait until it is gone."""
    kube = stage.cluster.kube
    kube.delete(MeshLoad, "fetched")
    kube.delete(MeshDataset, "fetched")
    stage.cluster.until(lambda: "fetched" not in names_of(stage, MeshDataset), "the dataset is gone")
    kube.delete(Secret, "fetched")


def view(stage: Stage) -> None:
    """A MeshView that packs the samples into shards; a pod reads every sample from it."""
    with stage.step(f"a MeshView: the {SAMPLES} samples as {SHARDS} shards, read by a pod") as told:
        create_view(stage)
        await_view(stage)
        read_view(stage, told, "view")
        stage.tell_load(told)
    with stage.step("the MeshView is deleted, until it is gone") as told:
        delete_view(stage)
        stage.tell_load(told)


def create_view(stage: Stage) -> None:
    """Create the MeshView `packed`."""
    definition = {"count": SAMPLES // SHARDS}  # samples of each
    spec = {"clusterRef": "mesh", "bucket": "samples", "kind": "shards", "definition": definition}
    metadata = {"name": "packed", "namespace": stage.cluster.namespace}
    stage.cluster.kube.create(MeshView(metadata=metadata, spec=spec))


def await_view(stage: Stage) -> None:
    """Wait until the MeshView is ready."""
    try:
        stage.cluster.until(lambda: status(stage, MeshView, "packed").get("ready"), "the view is ready")
    except EndToEndError as error:
        raise EndToEndError(f"the view: {status(stage, MeshView, 'packed')}: {error}") from error


def read_view(stage: Stage, told: dict[str, Any], pod: str) -> None:
    """Read the view in a pod; put into `told` what it has. Raises EndToEndError unless it has all samples."""
    stage.cluster.run_script(pod, "view_pod.py", [str(SAMPLES)], env=stage.keys())
    found = stage.cluster.result(pod)
    stage.cluster.delete_pod(pod)
    told["shards"], told["samples"] = found["shards"], found["samples"]
    if found != {"shards": SHARDS, "samples": SAMPLES, "wrong": 0}:
        raise EndToEndError(f"the view: {found}")


def delete_view(stage: Stage) -> None:
    """Delete the MeshView, and wait until it is gone."""
    stage.cluster.kube.delete(MeshView, "packed")
    stage.cluster.until(lambda: "packed" not in names_of(stage, MeshView), "the view is gone")


def status(stage: Stage, kind: Any, name: str) -> dict[str, Any]:
    """Return the status of a resource, {} before its first."""
    return dict(stage.cluster.kube.get(kind, name).to_dict().get("status") or {})


def names_of(stage: Stage, kind: Any) -> set[str]:
    """Return the names of all resources of a kind."""
    return {each.metadata.name for each in stage.cluster.kube.list(kind)}
