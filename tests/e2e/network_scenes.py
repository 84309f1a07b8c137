"""Scenes of the network: connections of a run, held against NetworkPolicies that nothing has to enforce."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Namespace, Node, Pod
from lightkube.resources.networking_v1 import NetworkPolicy
from lightkube.types import PatchType

from tests.e2e.cluster_client import EndToEndError
from tests.e2e.stage import MESH_PODS
from tests.e2e.storage_scenes import on_node
from tests.support.network_policies import Peer, allows, pod_peer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.e2e.stage import Stage

TRUSTED = {"shardmesh-e2e": "clients"}
SEEN = re.compile(r"(?:ESTABLISHED|TIME_WAIT) src=(\S+) .*? src=(\S+) dst=\S+ sport=(\d+) ")
NEEDED = {("daemon", "daemon"), ("operator", "daemon"), ("load", "daemon")}


def connections(stage: Stage) -> None:
    """With namespaces chosen, policies have to allow each connection to daemons and operator that the nodes
    have tracked (conntrack), if the clients' namespace is one of them; otherwise only those of the daemons
    and the operator."""
    cluster = stage.cluster
    with stage.step(
        "connections between pods that nodes have tracked, by what NetworkPolicies allow"
    ) as told:
        choose(stage, trusted=True)
        cluster.change(networkPolicy={"fromNamespaces": TRUSTED})
        stage.until_settled()
        policies = [each.to_dict() for each in cluster.kube.list(NetworkPolicy, namespace="*")]
        peers, seen = pods_by_address(stage), Counter[tuple[str, str, int]]()
        refused = {"chosen": set[tuple[str, str]](), "not chosen": set[tuple[str, str]]()}
        for source, target, port in tracked(stage):
            name, peer = peers.get(source, ("no pod", Peer(address=source)))
            kind, end = peers.get(target, ("no pod", peer))
            if kind not in ("daemon", "operator"):
                continue
            seen[name, kind, port] += 1
            labels = {key: value for key, value in peer.namespace_labels.items() if key not in TRUSTED}
            for how, namespace in (("chosen", labels | TRUSTED), ("not chosen", labels)):
                each = replace(peer, namespace_labels=namespace)
                if name != "no pod" and not allows(policies, each, end, port):
                    refused[how].add((name, kind))
        told["seen"] = "; ".join(
            f"{a} to {b}:{port} ({count})" for (a, b, port), count in sorted(seen.items())
        )
        told |= {f"refused, namespace {how}": sorted(ends) or "none" for how, ends in refused.items()}
        cluster.change(networkPolicy={"fromNamespaces": None})
        stage.until_settled()
        choose(stage, trusted=False)
        stage.tell_load(told)
    if missing := NEEDED - {(a, b) for a, b, _ in seen}:
        raise EndToEndError(f"connections that are needed and were not seen: {sorted(missing)}: {seen}")
    if refused["chosen"] or not {("load", "daemon")} <= refused["not chosen"] <= clients_of_daemons(seen):
        raise EndToEndError(f"connections that the policies refuse: {refused}")


def choose(stage: Stage, *, trusted: bool) -> None:
    """Label the mesh's own namespace as one whose pods may connect, or remove the label."""
    labels = TRUSTED if trusted else dict.fromkeys(TRUSTED)
    change = {"metadata": {"labels": labels}}
    stage.cluster.kube.patch(Namespace, stage.cluster.namespace, change, patch_type=PatchType.MERGE)


def clients_of_daemons(seen: Iterable[tuple[str, str, int]]) -> set[tuple[str, str]]:
    """Return the ends of connections to daemons that come neither from daemons nor from the operator."""
    return {(a, b) for a, b, _ in seen if b == "daemon" and a not in ("daemon", "operator")}


def tracked(stage: Stage) -> set[tuple[str, str, int]]:
    """Return source, target and its port of each TCP connection, as the nodes' kernels have them."""
    nodes = [each.metadata.name for each in stage.cluster.kube.list(Node)]
    script = "conntrack -L -f ipv4 -p tcp 2>/dev/null; conntrack -L -f ipv6 -p tcp 2>/dev/null"
    text = "".join(on_node(stage, node, script) for node in nodes)
    return {(source, target, int(port)) for source, target, port in SEEN.findall(text)}


def pods_by_address(stage: Stage) -> dict[str, tuple[str, Peer]]:
    """Return what runs at each address: `daemon`, `operator`, or the pod's name, and its labels."""
    kube, found = stage.cluster.kube, {}
    labels = {each.metadata.name: each.metadata.labels or {} for each in kube.list(Namespace)}
    for pod in kube.list(Pod, namespace="*"):
        if pod.status.phase != "Running" or pod.spec.hostNetwork or not pod.status.podIP:
            continue
        document: dict[str, Any] = pod.to_dict()
        space = pod.metadata.namespace
        for address in (each.ip for each in pod.status.podIPs):
            peer = pod_peer(
                document["metadata"],
                document["spec"],
                address=address,
                namespace_labels={"kubernetes.io/metadata.name": space} | labels[space],
            )
            found[address] = _kind(pod), peer
    return found


def _kind(pod: Any) -> str:
    labels = pod.metadata.labels or {}
    if MESH_PODS.keys() <= labels.keys():
        return "daemon"
    return "operator" if labels.get("app.kubernetes.io/component") == "operator" else str(pod.metadata.name)
