"""Scenes of daemons in the mesh of `alert_scenes`: no coordinator, no memory, a wrong clock, an origin that
refuses, too many rows, certificates of other names, data that cannot
move."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

from lightkube.resources.apps_v1 import StatefulSet
from lightkube.resources.core_v1 import Node, Service
from lightkube.types import PatchType

from meshd.util.clock import CLOCK_SHIFT_ENV
from meshwire.origin import ANONYMOUS
from tests.e2e.alert_watch import until_fire, until_silent
from tests.e2e.cluster_client import EndToEndError, host_port
from tests.e2e.release_scenes import create_certificate, server_names
from tests.e2e.stage import MESH_PODS, ROOT_KEYS
from tests.e2e.storage_scenes import on_node
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

EXPECTED = {
    *("ProcessesMissing", "MemoryShort", "ClockDrifts", "ClocksDiffer", "WriteBackStuck"),
    *("TransformsQueue", "BatchesRefused", "MovementStuck", "CertificateRefused"),
}
"""What these scenes bring about, without `Shardmesh`."""
LEFT = 0.03  # of the memory: the alert fires from 0.05 on
MEMORY = "768Mi"
AHEAD = 420  # seconds
# A process of one container, found by its cgroup: other daemons of the machine have one, too.
KILL_AGAIN = """for i in $(seq 40); do for p in /proc/[0-9]*; do
  if grep -qx {process} $p/comm && grep -q {container} $p/cgroup; then kill -9 ${{p#/proc/}}; fi
done; sleep 0.2; done 2>/dev/null; true"""
# Shared memory counts for the cgroup of the process that writes it.
BALLOON = """for folder in $(find /sys/fs/cgroup/memory -type d -name '*{container}*'); do
  echo $$ > $folder/cgroup.procs; done
head -c {size} /dev/zero > /var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/shm/balloon"""
DEFLATE = "rm -f /var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/shm/balloon"
CLOCK = "clock-of-a-test"
SHIFT = "printf '{octal}' | dd of={folder}/{pod}/" + CLOCK + " conv=notrunc status=none"


def container_of(pod: Any) -> str:
    """Return the id of a pod's container."""
    return str(pod.status.containerStatuses[0].containerID.rpartition("/")[2])


def lose_coordinator(sick: Stage) -> None:
    """The coordinator of the daemon that only computes is killed as soon as it runs."""
    with sick.step("a coordinator is killed again and again, until an alert fires, and ends") as told:
        (victim,) = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "c"})
        script = KILL_AGAIN.format(container=container_of(victim), process="coordinator-0")
        until_fire(sick, {"ProcessesMissing"}, told, lambda: on_node(sick, victim.spec.nodeName, script))
        until_silent(sick, {"ProcessesMissing"}, told)


def fill_memory(sick: Stage) -> None:
    """Another program fills nearly all of the memory that a daemon may use."""
    (victim,) = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "c"})
    instance = f'{{instance="{sick.cluster.namespace}/{victim.metadata.name}"}}'
    free, whole = (
        float(sick.prometheus.query(f"{name}{instance}")[0]["value"][1])
        for name in ("meshd_memory_free_bytes", "meshd_memory_bytes")
    )
    words = {"container": container_of(victim), "uid": victim.metadata.uid}
    with sick.step(f"a daemon has {LEFT:.0%} of its memory left, until an alert fires, and ends") as told:
        on_node(sick, victim.spec.nodeName, BALLOON.format(size=int(free - LEFT * whole), **words))
        until_fire(sick, {"MemoryShort"}, told)
        on_node(sick, victim.spec.nodeName, DEFLATE.format(**words))
        until_silent(sick, {"MemoryShort"}, told)


def stop_origin(first: Stage, sick: Stage) -> None:
    """The origin of a bucket, a bucket of the first mesh that all may write to, is closed to all."""
    wire, numbers = _wire(sick), count()
    statement: dict[str, Any] = {"Effect": "Allow", "Principal": "*", "Action": "s3:*"}
    statement |= {"Resource": ["arn:aws:s3:::back", "arn:aws:s3:::back/*"]}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]}).encode()
    far = _wire(first)
    far.call("PUT", "/back")
    far.call("PUT", "/back?policy", policy)
    document = {"url": "s3://back/", "endpoint": far.endpoint, "credentials": ANONYMOUS, "write": "back"}
    with sick.step("an origin accepts no writes any more, until an alert fires") as told:
        made = wire.call("PUT", "/-/buckets/back", json.dumps(document).encode())
        if made.status != 200:
            raise EndToEndError(f"no bucket with an origin: {made}")
        far.call("DELETE", "/back?policy")
        until_fire(sick, {"WriteBackStuck"}, told, lambda: wire.call("PUT", f"/back/{next(numbers)}", b"1"))
    with sick.step("it accepts them again, until the alert ends") as told:
        far.call("PUT", "/back?policy", policy)
        until_silent(sick, {"WriteBackStuck"}, told)


