"""Scenes of clients: load through the Service, training jobs, roles, a rolling upgrade under all of them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod, ServiceAccount

from tests.e2e.cluster_client import EndToEndError
from tests.e2e.data_scenes import SAMPLES, MeshDataset
from tests.e2e.scaling_scenes import kubectl
from tests.e2e.stage import MESH_PODS

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

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
            labels = {"shardmesh.io/dataset": "photos"}
            annotations = {"shardmesh.io/role": "trainer"}
            cluster.run_script(name, "role_pod.py", labels=labels, annotations=annotations, account=account)
            if not expected:
                cluster.until(
                    lambda: cluster.kube.get(Pod, "role-default").status.phase == "Failed", "refused"
                )
                told["refused"] = "AccessDenied" in "".join(cluster.kube.log(name))
                if not told["refused"]:
                    raise EndToEndError(f"not AccessDenied: {''.join(cluster.kube.log(name))[-2000:]}")
                continue
            found = cluster.result(name)
            told |= found
            allowed = {key for key, value in found.items() if value is True}
            reads = {"sdk reads"} | ({"boto3 reads", "boto3 lists"} if "boto3" not in found else set())
            if allowed != reads:
                raise EndToEndError(f"the role allowed {sorted(allowed)}, not {sorted(reads)}")


def admin(stage: Stage, arguments: str, given: str = "") -> str:
    """Run `meshd admin` in a daemon's pod, as root; return what it printed."""
    pod = stage.cluster.ready_pods(MESH_PODS)[0].metadata.name
    where = f"exec -i {pod} --namespace {stage.cluster.namespace} -c meshd"
    return kubectl(stage, f"{where} -- meshd admin {arguments}", given=given)
