"""Scenes of clients: load through the Service, training jobs, roles, a rolling upgrade under all of them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod, ServiceAccount

from tests.e2e.cluster_client import EndToEndError
from tests.e2e.data_scenes import SAMPLES, MeshDataset
from tests.e2e.scaling_scenes import kubectl
from tests.e2e.stage import MESH_PODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.stage import Stage

DATASET = {"shardmesh.io/dataset": "photos"}
STEPS_PAUSE = 2.0
POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::samples/*"},
        {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::samples"},
    ],
}


def load(stage: Stage) -> None:
    """Clients that read and write until the end; first undisturbed."""
    with stage.step("a pod reads and writes through the Service"):
        stage.start_load(stage.keys())
    with stage.step("the same for 10 s, undisturbed") as told:
        time.sleep(10)
        stage.tell_load(told)


def train(stage: Stage, of: str = "", keys: Sequence[dict[str, Any]] = ()) -> str:
    """A dataset and an epoch of it; return the epoch's hash. `of`: words for the mesh; `keys`: the
    environment of a client, if it is not that of a mesh on http."""
    cluster = stage.cluster
    with stage.step(f"samples and a MeshDataset of them{of}"):
        cluster.run_script("samples", "samples_pod.py", [str(SAMPLES)], env=keys or stage.keys())
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
    with stage.step(f"a training pod, with no more than its label, an epoch{of}") as told:
        cluster.run_script("train", "training_pod.py", ["0"], labels=DATASET)
        found = cluster.result("train")
        told["samples"], told["first batch"] = found["samples"], f"{found['first']:.2f} s"
    if found["samples"] != SAMPLES:
        raise EndToEndError(f"the epoch had {found['samples']} of {SAMPLES} samples")
    return str(found["sha256"])


def upgrade(stage: Stage, epoch: str) -> None:
    """Another image for all daemons while a training job reads the epoch of this hash."""
    cluster = stage.cluster
    with stage.step("daemons rolled to another image, one by one") as told:
        begin_epoch(stage, "train-on")
        cluster.change(image=stage.next_image)
        stage.until_settled()
        stage.tell_load(told)
    finish_epoch(stage, "train-on", epoch)


def begin_epoch(stage: Stage, name: str, pause: float = STEPS_PAUSE) -> None:
    """Start a training job that waits for `pause` seconds after each of its 20 steps; it runs then."""
    cluster = stage.cluster
    cluster.run_script(name, "training_pod.py", [str(pause)], labels=DATASET)
    cluster.until(lambda: cluster.kube.get(Pod, name).status.phase == "Running", "it trains")


def finish_epoch(stage: Stage, name: str, epoch: str, of: str = "") -> None:
    """Wait for the end of a training job. Raises EndToEndError unless its epoch has this hash."""
    with stage.step(f"the epoch that was under way, to its end{of}") as told:
        found = stage.cluster.result(name)
        told["longest wait"] = f"{found['longest']:.2f} s"
        told["equal"] = found["sha256"] == epoch
    if found["sha256"] != epoch:
        raise EndToEndError("the epoch that was under way had other batches")


def forget_training(stage: Stage, *pods: str) -> None:
    """Delete the dataset and the pods of `train` and `begin_epoch`."""
    cluster = stage.cluster
    for name in ("samples", "train", *pods):
        cluster.delete_pod(name)
    cluster.kube.delete(MeshDataset, "photos")
    cluster.until(lambda: not list(cluster.kube.list(MeshDataset)), "the dataset is gone")


def assume_role(stage: Stage) -> None:
    """A pod with an annotation exchanges the token that its kubelet projects for keys of a role."""
    cluster = stage.cluster
    with stage.step("a role of the mesh for a service account") as told:
        cluster.change(auth={"webIdentity": {}})
        stage.until_settled()
        cluster.until(lambda: "kubernetes" in admin(stage, "idp ls"), "the issuer is registered")
        admin(stage, "policy put read-samples /dev/stdin", given=json.dumps(POLICY))
        subject = f"system:serviceaccount:{cluster.namespace}:trainer"
        admin(stage, f"role add trainer --idp kubernetes --policy read-samples --claim sub={subject}")
        cluster.kube.create(ServiceAccount(metadata=ObjectMeta(name="trainer", namespace=cluster.namespace)))
        stage.tell_load(told)
    for account, expected in (("trainer", True), ("default", False)):
        with stage.step(f"a pod of the account {account} uses the role") as told:
            name = f"role-{account}"
            annotations = {"shardmesh.io/role": "trainer"}
            cluster.run_script(name, "role_pod.py", labels=DATASET, annotations=annotations, account=account)
            if not expected:
                told["refused"] = is_refused(stage, name)
                continue
            found = cluster.result(name)
            told |= found
            allowed = {key for key, value in found.items() if value is True}
            reads = {"sdk reads"} | ({"boto3 reads", "boto3 lists"} if "boto3" not in found else set())
            if allowed != reads:
                raise EndToEndError(f"the role allowed {sorted(allowed)}, not {sorted(reads)}")


def is_refused(stage: Stage, name: str) -> bool:
    """Return True once a pod has ended without being allowed anything. Raises EndToEndError otherwise. boto3
    gets no keys then, and the pod fails; the SDK has each request refused."""
    cluster = stage.cluster

    def ended() -> bool:
        return cluster.kube.get(Pod, name).status.phase in ("Failed", "Succeeded")

    cluster.until(ended, f"pod {name} ended")
    said = "".join(cluster.kube.log(name))
    refused = "AccessDenied" in said
    if cluster.kube.get(Pod, name).status.phase == "Succeeded":
        found = cluster.printed(name)[-1]
        refused = not any(value is True for key, value in found.items() if key.startswith("sdk "))
    if not refused:
        raise EndToEndError(f"pod {name} was not refused: {said[-2000:]}")
    return True


def admin(stage: Stage, arguments: str, given: str = "") -> str:
    """Run `meshd admin` in a daemon's pod, as root; return what it printed."""
    pod = stage.cluster.ready_pods(MESH_PODS)[0].metadata.name
    where = f"exec -i {pod} --namespace {stage.cluster.namespace} -c meshd"
    return kubectl(stage, f"{where} -- meshd admin {arguments}", given=given)
