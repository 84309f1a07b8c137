"""Scenes of failures: a pod deleted, a container killed, an image that is not there, a node that is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightkube.resources.core_v1 import Event, Pod

from tests.e2e.cluster_client import EndToEndError
from tests.e2e.stage import DAEMONS, MESH_PODS, run_command

if TYPE_CHECKING:
    from tests.e2e.stage import Stage


def delete_pod(stage: Stage) -> None:
    """One daemon's pod is deleted without grace."""
    cluster = stage.cluster
    with stage.step("a daemon's pod is deleted without grace") as told:
        cluster.delete_pod_at_once(cluster.pods(MESH_PODS)[0].metadata.name)
        stage.until_settled()
        stage.tell_load(told)


def kill_container(stage: Stage) -> None:
    """One daemon's container gets SIGKILL from its machine; the kubelet starts it again."""
    cluster = stage.cluster
    with stage.step("kill -9 of a daemon's container") as told:
        victim = cluster.pods(MESH_PODS)[0]
        name, (status,) = victim.metadata.name, victim.status.containerStatuses
        container = status.containerID.rpartition("/")[2]
        run_command(stage.options.kill, node=victim.spec.nodeName, container=container)

        def restarted() -> bool:
            (now,) = cluster.kube.get(Pod, name).status.containerStatuses
            return bool(now.restartCount > status.restartCount and now.ready)

        cluster.until(restarted, "the kubelet has started it again")
        ended = cluster.kube.get(Pod, name).status.containerStatuses[0].lastState.terminated
        told["exit code"] = ended.exitCode
        if ended.exitCode != 137:
            raise EndToEndError(f"the container ended with {ended.exitCode}, not by SIGKILL")
        stage.until_settled()
        stage.tell_load(told)


def bad_image(stage: Stage) -> None:
    """An image that no registry has: one daemon waits for it, and all serve again when it is taken back."""
    cluster = stage.cluster
    bad, good = f"{stage.image}-does-not-exist", cluster.mesh()["spec"]["image"]
    with stage.step("an image that does not exist, until the mesh says why it does not go on") as told:
        seen = {each.metadata.name for each in cluster.kube.list(Event)}
        cluster.change(image=bad)

        def noticed() -> bool:
            fresh = [each for each in cluster.kube.list(Event) if each.metadata.name not in seen]
            return any(each.reason == "DaemonStuck" for each in fresh)

        cluster.until(noticed, "an event says that a daemon is stuck")
        with_it = [pod for pod in cluster.pods(MESH_PODS) if pod.spec.containers[0].image == bad]
        told["daemons with it"] = len(with_it)
        told["trouble"] = (cluster.mesh()["status"] or {}).get("trouble", "")
        if len(with_it) != 1:
            raise EndToEndError(f"{len(with_it)} daemons were given the image at once")
        stage.tell_load(told)
    with stage.step("the image is taken back, until the mesh is settled") as told:
        cluster.change(image=good)
        stage.until_settled()
        stage.tell_load(told)


def lose_node(stage: Stage, what: str, command: str, back: str) -> None:
    """Run `command` for a node, which is then lost, and `back`, which returns it."""
    node = stage.spare_node()
    if node is None:
        return
    with stage.step(f"node {node}: {what}; clients for 30 s") as told:
        before, began = stage.written(), time.monotonic()
        run_command(command, node=node)
        stage.cluster.until(lambda: not stage.cluster.is_settled(DAEMONS), "the mesh says that one is lost")
        told["noticed after"] = f"{time.monotonic() - began:.0f} s"
        time.sleep(max(0.0, began + 30 - time.monotonic()))
        stage.tell_load(told)
    with stage.step(f"after {what}, all that was acknowledged is read without {node}") as told:
        told["objects"] = stage.read_again(before, f"acknowledged-without-{node}")
        stage.tell_load(told)
    with stage.step(f"after {what}, until the mesh is settled") as told:
        run_command(back, node=node)
        stage.until_settled()
        stage.tell_load(told)
