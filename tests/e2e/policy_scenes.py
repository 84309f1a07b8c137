"""Scenes of NetworkPolicies that a plug-in enforces: which connections are possible without the policies of
chart and operator, with them, and with namespaces chosen, and which are not."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Namespace, Pod
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.types import PatchType

from tests.e2e import client_scenes
from tests.e2e.cluster_client import HERE, EndToEndError, RealCluster, host_port
from tests.e2e.control_plane_scenes import OPERATOR_PODS
from tests.e2e.network_scenes import TRUSTED, choose
from tests.e2e.scaling_scenes import kubectl
from tests.e2e.stage import DAEMONS, MESH_PODS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.e2e.stage import Stage

CONNECT = (HERE / "connect_pod.py").read_text()
OTHER_PORT = 2222
"""A port that nobody is meant to reach; in this scene something listens there in each pod."""
LISTEN = (
    "import socket as s; both = s.has_dualstack_ipv6(); host = '::' if both else '0.0.0.0'\n"
    "family = s.AF_INET6 if both else s.AF_INET\n"
    "listener = s.create_server((host, {port}), family=family, dualstack_ipv6=both)\n"
    "while True: listener.accept()[0].close()"
)
S3, METRICS, HEALTH, WEBHOOK = 9000, 9090, 8080, 9443
METRICS_OF = (
    "import urllib.request as r, sys; print(*(r.urlopen(u, timeout=10).status for u in sys.argv[1:]))"
)
ANSWER = 30.0
"""Seconds that a plug-in may take until it has carried out a change."""


@dataclass(frozen=True)
class Source:
    """A pod from which connections are tried. `operator`: with the labels of the operator's pods."""

    name: str
    namespace: str


def enforced(stage: Stage) -> None:
    """Try each connection without policies, with those of the chart's defaults, and with namespaces chosen.
    Without a plug-in that enforces them, say so and try nothing."""
    cluster = stage.cluster
    with strangers(stage) as sources:
        if not is_enforced(stage, sources["stranger"]):
            print("no plug-in enforces NetworkPolicies here: they are not tried", file=sys.stderr)
            stage.figures.append(("NetworkPolicies", "not enforced by this cluster, not tried"))
            return
        cluster.delete_pod("load")  # the namespace of the mesh is not chosen, for a while
        with stage.step("connections without NetworkPolicies: all are possible") as told:
            stage.helm("upgrade", operator={**stage.values["operator"], "networkPolicy": False})
            cluster.change(networkPolicy={"enabled": False})
            cluster.until(lambda: not list(cluster.kube.list(NetworkPolicy)), "no policy is left")
            expect(stage, sources, told, {name: {"S3", "operator", "other"} for name in sources})
        with stage.step("connections with the NetworkPolicies of the chart's defaults") as told:
            stage.helm("upgrade", operator={**stage.values["operator"], "networkPolicy": True})
            cluster.change(networkPolicy={"enabled": True})
            expect(stage, sources, told, {name: {"S3", "operator"} for name in sources})
        with stage.step("connections with `fromNamespaces`") as told:
            cluster.change(networkPolicy={"fromNamespaces": TRUSTED})
            wanted = {name: {"operator"} for name in sources}
            wanted["chosen"] |= {"S3"}
            expect(stage, sources, told, wanted)
        work_with_chosen_namespaces(stage, sources["chosen"])
        cluster.change(networkPolicy={"fromNamespaces": None})
        stage.until_settled()
    with stage.step("clients read and write again"):
        stage.start_load(stage.keys())


