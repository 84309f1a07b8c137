"""NetworkPolicies of the chart and the operator, read: every connection that is needed is allowed, and those
of others are not. The evaluator is judged by itself first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from meshoperator.cluster_model import Cluster
from meshoperator.planners.manifests import cluster_manifests
from meshoperator.resources import MeshClusterSpec, parse
from meshoperator.settings import OperatorSettings
from tests.kubernetes.test_chart import rendered
from tests.support.network_policies import Peer, allows, pod_peer

if TYPE_CHECKING:
    from tests.support.network_policies import Policy

POOL = {"name": "s", "replicas": 1, "tiers": [{"name": "d", "class": "ssd", "hostPath": "/mnt/d"}]}
TRUSTED = {"team": "training"}
NAMED = "kubernetes.io/metadata.name"
OUTSIDE = Peer(address="203.0.113.9")
"""The API server, a client behind a NodePort: no pod."""


def policy(**spec: Any) -> Policy:
    return {"metadata": {"namespace": "a"}, "spec": {"podSelector": {}} | spec}


def pod(namespace: str = "a", address: str = "10.0.0.1", **labels: str) -> Peer:
    return Peer(namespace, labels, {NAMED: namespace}, address, {"web": 80})


WEB = {"app": "web"}
RULES: list[tuple[dict[str, Any], Peer, int, bool]] = [
    ({}, pod(), 80, False),  # it selects the pod and has no rule
    ({"podSelector": {"matchLabels": {"app": "other"}}}, pod(), 80, True),
    ({"policyTypes": ["Egress"]}, pod("b"), 80, True),
    ({"ingress": [{}]}, OUTSIDE, 81, True),
    ({"ingress": [{"ports": [{"port": 80}]}]}, OUTSIDE, 80, True),
    ({"ingress": [{"ports": [{"port": 80}]}]}, OUTSIDE, 81, False),
    ({"ingress": [{"ports": [{"port": "web"}]}]}, pod("b"), 80, True),
    ({"ingress": [{"ports": [{"port": "none"}]}]}, pod("b"), 80, False),
    ({"ingress": [{"ports": [{"port": 80, "protocol": "UDP"}]}]}, pod("b"), 80, False),
    ({"ingress": [{"ports": [{"port": 79, "endPort": 81}]}]}, pod("b"), 81, True),
    ({"ingress": [{"ports": [{"port": 79, "endPort": 81}]}]}, pod("b"), 82, False),
    ({"ingress": [{"from": [{"podSelector": {}}]}]}, pod(), 80, True),
    ({"ingress": [{"from": [{"podSelector": {}}]}]}, pod("b"), 80, False),
    ({"ingress": [{"from": [{"podSelector": {}}]}]}, OUTSIDE, 80, False),
    ({"ingress": [{"from": [{"namespaceSelector": {}}]}]}, pod("b"), 80, True),
    ({"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {NAMED: "c"}}}]}]}, pod("b"), 80, False),
    (
        {"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": WEB}}]}]},
        pod("b", app="web"),
        80,
        True,
    ),
    (
        {"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": WEB}}]}]},
        pod("b"),
        80,
        False,
    ),
    ({"ingress": [{"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]}, OUTSIDE, 80, True),
    (
        {"ingress": [{"from": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.8/30"]}}]}]},
        OUTSIDE,
        80,
        False,
    ),
    (
        {
            "podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]},
            "ingress": [
                {"from": [{"podSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}]}
            ],
        },
        pod(x="1"),
        80,
        True,
    ),
]


@pytest.mark.parametrize(("spec", "source", "port", "allowed"), RULES)
def test_the_evaluator_knows_the_rules(spec: dict[str, Any], source: Peer, port: int, allowed: bool) -> None:
    assert allows([policy(**spec)], source, pod(app="web"), port) is allowed


def test_a_connection_has_to_leave_and_policies_add_up() -> None:
    source, target = pod("b"), pod("a")
    closed = {"metadata": {"namespace": "b"}, "spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    open_ = {
        "metadata": {"namespace": "b"},
        "spec": {
            "podSelector": {},
            "egress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": "web"}]}],
        },
    }
    assert allows([], source, target, 80)
    assert not allows([closed], source, target, 80)
    assert allows([closed, open_], source, target, 80)
    assert not allows([closed, open_], source, target, 443)


class Installation:
    """The chart's operator in namespace `ns`, and a mesh."""

    def __init__(self, mesh: str, values: dict[str, Any] | None = None, **spec: Any) -> None:
        found = rendered(values or {})
        (template,) = (each["spec"]["template"] for each in found if each["kind"] == "Deployment")
        document = parse(MeshClusterSpec, {"image": "i:1", "nodePools": [POOL], **spec})
        variables = template["spec"]["containers"][0]["env"]
        environ = {each["name"]: each["value"] for each in variables if "value" in each}
        labels = OperatorSettings.from_environment(environ).pod_labels
        cluster = Cluster("mesh", mesh, "uid", document, (), "default", "ns", labels)
        made = cluster_manifests(cluster, settled=True)
        (daemons,) = (each["spec"]["template"] for each in made if each["kind"] == "StatefulSet")
        self.policies: list[Policy] = [
            each | {"metadata": {"namespace": "ns"} | each["metadata"]}
            for each in (*found, *made)
            if each["kind"] == "NetworkPolicy"
        ]
        self.port = document.s3.port
        self.operator = self.pod("ns", template)
        self.daemon = self.pod(mesh, daemons)

    def pod(self, namespace: str, template: dict[str, Any], **labels: str) -> Peer:
        return pod_peer(
            template["metadata"],
            template["spec"],
            namespace=namespace,
            namespace_labels={NAMED: namespace} | labels,
        )

    def reaches(self, source: Peer, target: Peer, port: int) -> bool:
        return allows(self.policies, source, target, port)


