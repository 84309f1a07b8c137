"""Scenes of clients: load through the Service, a training job, a rolling upgrade under both."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Pod

from tests.e2e.cluster_client import EndToEndError

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

SAMPLES = 400
MeshDataset: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshDataset", "meshdatasets")


def load(stage: Stage) -> None:
    """Clients that read and write until the end; first undisturbed."""
    with stage.step("a pod reads and writes through the Service"):
        stage.start_load(stage.keys())
    with stage.step("the same for 10 s, undisturbed") as told:
        time.sleep(10)
        stage.tell_load(told)


def train(stage: Stage) -> str:
    """A dataset and an epoch of it; return the epoch's hash."""
    cluster = stage.cluster
    with stage.step("samples and a MeshDataset of them"):
        cluster.run_script("samples", "samples_pod.py", [str(SAMPLES)], env=stage.keys())
        cluster.result("samples")
        source = {"clusterRef": "mesh", "source": {"uri": "mesh://samples/"}}
        metadata = {"name": "photos", "namespace": cluster.namespace}
        cluster.kube.create(MeshDataset(metadata=metadata, spec=source))
        cluster.until(
            lambda: (
                (cluster.kube.get(MeshDataset, "photos").to_dict().get("status") or {}).get("phase")
                == "Ready"
            ),
            "the dataset is ready",
        )
    with stage.step("a training pod, with no more than its label, an epoch") as told:
        cluster.run_script("train", "training_pod.py", ["0"], labels={"shardmesh.io/dataset": "photos"})
        found = cluster.result("train")
        told["samples"], told["first batch"] = found["samples"], f"{found['first']:.2f} s"
    if found["samples"] != SAMPLES:
        raise EndToEndError(f"the epoch had {found['samples']} of {SAMPLES} samples")
    return str(found["sha256"])


def upgrade(stage: Stage, epoch: str) -> None:
    """Another image for all daemons while a training job reads the epoch of this hash."""
    cluster = stage.cluster
    with stage.step("daemons rolled to another image, one by one") as told:
        labels = {"shardmesh.io/dataset": "photos"}
        cluster.run_script("train-on", "training_pod.py", ["2"], labels=labels)
        cluster.until(lambda: cluster.kube.get(Pod, "train-on").status.phase == "Running", "it trains")
        cluster.change(image=stage.next_image)
        stage.until_settled()
        stage.tell_load(told)
    with stage.step("the epoch that was under way, to its end") as told:
        found = cluster.result("train-on")
        told["longest wait"] = f"{found['longest']:.2f} s"
        told["equal"] = found["sha256"] == epoch
    if found["sha256"] != epoch:
        raise EndToEndError("the epoch during the upgrade had other batches")