@contextmanager
def strangers(stage: Stage) -> Iterator[dict[str, Source]]:
    """Pods in a namespace that is not chosen, one of them with the labels of daemons and operator; one in a
    namespace that is chosen; one in the mesh's own namespace."""
    cluster = stage.cluster
    foreign, chosen = (
        RealCluster(cluster.kubeconfig, f"{cluster.namespace}-{name}", cluster.image)
        for name in ("foreign", "chosen")
    )
    (operator,) = cluster.pods(OPERATOR_PODS)
    disguise = {
        name: value for name, value in operator.metadata.labels.items() if name != "pod-template-hash"
    }
    for each in (foreign, chosen):
        each.create_namespace()
    cluster.kube.patch(
        Namespace, chosen.namespace, {"metadata": {"labels": TRUSTED}}, patch_type=PatchType.MERGE
    )
    pods: tuple[tuple[RealCluster, str, dict[str, str]], ...] = (
        (foreign, "stranger", {}),
        (foreign, "impostor", disguise | MESH_PODS),
        (chosen, "chosen", {}),
        (cluster, "neighbour", {}),
    )
    for where, name, labels in pods:
        where.run_script(name, "connect_pod.py", labels=labels)
    for where, name, _ in pods:
        until_running(where, name)
    yield {name: Source(name, where.namespace) for where, name, _ in pods}
    cluster.delete_pod("neighbour")
    for each in (foreign, chosen):
        each.delete_namespace()


def until_running(cluster: RealCluster, pod: str) -> None:
    """Wait until a pod runs."""
    cluster.until(lambda: cluster.kube.get(Pod, pod).status.phase == "Running", f"{pod} runs")


def is_enforced(stage: Stage, source: Source) -> bool:
    """Return whether a policy that allows nothing is enforced. Raises EndToEndError unless a pod can be
    reached without it."""
    cluster = stage.cluster
    metadata = {"name": "probe", "namespace": cluster.namespace}
    closed = {"podSelector": {"matchLabels": {"probe": "yes"}}, "policyTypes": ["Ingress"]}
    cluster.run_script("probe", "connect_pod.py", labels={"probe": "yes"})
    until_running(cluster, "probe")
    run_in(stage, Source("probe", cluster.namespace), listener(S3))
    target = host_port(cluster.kube.get(Pod, "probe").status.podIP, S3)
    cluster.until(lambda: connects(stage, source, target)[target], "the probe is reached", ANSWER)
    cluster.kube.create(NetworkPolicy.from_dict({"metadata": metadata, "spec": closed}))
    try:
        cluster.until(lambda: not connects(stage, source, target)[target], "it is not", ANSWER)
    except EndToEndError:
        return False
    finally:
        cluster.kube.delete(NetworkPolicy, "probe")
        cluster.delete_pod("probe")
    return True


def listen(stage: Stage) -> None:
    """Listen on another port in every daemon's and the operator's container, once `helm upgrade` has replaced
    the operator."""
    cluster = stage.cluster
    kubectl(stage, f"rollout status deployment/mesh-shardmesh-operator -n {cluster.namespace} --timeout=120s")
    cluster.until(
        lambda: len(cluster.pods(OPERATOR_PODS)) == len(cluster.ready_pods(OPERATOR_PODS)) == 1,
        "one operator, which is ready",
    )
    stage.until_settled()
    for pod in (*stage.cluster.ready_pods(MESH_PODS), *stage.cluster.ready_pods(OPERATOR_PODS)):
        run_in(stage, Source(pod.metadata.name, stage.cluster.namespace), listener(OTHER_PORT))


def listener(port: int) -> str:
    """Return a command of the shell that goes on listening."""
    return f"python -c {shlex.quote(LISTEN.format(port=port))} >/dev/null 2>&1 </dev/null &"


def run_in(stage: Stage, source: Source, script: str) -> str:
    """Run a command of the shell in a pod; return what it printed. Raises EndToEndError."""
    where = f"exec -n {source.namespace} {source.name} -- sh -c"
    return kubectl(stage, f"{where} {shlex.quote(script)}".replace("{", "{{").replace("}", "}}"))


def connects(stage: Stage, source: Source, *targets: str) -> dict[str, bool]:
    """Return to which HOST:PORT a pod can connect."""
    found: dict[str, bool] = json.loads(
        run_in(stage, source, f"python -c {shlex.quote(CONNECT)} {' '.join(targets)}")
    )
    return found


