"""Scenes in which the operator is killed in the middle of each kind of its work (`--kill-operator`).

Its pod is deleted without grace, which is SIGKILL; Deployment and kubelet start another one at once, which
has no memory of the work. control_plane_scenes.py kills its container while daemons leave, join and get
another image.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Event

from tests.e2e import data_scenes
from tests.e2e.cluster_client import EndToEndError, RealCluster
from tests.e2e.control_plane_scenes import OPERATOR_PODS
from tests.e2e.release_scenes import names_of_all
from tests.e2e.scaling_scenes import kubectl
from tests.e2e.stage import DAEMONS, MESH_PODS, Stage
from tests.kubernetes.scenes import MeshCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

MOMENTS = (0.3, 0.7, 2.5)
"""Seconds to a kill: from the step's start, then from each next operator that is ready."""
OBJECTS = 50


class OperatorKiller:
    """Kills operators in a thread of its own, at MOMENTS."""

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster, self._failure = cluster, ""
        self.kills = 0
        self._thread = Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last kill and the operator after it. Raises EndToEndError if there was none."""
        self._thread.join(300)
        if self._failure or self.kills < len(MOMENTS):
            raise EndToEndError(f"the operator was killed {self.kills} times only: {self._failure}")

    def _run(self) -> None:
        try:
            for pause in MOMENTS:
                time.sleep(pause)
                for pod in self._cluster.pods(OPERATOR_PODS):
                    self._cluster.delete_pod_at_once(pod.metadata.name)
                self.kills += 1
                self._cluster.until(lambda: self._cluster.ready_pods(OPERATOR_PODS), "another is ready")
        except Exception as error:  # whatever it is, `finish` tells it
            self._failure = repr(error)


@contextmanager
def operator_dies(stage: Stage, name: str) -> Iterator[dict[str, Any]]:
    """A step, in which the operator is killed again and again; then clients must have seen no failure."""
    with stage.step(f"{name}; the operator is killed meanwhile") as told:
        killer = OperatorKiller(stage.cluster)
        killer.start()
        yield told
        killer.finish()
        told["kills"] = killer.kills
        stage.tell_load(told)


def kill_in_each_step(stage: Stage) -> None:
    """Play the scenes of one mesh, and then those of another that comes and goes."""
    bad_image(stage)
    data(stage)
    drain(stage)
    mesh_that_comes_and_goes(stage)


def bad_image(stage: Stage) -> None:
    """An image that no registry has is given to one daemon only, whoever is the operator."""
    cluster = stage.cluster
    bad, good = f"{stage.image}-does-not-exist", cluster.mesh()["spec"]["image"]
    with operator_dies(stage, "an image that does not exist, until an event says so") as told:
        seen = {each.metadata.name for each in cluster.kube.list(Event)}
        cluster.change(image=bad)

        def noticed() -> bool:
            fresh = [each for each in cluster.kube.list(Event) if each.metadata.name not in seen]
            return any(each.reason == "DaemonStuck" for each in fresh)

        cluster.until(noticed, "an event says that a daemon is stuck", 300)
        with_it = [pod for pod in cluster.pods(MESH_PODS) if pod.spec.containers[0].image == bad]
        told["daemons with it"] = len(with_it)
        if len(with_it) != 1:
            raise EndToEndError(f"{len(with_it)} daemons were given the image at once")
    with operator_dies(stage, "the image is taken back, until the mesh is settled"):
        cluster.change(image=good)
        stage.until_settled()


def data(stage: Stage) -> None:
    """Each resource for data is created and deleted."""
    with operator_dies(stage, "a MeshDataset of an S3 source and a MeshLoad") as told:
        data_scenes.create_dataset(stage)
        data_scenes.finish_load(stage, told)
    with operator_dies(stage, "both are deleted, until they are gone"):
        data_scenes.delete_dataset(stage)
    with operator_dies(stage, "a MeshView, until a pod has read all of it") as told:
        data_scenes.create_view(stage)
        data_scenes.await_view(stage)
        data_scenes.read_view(stage, told, "view-of-killed")
    with operator_dies(stage, "the MeshView is deleted, until it is gone"):
        data_scenes.delete_view(stage)


def drain(stage: Stage) -> None:
    """`kubectl drain` returns, and `uncordon` brings the daemon back."""
    node = stage.spare_node()
    if node is None:
        return
    with operator_dies(stage, "kubectl drain, until it returns"):
        kubectl(stage, f"drain {node} --ignore-daemonsets --delete-emptydir-data --timeout=280s")
    with operator_dies(stage, "kubectl uncordon, until the mesh is settled"):
        kubectl(stage, f"uncordon {node}")
        stage.until_settled()


def mesh_that_comes_and_goes(stage: Stage) -> None:
    """Another mesh is installed, deleted with its data kept, installed again, and deleted with its data."""
    first = stage.cluster
    cluster = RealCluster(first.kubeconfig, f"{first.namespace}-killed", first.image)
    second = Stage(stage.options, cluster, stage.place / "killed")
    cluster.create_namespace()
    kept = names_of_all(second)
    pool = second.pool()
    pool["tiers"] = [tier | {"hostPath": f"{tier['hostPath']}-killed"} for tier in pool["tiers"]]
    spec = {"image": stage.image, "nodePools": [pool], "copies": 2}
    document = {"metadata": {"name": "mesh", "namespace": cluster.namespace}, "spec": spec}

    def gone() -> bool:
        return not cluster.mesh() and not cluster.pods(MESH_PODS)

    with operator_dies(stage, "a MeshCluster of three, until it is settled"):
        cluster.kube.create(MeshCluster(**document))
        second.until_settled()
    cluster.run_script("write", "samples_pod.py", [str(OBJECTS)], env=second.keys())
    cluster.result("write")
    with operator_dies(stage, "all three of its pods are deleted at once, until it is settled"):
        for pod in cluster.pods(MESH_PODS):
            cluster.delete_pod_at_once(pod.metadata.name)
        second.until_settled()
    with operator_dies(stage, "it is deleted, its data is kept (Retain), until its pods are gone"):
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(gone, "the mesh is gone")
    with operator_dies(stage, "it is created again, until all objects are read") as told:
        cluster.kube.create(MeshCluster(**document))
        second.until_settled()
        cluster.run_script("read", "samples_pod.py", [str(OBJECTS), "read"], env=second.keys())
        told["objects"] = cluster.result("read")["read"]
    with operator_dies(stage, "it is deleted with its data (Delete), until nothing is left") as told:
        cluster.change(deletionPolicy="Delete")
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(gone, "the mesh is gone")
        ours = {"Pod/write", "Pod/read"}
        cluster.until(lambda: names_of_all(second) - ours <= kept, "all is gone", 120)
        told["left"] = ", ".join(sorted(names_of_all(second) - ours - kept)) or "nothing"
    cluster.delete_namespace()
    if not first.is_settled(DAEMONS):
        raise EndToEndError(f"the first mesh is not settled: {first.describe()}")