def ask_for_too_much(sick: Stage) -> None:
    with sick.step("jobs ask for more rows than a daemon may build, until two alerts fire") as told:
        sick.cluster.run_script("queue", "queue_pod.py", env=sick.keys())
        until_fire(sick, {"TransformsQueue", "BatchesRefused"}, told)
    with sick.step("they end, and so do the daemons, until one of the alerts does") as told:
        sick.cluster.delete_pod("queue")
        for pod in sick.cluster.pods(MESH_PODS):  # they would go on with the rows for many minutes
            sick.cluster.delete_pod_at_once(pod.metadata.name)
        sick.until_settled(len(sick.cluster.pods(MESH_PODS)))
        until_silent(sick, {"TransformsQueue"}, told)


def shift_clock(sick: Stage, folder: str) -> None:
    """Both stores read their clock's error from a file; one of them is wrong then."""
    pods = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "s"})
    with sick.step("stores whose clocks can be wrong, until the mesh is settled"):
        for pod in pods:
            _set_clock(sick, pod, folder, 0)
        _set_environment(sick, {"name": CLOCK_SHIFT_ENV, "value": f"/var/lib/meshd/disk/{CLOCK}"})
        for pod in pods:
            sick.cluster.delete_pod_at_once(pod.metadata.name)
            sick.until_settled(len(pods) + 1)
    victim = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "s"})[0]
    address = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "c"})[0].status.podIP
    wire, numbers = _wire(sick, address), count()
    with sick.step("one is seven minutes ahead, until two alerts fire, and end") as told:
        _set_clock(sick, victim, folder, AHEAD)
        names = {"ClockDrifts", "ClocksDiffer"}
        until_fire(sick, names, told, lambda: wire.call("PUT", f"/samples/clock-{next(numbers)}", b"1"))
        _set_clock(sick, victim, folder, 0)
        until_silent(sick, names, told)
    _set_environment(sick, {"name": CLOCK_SHIFT_ENV, "$patch": "delete"})  # of pods to come


def _set_environment(sick: Stage, variable: dict[str, str]) -> None:
    container = {"name": "meshd", "env": [variable]}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    sick.cluster.kube.patch(StatefulSet, "mesh-s", template, patch_type=PatchType.STRATEGIC)


def _set_clock(sick: Stage, pod: Any, folder: str, seconds: int) -> None:
    value = (seconds * 10**9).to_bytes(8, "little")
    octal = "".join(f"\\{byte:03o}" for byte in value)
    words = {"octal": octal, "folder": folder, "pod": pod.metadata.name}
    on_node(sick, pod.spec.nodeName, SHIFT.format(**words))


def refuse_certificates(sick: Stage, stores: int) -> None:
    """The mesh gets a certificate without the daemons' own names, then a good one."""
    service, _ = server_names(sick.cluster.namespace)
    with sick.step("a certificate without the daemons' names, until an alert fires") as told:
        create_certificate(sick, names=[service])
        until_fire(sick, {"CertificateRefused"}, told, patience=300)
    with sick.step("a good one, until the alerts end, and the mesh is settled") as told:
        create_certificate(sick)
        until_silent(sick, {"CertificateRefused", "CertificateExpires", "CertificateEnds"}, told)
        sick.until_settled(stores)


def stop_movement(sick: Stage, stores: int) -> None:
    """A store is added while the only other one with some of the data has no machine."""
    victim = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "s"})[0]
    with sick.step("a store joins, and what it needs is on a cordoned machine, until an alert fires") as told:
        _cordon(sick, victim.spec.nodeName, unschedulable=True)
        sick.cluster.delete_pod_at_once(victim.metadata.name)
        pools = [
            pool | ({"replicas": stores + 1} if pool["name"] == "s" else {})
            for pool in sick.cluster.mesh()["spec"]["nodePools"]
        ]
        sick.cluster.change(nodePools=pools)
        until_fire(sick, {"MovementStuck", "DataUnavailable"}, told)
    with sick.step("it is uncordoned, until the mesh is settled, and the alerts end") as told:
        _cordon(sick, victim.spec.nodeName, unschedulable=False)
        sick.until_settled(stores + 2)
        until_silent(sick, {"MovementStuck", "DataUnavailable"}, told)


def _cordon(sick: Stage, node: str, *, unschedulable: bool) -> None:
    spec = {"spec": {"unschedulable": unschedulable}}
    sick.cluster.kube.patch(Node, node, spec, patch_type=PatchType.MERGE)


def _wire(stage: Stage, address: str = "") -> Wire:
    """Return root's requests to a daemon, or to the Service."""
    keys = stage.root_keys()
    address = address or stage.cluster.kube.get(Service, "mesh-s3").spec.clusterIP
    return Wire(f"http://{host_port(address, 9000)}", keys[ROOT_KEYS[0]], keys[ROOT_KEYS[1]])
