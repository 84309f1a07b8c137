"""Scenes of the control plane: the API server lost for minutes, the operator killed in the middle of work."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
from lightkube import ApiError
from lightkube.resources.core_v1 import Pod

from tests.e2e.client_scenes import begin_epoch
from tests.e2e.cluster_client import EndToEndError
from tests.e2e.scaling_scenes import fetched_bytes, tell_moved
from tests.e2e.stage import DAEMONS, MESH_PODS, run_command
from tests.kubernetes.scenes import MeshNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.stage import Stage

OUTAGE = 160.0  # of which the alert waits for two minutes
STEPS_PAUSE = 9.0  # a job of 20 steps lasts longer than the outage
MOMENTS = (0.5, 3.0, 1.0)  # seconds: from the change to a kill, from an operator that is ready to the next
OPERATOR_PODS = {"app.kubernetes.io/component": "operator"}


def lose_control_plane(stage: Stage, epoch: str) -> None:
    """Without the API server nothing that runs stops: clients, a training job, and the daemons' leases."""
    cluster = stage.cluster
    restarts = restarts_of_daemons(stage)
    with stage.step(f"the API server is away for {OUTAGE:.0f} s, clients and a training job go on") as told:
        begin_epoch(stage, "train-alone", STEPS_PAUSE)
        time.sleep(2 * STEPS_PAUSE)
        run_command(stage.options.stop_api)
        time.sleep(OUTAGE)
        run_command(stage.options.start_api)
        cluster.until(lambda: api_answers(stage), "the API server answers", 120)
        stage.tell_load(told)
    with stage.step("after it, until the mesh is settled, and another daemon starts") as told:
        stage.until_settled()
        told["containers restarted"] = restarts_of_daemons(stage) - restarts
        found = cluster.result("train-alone")
        told["longest wait of the job"] = f"{found['longest']:.2f} s"
        victim = cluster.pods(MESH_PODS)[0].metadata.name
        cluster.delete_pod_at_once(victim)
        stage.until_settled()
        stage.tell_load(told)
    if told["containers restarted"]:
        raise EndToEndError("daemons ended while the API server was away")
    if found["sha256"] != epoch:
        raise EndToEndError("the epoch without an API server had other batches")


def api_answers(stage: Stage) -> bool:
    """Return whether both API servers answer, that of our definitions, too."""
    with suppress(ApiError, httpx2.HTTPError):
        return bool(list(stage.cluster.kube.list(MeshNode)))
    return False


def has_nodes(stage: Stage, count: int) -> bool:
    """Return whether there are so many MeshNodes."""
    return len(list(stage.cluster.kube.list(MeshNode))) == count


def restarts_of_daemons(stage: Stage) -> int:
    """Return how often containers of daemons were started again."""
    pods = stage.cluster.pods(MESH_PODS)
    return sum(each.restartCount for pod in pods for each in pod.status.containerStatuses or ())


def kill_operator(stage: Stage) -> None:
    """The operator is killed three times each, while daemons leave, join, and get another image."""
    cluster, before = stage.cluster, fetched_bytes(stage)
    for daemons in (DAEMONS - 1, DAEMONS):
        with stage.step(f"{daemons} daemons, and the operator is killed meanwhile") as told:
            with operator_killed(stage, told):
                cluster.change(nodePools=[stage.pool(daemons)])
            stage.until_settled(daemons)
            cluster.until(partial(has_nodes, stage, daemons), f"{daemons} MeshNodes")
            stage.tell_load(told)
            tell_moved(stage, told, before)
        before = fetched_bytes(stage)
    images = {stage.image, stage.next_image}
    present = cluster.mesh()["spec"]["image"]
    with stage.step("daemons rolled to another image, and the operator is killed meanwhile") as told:
        with operator_killed(stage, told):
            cluster.change(image=next(iter(images - {present}), present))
        stage.until_settled()
        stage.tell_load(told)


@contextmanager
def operator_killed(stage: Stage, told: dict[str, Any]) -> Iterator[None]:
    """Begin with a fresh operator; after the block kill it (SIGKILL) at several moments."""
    cluster = stage.cluster
    pod = cluster.pods(OPERATOR_PODS)[0].metadata.name  # the kubelet waits longer after each failure of a pod
    cluster.delete_pod_at_once(pod)
    cluster.until(lambda: cluster.ready_pods(OPERATOR_PODS), "another operator is ready")
    yield
    for kills, pause in enumerate(MOMENTS, 1):
        time.sleep(pause)
        (pod,) = cluster.pods(OPERATOR_PODS)
        (status,) = pod.status.containerStatuses
        container = status.containerID.rpartition("/")[2]
        run_command(stage.options.kill, node=pod.spec.nodeName, container=container)
        name = pod.metadata.name

        def again(name: str = name, kills: int = kills) -> bool:
            (now,) = cluster.kube.get(Pod, name).status.containerStatuses
            return bool(now.restartCount >= kills and now.ready)

        cluster.until(again, "the kubelet has started the operator again")
    told["kills"] = len(MOMENTS)
