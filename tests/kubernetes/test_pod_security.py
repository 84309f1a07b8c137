"""Every pod that the chart or the operator makes, against Kubernetes' Pod Security Standard `restricted`
(https://kubernetes.io/docs/concepts/security/pod-security-standards/), and the pod of `helm test`, run."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from meshoperator.cluster_model import Cluster
from meshoperator.planners.manifests import cluster_manifests
from meshoperator.resources import MeshClusterSpec, parse
from tests.kubernetes.control_plane import EXAMPLES
from tests.kubernetes.test_chart import MATRIX, documents, rendered
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod.get("volumes") or ():
        for kind in volume.keys() - VOLUMES - {"name"}:
            yield f"volume {kind}"
    own = pod.get("securityContext") or {}
    yield from _context("pod", own)
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind) or ():
            name, context = container["name"], container.get("securityContext") or {}
            yield from _context(name, context)
            if context.get("privileged"):
                yield f"{name}: privileged"
            if context.get("allowPrivilegeEscalation") is not False:
                yield f"{name}: allowPrivilegeEscalation"
            capabilities = context.get("capabilities") or {}
            if "ALL" not in capabilities.get("drop", ()):
                yield f"{name}: capabilities are not dropped"
            if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
                yield f"{name}: capabilities are added"
            if not (context.get("runAsNonRoot", own.get("runAsNonRoot"))):
                yield f"{name}: may run as root"
            profile = (context.get("seccompProfile") or own.get("seccompProfile") or {}).get("type")
            if profile not in ("RuntimeDefault", "Localhost"):
                yield f"{name}: no seccomp profile"
            if context.get("readOnlyRootFilesystem") is not True:  # ours: the standard does not ask for it
                yield f"{name}: root file system is writable"
            if any(port.get("hostPort") for port in container.get("ports") or ()):
                yield f"{name}: hostPort"


def _context(name: str, context: dict[str, Any]) -> Iterator[str]:
    if context.get("runAsUser") == 0:
        yield f"{name}: runAsUser 0"
    if context.get("procMount", "Default") != "Default":
        yield f"{name}: procMount"
    if context.get("sysctls") or context.get("windowsOptions") or context.get("seLinuxOptions"):
        yield f"{name}: sysctls, SELinux or Windows options"


@pytest.mark.parametrize("name", MATRIX)
def test_pods_of_the_chart(name: str) -> None:
    found = [each for each in documents(name) if each["kind"] in ("Pod", "Deployment")]
    assert len(found) == 2
    for each in found:
        pod = each["spec"] if each["kind"] == "Pod" else each["spec"]["template"]["spec"]
        assert list(violations(pod)) == [], each["metadata"]["name"]


def daemons(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = Cluster("mesh", "ns", "uid", parse(MeshClusterSpec, spec))
    every = [
        *cluster_manifests(cluster, settled=True),
        *cluster_manifests(replace(cluster, places=()), settled=False),
    ]
    return [each["spec"]["template"]["spec"] for each in every if each["kind"] == "StatefulSet"]


def test_pods_of_daemons() -> None:
    """A tier that is a folder of the host is what `restricted` forbids, and the container that gives it to
    the daemon; nothing else of ours is."""
    spec = yaml.safe_load((EXAMPLES / "meshcluster.yaml").read_text())["spec"]
    folders = {each for pod in daemons(spec) for each in violations(pod)}
    owner = {"may run as root", "runAsUser 0", "capabilities are added"}
    assert folders == {"volume hostPath", *(f"directory-owner: {each}" for each in owner)}
    kind = yaml.safe_load((EXAMPLES / "values-kind.yaml").read_text())["cluster"]["spec"] | {"image": "i:1"}
    for more in (
        {},
        {"s3": {"tls": {"secretRef": {"name": "t"}}}},
        {"auth": {"webIdentity": {}, "rootSecretRef": {"name": "r"}}},
        {"s3": {"serviceType": "LoadBalancer"}, "metrics": {"serviceMonitor": True}},
    ):
        claims = daemons(kind | more)
        assert claims
        assert [list(violations(pod)) for pod in claims] == [[] for _ in claims], more


def test_the_examples_values_are_taken() -> None:
    found = rendered(yaml.safe_load((EXAMPLES / "values-kind.yaml").read_text()))
    (mesh,) = (each for each in found if each["kind"] == "MeshCluster")
    parse(MeshClusterSpec, mesh["spec"])


def test_what_helm_test_does_works_on_a_daemon() -> None:
    (pod,) = (each for each in documents("mesh") if each["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    assert environment["MESH_ENDPOINT"] == "http://mesh-s3.ns.svc:9000"
    with Daemon.start() as daemon:
        environment |= {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            [*container["command"], *container["args"]],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert "written, read and removed" in done.stdout
        assert daemon.client().list_buckets()["Buckets"] == []