def targets_by_kind(stage: Stage) -> dict[str, str]:
    """Return the kind of each HOST:PORT to which something may connect."""
    cluster, space = stage.cluster, stage.cluster.namespace
    daemons = [pod.status.podIP for pod in cluster.ready_pods(MESH_PODS)]
    (operator,) = [pod.status.podIP for pod in cluster.ready_pods(OPERATOR_PODS)]
    found = {host_port(address, S3): "S3" for address in (*daemons, f"mesh-s3.{space}.svc")}
    found |= {f"mesh-s-{number}.mesh-nodes.{space}.svc:{S3}": "S3" for number in range(DAEMONS)}
    found |= {host_port(operator, port): "operator" for port in (METRICS, HEALTH, WEBHOOK)}
    return found | {host_port(address, OTHER_PORT): "other" for address in (*daemons, operator)}


def expect(
    stage: Stage, sources: Mapping[str, Source], told: dict[str, Any], wanted: Mapping[str, set[str]]
) -> None:
    """Wait until each source connects to all targets of the kinds that it is wanted to, and to no other.
    Raises EndToEndError."""
    listen(stage)
    targets = targets_by_kind(stage)
    for name, source in sources.items():
        aim = {target: kind in wanted[name] for target, kind in targets.items()}
        if wrong := wrong_in_time(stage, source, aim):
            raise EndToEndError(f"{name}, connections that are not as wanted: {wrong}")
        told[name] = f"{sum(aim.values())} of {len(aim)} possible"


def wrong_in_time(stage: Stage, source: Source, aim: Mapping[str, bool]) -> dict[str, bool]:
    """Wait until a source connects as it is aimed at; return what it does otherwise in the end."""
    wrong = dict[str, bool]()

    def is_right() -> bool:
        seen = connects(stage, source, *aim)
        wrong.clear()
        wrong.update({target: open_ for target, open_ in seen.items() if open_ != aim[target]})
        return not wrong

    with suppress(EndToEndError):
        stage.cluster.until(is_right, "connections", ANSWER)
    return wrong


def work_with_chosen_namespaces(stage: Stage, chosen: Source) -> None:
    """All that has to work does, while only chosen namespaces may connect: daemons and operator among each
    other, probes, the webhook, a training pod, keys of a role, metrics."""
    cluster = stage.cluster
    with stage.step("`fromNamespaces`: metrics of daemons and operator, read in a chosen namespace") as told:
        hosts = [host_port(pod.status.podIP, S3) for pod in cluster.ready_pods(MESH_PODS)]
        hosts += [host_port(pod.status.podIP, METRICS) for pod in cluster.ready_pods(OPERATOR_PODS)]
        urls = " ".join(f"http://{host}/metrics" for host in hosts)
        told["statuses"] = run_in(stage, chosen, f'python -c "{METRICS_OF}" {urls}').strip()
    with stage.step("`fromNamespaces`: a daemon's pod is deleted, until the mesh is settled"):
        cluster.delete_pod_at_once(cluster.pods(MESH_PODS)[0].metadata.name)
        stage.until_settled()
    choose(stage, trusted=True)
    with stage.step("`fromNamespaces`: a training pod, an epoch"):
        client_scenes.begin_epoch(stage, "train-chosen", 0.0)
        admitted = cluster.kube.get(Pod, "train-chosen").metadata.annotations or {}
        if "shardmesh.io/admitted" not in admitted:
            raise EndToEndError(f"the API server did not reach the webhook: {admitted}")
        cluster.result("train-chosen")
        cluster.delete_pod("train-chosen")
    with stage.step("`fromNamespaces`: a pod exchanges its token for keys of a role") as told:
        annotations = {"shardmesh.io/role": "trainer"}
        labels = client_scenes.DATASET
        cluster.run_script(
            "role-chosen", "role_pod.py", labels=labels, annotations=annotations, account="trainer"
        )
        told |= cluster.result("role-chosen")
        cluster.delete_pod("role-chosen")
    choose(stage, trusted=False)
