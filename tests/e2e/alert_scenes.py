"""Scenes of a mesh of which nearly everything fails, in a namespace of its own, until the alerts about it
fire, their `for:` left out."""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Node, Pod, Service
from lightkube.resources.rbac_authorization_v1 import ClusterRole
from lightkube.types import PatchType

import meshsdk as mesh
from meshsdk.errors import MeshError
from tests.e2e.alert_watch import until_fire
from tests.e2e.cluster_client import EndToEndError, RealCluster, host_port
from tests.e2e.daemon_alert_scenes import EXPECTED as OF_DAEMON_SCENES
from tests.e2e.daemon_alert_scenes import (
    MEMORY,
    ask_for_too_much,
    fill_memory,
    lose_coordinator,
    refuse_certificates,
    shift_clock,
    stop_movement,
    stop_origin,
)
from tests.e2e.release_scenes import create_certificate
from tests.e2e.stage import MESH_PODS, Stage
from tests.e2e.storage_scenes import on_node
from tests.kubernetes.scenes import MeshCluster
from tests.monitoring.client_failures import ClientFailures, crowd, read_late
from tests.monitoring.node_work import work
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OF_CLIENTS = {"TrainingStarves", "UserOpsFail", "BadSamples", "JobsFail", "SlowReads"}
OF_DATA = {"CorruptData", "DamagedData"}
OF_DAEMONS = {"ProcessesRestart", "ClientsRefused", "AuditLost"}
OF_CERTIFICATES = {"CertificateExpires", "CertificateEnds"}
EXPECTED = OF_CLIENTS | OF_DATA | OF_DAEMONS | OF_CERTIFICATES | OF_DAEMON_SCENES | {"OperatorFails"}
"""What these scenes bring about, without `Shardmesh`."""
STORES = 2
KILLS = 6
BODY = bytes(range(256)) * 400
# The worker-0 of one container, found by its cgroup: other daemons of the machine have one, too.
KILL_WORKER = """for p in /proc/[0-9]*; do
  if grep -q {container} $p/cgroup && grep -qx worker-0 $p/comm; then kill -9 ${{p#/proc/}}; fi
done 2>/dev/null; true"""
# 0x00 to 0xff, four hundred times: the byte after the first 0x80 0x81 0x82 0x83 becomes 0.
FLIP = """export LC_ALL=C; for f in $(grep -rlaP '\\x80\\x81\\x82\\x83' {folder} --include=*.tar); do
  at=$(grep -obUaP '\\x80\\x81\\x82\\x83' $f | head -n 1 | cut -d: -f1)
  printf '\\0' | dd of=$f bs=1 seek=$((at + 4)) conv=notrunc 2>/dev/null && echo $f
done; sync"""


def sick_mesh(stage: Stage) -> None:
    """Another mesh, of which nearly everything fails, until the alerts about it fire."""
    first = stage.cluster
    cluster = RealCluster(first.kubeconfig, namespace_of(stage), first.image)
    sick = Stage(stage.options, cluster, place_of(stage), stage.timeline)
    sick.prometheus = stage.prometheus
    folder = f"{stage.options.host_path}-sick"
    with stage.step("a mesh of one copy, one of its daemons without an audit log, until it is settled"):
        _forget(sick, folder)
        cluster.create_namespace()
        create_certificate(sick, days=1)
        cluster.kube.create(_mesh(sick, folder))
        sick.until_settled(STORES + 1)
    _fail_clients(sick)
    _flip_byte(sick, folder)
    _fail_daemons(sick)
    lose_coordinator(sick)
    fill_memory(sick)
    stop_origin(stage, sick)
    ask_for_too_much(sick)
    shift_clock(sick, folder)
    _end_certificate(sick)
    refuse_certificates(sick, STORES + 1)
    _take_rights(sick)
    stop_movement(sick, STORES)
    with stage.step("that mesh is deleted, and its namespace"):
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        cluster.delete_namespace()
        _forget(sick, folder)
    stage.figures += sick.figures


def namespace_of(stage: Stage) -> str:
    """Return where that mesh is."""
    return f"{stage.cluster.namespace}-sick"


def place_of(stage: Stage) -> Path:
    """Return the folder of its stage."""
    return stage.place / "sick"


def _forget(sick: Stage, folder: str) -> None:
    """Remove the mesh's folders of all nodes, which outlive it."""
    for each in sick.cluster.kube.list(Node):
        on_node(sick, each.metadata.name, f"rm -rf {folder}")


def _mesh(sick: Stage, folder: str) -> MeshCluster:
    stores = sick.pool(STORES)
    stores["tiers"] = [tier | {"hostPath": folder} for tier in stores["tiers"]]
    crowded = sick.pool(1) | {"name": "c", "roles": ["compute"], "tiers": []}
    crowded["resources"] = {"limits": {"memory": MEMORY}} | crowded["resources"]
    crowded["extraArgs"] = ["--audit-log", "/dev/full", "--max-connections", "10"]
    spec = {"image": sick.image, "nodePools": [stores, crowded], "copies": 1, "deletionPolicy": "Delete"}
    metadata = {"name": "mesh", "namespace": sick.cluster.namespace}
    return MeshCluster(metadata=metadata, spec=spec)


