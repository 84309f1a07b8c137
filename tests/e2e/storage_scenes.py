"""Scenes of a second mesh of the same name, in its own namespace: on claims of local volumes, one of which
fills; with a daemon whose directory ends with its pod."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node, PersistentVolume, PersistentVolumeClaim
from lightkube.resources.storage_v1 import StorageClass

from tests.e2e.client_scenes import begin_epoch, finish_epoch, forget_training, train
from tests.e2e.cluster_client import EndToEndError, RealCluster
from tests.e2e.stage import DAEMONS, MESH_PODS, Stage, run_command
from tests.kubernetes.scenes import MeshCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

CLASS = "mesh-e2e-local"
FOLDER = "/mnt/mesh-e2e-claims"
MAKE = (
    f"truncate -s 400M {FOLDER}.img && mkfs.ext4 -q -F {FOLDER}.img && mkdir -p {FOLDER} "
    f"&& mount -o loop {FOLDER}.img {FOLDER}"
)
UNMAKE = f"umount -l {FOLDER}; rm -rf {FOLDER} {FOLDER}.img"
FILL = f"head -c 1G /dev/zero > {FOLDER}/another-program; sync"  # ends when the file system is full
ROOM = f"rm {FOLDER}/another-program"
FULL = ("507", "InsufficientStorage")
DISK_FULL = 'ALERTS{alertname="ShardmeshDiskFull", alertstate="firing", at_once="yes"}'


def two_meshes(stage: Stage) -> None:
    """Another mesh beside the first, on volume claims; one of its disks is full for a while."""
    first = stage.cluster
    nodes = [each.metadata.name for each in first.kube.list(Node)]
    cluster = RealCluster(first.kubeconfig, second_namespace(stage), first.image)
    second = Stage(stage.options, cluster, stage.place / "second", stage.timeline)
    with stage.step(
        "a second mesh of the same name, in another namespace, on claims of local volumes"
    ) as told:
        make_volumes(stage, nodes)
        cluster.create_namespace()
        claim = {"storageClass": CLASS, "size": "300Mi"}
        pool = second.pool() | {"tiers": [{"name": "disk", "class": "ssd", "volumeClaim": claim}]}
        spec = {"image": stage.image, "nodePools": [pool], "copies": 2, "deletionPolicy": "Delete"}
        cluster.kube.create(MeshCluster(metadata={"name": "mesh", "namespace": cluster.namespace}, spec=spec))
        second.until_settled()
        stage.tell_load(told)
    with stage.step("clients of the second mesh for 10 s; the first is as it was") as told:
        second.start_load(second.keys())
        time.sleep(10)
        second.tell_load(told)
        if not first.is_settled(DAEMONS):
            raise EndToEndError(f"the first mesh is not settled: {first.describe()}")
    with stage.step("a disk of the second mesh is full, until a write is refused") as told:
        on_node(stage, nodes[0], FILL)
        time.sleep(20)
        second.tell_load(told, allowed=FULL)
        first.until(lambda: told["refused"] or refuses(second, told), "a write is refused")
        if stage.options.prometheus:
            first.until(lambda: stage.prometheus.query(DISK_FULL), "an alert fires")
        stage.tell_load(told_first := dict[str, Any]())
        told |= {f"first mesh: {name}": value for name, value in told_first.items()}
    with stage.step("it has room again, until the second mesh is settled; clients for 10 s") as told:
        on_node(stage, nodes[0], ROOM)
        cluster.until(lambda: accepts(second), "writes are accepted")
        second.until_settled()
        time.sleep(10)
        second.tell_load(told)
    with stage.step("the second mesh is deleted with its claims (deletionPolicy: Delete)") as told:
        cluster.delete_pod("load")
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        cluster.until(lambda: not list(cluster.kube.list(PersistentVolumeClaim)), "its claims are gone", 60)
        cluster.delete_namespace()
        unmake_volumes(stage, nodes)
        stage.tell_load(told)
        if not first.is_settled(DAEMONS):
            raise EndToEndError(f"the first mesh is not settled: {first.describe()}")


def daemons_without_disks(stage: Stage) -> None:
    """Another mesh, in which one daemon only computes, without tiers: its directory (emptyDir) ends with its
    pod, and the next pod begins with an empty one, under a training job."""
    first = stage.cluster
    cluster = RealCluster(first.kubeconfig, f"{first.namespace}-compute", first.image)
    mesh = Stage(stage.options, cluster, stage.place / "compute", stage.timeline)
    of = ", a daemon of which has no disks"
    pools = [mesh.pool(DAEMONS - 1), mesh.pool(1) | {"name": "c", "roles": ["compute"], "tiers": []}]
    pools[0]["tiers"] = [tier | {"hostPath": f"{tier['hostPath']}-compute"} for tier in pools[0]["tiers"]]
    only = MESH_PODS | {"shardmesh.io/pool": "c"}
    with stage.step(f"a mesh in another namespace{of} (emptyDir), until it is settled"):
        cluster.create_namespace()
        spec = {"image": stage.image, "nodePools": pools, "copies": 2}
        document = {"metadata": {"name": "mesh", "namespace": cluster.namespace}, "spec": spec}
        cluster.kube.create(MeshCluster(**document))
        mesh.until_settled()
        mesh.start_load(mesh.keys())
    epoch = train(mesh, of)
    before = {pod.metadata.uid for pod in cluster.pods(MESH_PODS)}
    with stage.step(f"daemons rolled to another image{of}, under a training job") as told:
        begin_epoch(mesh, "train-on")
        cluster.change(image=stage.next_image)
        mesh.until_settled()
        mesh.tell_load(told)
        told["daemons kept"] = len(before & {pod.metadata.uid for pod in cluster.pods(MESH_PODS)})
    finish_epoch(mesh, "train-on", epoch, of)
    with stage.step("its pod is deleted without grace under a training job, until it is settled") as told:
        begin_epoch(mesh, "train-again")
        cluster.delete_pod_at_once(cluster.pods(only)[0].metadata.name)
        mesh.until_settled()
        mesh.tell_load(told)
    finish_epoch(mesh, "train-again", epoch, f"{of}, again")
    with stage.step("the mesh with a daemon without disks is deleted, and its namespace") as told:
        cluster.delete_pod("load")
        forget_training(mesh, "train-on", "train-again")
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        cluster.delete_namespace()
        stage.tell_load(told)
    stage.figures += mesh.figures
    if not first.is_settled(DAEMONS):
        raise EndToEndError(f"the first mesh is not settled: {first.describe()}")


def second_namespace(stage: Stage) -> str:
    """Return where the second mesh is."""
    return f"{stage.cluster.namespace}-two"


def refuses(second: Stage, told: dict[str, Any]) -> bool:
    """Return whether a write was refused within the last seconds; put into `told` what clients saw."""
    second.tell_load(told, allowed=FULL)
    return bool(told["refused"])


def accepts(second: Stage) -> bool:
    """Return whether every client has written within the last seconds, and no write was refused."""
    told: dict[str, Any] = {}
    second.tell_load(told, allowed=FULL)
    kinds = {"writes"} | ({"boto3 writes"} if second.options.client_image else set())
    return not told["refused"] and kinds <= set(told)


def make_volumes(stage: Stage, nodes: Sequence[str]) -> None:
    """A small file system on each node, as a local volume of a class that provides nothing by itself."""
    kube = stage.cluster.kube
    kube.create(
        StorageClass(
            provisioner="kubernetes.io/no-provisioner",
            volumeBindingMode="WaitForFirstConsumer",
            metadata=ObjectMeta(name=CLASS),
        )
    )
    for node in nodes:
        on_node(stage, node, MAKE)
        term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
        spec = {
            "capacity": {"storage": "350Mi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "local": {"path": FOLDER},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
        }
        kube.create(PersistentVolume.from_dict({"metadata": {"name": f"{CLASS}-{node}"}, "spec": spec}))


def unmake_volumes(stage: Stage, nodes: Sequence[str]) -> None:
    """Undo `make_volumes`."""
    for node in nodes:
        stage.cluster.kube.delete(PersistentVolume, f"{CLASS}-{node}")
        on_node(stage, node, UNMAKE)
    stage.cluster.kube.delete(StorageClass, CLASS)


def on_node(stage: Stage, node: str, command: str) -> str:
    """Run a command of the shell on a node, as root; return what it printed. Raises EndToEndError."""
    return run_command(stage.options.on_node, node=node, script=shlex.quote(command))