def client(namespace: str, **labels: str) -> Peer:
    return Peer(namespace, {"app": "train"}, {NAMED: namespace} | labels)


@pytest.mark.parametrize("mesh", ["ns", "elsewhere"])
@pytest.mark.parametrize("port", [9000, 443])
@pytest.mark.parametrize("namespaces", [{}, TRUSTED])
def test_what_is_needed_is_allowed(mesh: str, port: int, namespaces: dict[str, str]) -> None:
    """Whoever connects to whom: docs/kubernetes.md, "NetworkPolicies"."""
    found = Installation(mesh, s3={"port": port}, networkPolicy={"fromNamespaces": namespaces})
    assert len(found.policies) == 2
    needed = {
        "a daemon to a daemon": (found.daemon, found.daemon, port),
        "the operator to a daemon": (found.operator, found.daemon, port),
        "a training pod to a daemon": (client("jobs", **TRUSTED), found.daemon, port),
        "the API server to the webhook": (OUTSIDE, found.operator, 9443),
        "a kubelet to the operator": (OUTSIDE, found.operator, 8080),
        "Prometheus to the operator": (client("monitoring"), found.operator, 9090),
        "Prometheus to a daemon": (client("monitoring", **TRUSTED), found.daemon, port),
        "a controller of Ingress to a daemon": (client("ingress-nginx", **TRUSTED), found.daemon, port),
        "a daemon to the API server": (found.daemon, OUTSIDE, 443),
        "the operator to the API server": (found.operator, OUTSIDE, 443),
        "a daemon to a source": (found.daemon, OUTSIDE, 443),
    }
    refused = [name for name, ends in needed.items() if not found.reaches(*ends)]
    assert refused == []


@pytest.mark.parametrize("mesh", ["ns", "elsewhere"])
def test_what_is_not_needed_is_refused(mesh: str) -> None:
    found = Installation(mesh, networkPolicy={"fromNamespaces": TRUSTED})
    impostor = Peer("jobs", found.operator.labels, {NAMED: "jobs"})
    another = Peer("ns", {"app.kubernetes.io/component": "operator"}, {NAMED: "ns"})
    not_needed = {
        "a pod of another namespace": (client("jobs"), found.daemon, 9000),
        "with the operator's labels": (impostor, found.daemon, 9000),
        "another product's operator": (another, found.daemon, 9000),
        "from outside": (OUTSIDE, found.daemon, 9000),
        "another port of a daemon": (client("jobs", **TRUSTED), found.daemon, 22),
        "another port of the operator": (client("jobs", **TRUSTED), found.operator, 22),
    }
    allowed = [name for name, ends in not_needed.items() if found.reaches(*ends)]
    assert allowed == []
    open_ = Installation(mesh)
    assert open_.reaches(client("jobs"), open_.daemon, 9000)
    assert not open_.reaches(client("jobs"), open_.daemon, 22)


def test_without_policies_all_is_allowed() -> None:
    found = Installation("ns", {"operator": {"networkPolicy": False}}, networkPolicy={"enabled": False})
    assert found.policies == []
    assert found.reaches(client("jobs"), found.daemon, 22)