def _fail_clients(sick: Stage) -> None:
    keys = tuple(sick.root_keys().values())
    address = sick.cluster.kube.get(Service, "mesh-s3").spec.clusterIP
    endpoint = f"http://{host_port(address, 9000)}"
    with sick.step("clients that fail in five ways, until five alerts fire") as told:
        work(endpoint, *keys)
        with mesh.connect(endpoint, access_key=keys[0], secret_key=keys[1]) as client:
            failures, wire = ClientFailures(client), Wire(endpoint, keys[0], keys[1])
            client.put("samples", "body", BODY)

            def fail() -> None:
                failures.starve()
                failures.crash()
                failures.read_bad_samples()
                failures.fail_job()
                read_late(wire)

            until_fire(sick, OF_CLIENTS, told, fail)


def _flip_byte(sick: Stage, folder: str) -> None:
    """Change a byte of an object with one copy; then read it."""
    keys = tuple(sick.root_keys().values())
    with sick.step("a byte of an object's only copy is changed on the disk, until two alerts fire") as told:
        changed = [
            on_node(sick, pod.spec.nodeName, FLIP.format(folder=folder)).split()
            for pod in sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "s"})
        ]
        if not any(changed):
            raise EndToEndError(f"the object is in no file of {folder}")
        address = sick.cluster.kube.get(Service, "mesh-s3").spec.clusterIP
        endpoint = f"http://{host_port(address, 9000)}"
        with mesh.connect(endpoint, access_key=keys[0], secret_key=keys[1]) as client:

            def read() -> None:
                with suppress(MeshError):
                    if client.get("samples", "body") != BODY:
                        raise EndToEndError("a damaged object was served")

            until_fire(sick, OF_DATA, told, read)


def _fail_daemons(sick: Stage) -> None:
    """A worker is killed again and again; a daemon has more clients than it may."""
    cluster, keys = sick.cluster, tuple(sick.root_keys().values())
    with sick.step("a worker is killed six times, and a daemon is crowded, until three alerts fire") as told:
        (crowded,) = cluster.pods(MESH_PODS | {"shardmesh.io/pool": "c"})
        victim = cluster.pods(MESH_PODS | {"shardmesh.io/pool": "s"})[0]
        container = victim.status.containerStatuses[0].containerID.rpartition("/")[2]
        kills = iter(range(KILLS))

        def fail() -> None:
            if next(kills, None) is not None:
                on_node(sick, victim.spec.nodeName, KILL_WORKER.format(container=container))
            with closing(Wire(f"http://{host_port(crowded.status.podIP, 9000)}", keys[0], keys[1])) as wire:
                crowd(wire, "samples")

        until_fire(sick, OF_DAEMONS, told, fail)
        told["containers restarted"] = sum(
            each.restartCount
            for pod in cluster.pods(MESH_PODS)
            for each in cluster.kube.get(Pod, pod.metadata.name).status.containerStatuses
        )


def _end_certificate(sick: Stage) -> None:
    with sick.step("the mesh is given a certificate of one day, until two alerts fire") as told:
        sick.cluster.change(s3={"tls": {"secretRef": {"name": "mesh-tls"}}})
        sick.until_settled(STORES + 1)
        until_fire(sick, OF_CERTIFICATES, told)


def _take_rights(sick: Stage) -> None:
    """The operator may not change Services any more, and is asked to."""
    cluster, numbers = sick.cluster, iter(range(10**6))
    with (
        sick.step("the operator loses its rights to Services, until an alert fires") as told,
        _fewer_rights(sick),
    ):

        def change() -> None:
            cluster.change(s3={"serviceAnnotations": {"example.com/number": str(next(numbers))}})

        until_fire(sick, {"OperatorFails"}, told, change)
    with sick.step("it has them again, until the mesh is settled"):
        sick.until_settled(STORES + 1)


@contextmanager
def _fewer_rights(sick: Stage) -> Iterator[None]:
    kube = sick.cluster.kube
    name = next(
        each.metadata.name
        for each in kube.list(ClusterRole)
        if each.metadata.name.endswith("-operator") and "shardmesh" in each.metadata.name
    )
    whole = kube.get(ClusterRole, name).to_dict()["rules"]
    fewer = [left for rule in whole if (left := _without(rule, "services"))["verbs"]]
    kube.patch(ClusterRole, name, {"rules": fewer}, patch_type=PatchType.MERGE)
    try:
        yield
    finally:
        kube.patch(ClusterRole, name, {"rules": whole}, patch_type=PatchType.MERGE)


def _without(rule: dict[str, Any], resource: str) -> dict[str, Any]:
    """Return a rule that still lets them be read."""
    if resource not in rule.get("resources", ()):
        return rule
    return rule | {"verbs": [verb for verb in rule["verbs"] if verb in ("get", "list", "watch")]}
