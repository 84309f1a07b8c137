"""What the operator does, what its tables allow, what the chart grants: all three the same.

That nothing is missing is seen when the operator runs with the rights of its ServiceAccount (test_end_to_end,
test_data_end_to_end); here, that nothing is granted that is not used.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from meshoperator.controllers.base_controller import BaseController
from meshoperator.kube.client import _ALL, CLUSTER, NAMESPACED
from meshoperator.resources import KINDS
from tests.kubernetes.control_plane import ROOT
from tests.kubernetes.test_chart import documents

if TYPE_CHECKING:
    from collections.abc import Iterator

Right = tuple[str, tuple[str, str]]
SOURCES = sorted((ROOT / "operator" / "meshoperator").rglob("*.py"))
VERBS = {
    "get": ("get",),
    "list_all": ("list",),
    "pages_of_metadata": ("list",),
    "list_events": ("list",),
    "apply": ("patch", "create"),
    "apply_if_known": ("patch", "create"),
    "create": ("create",),
    "replace": ("update",),
    "patch": ("patch",),
    "set_status": ("patch",),
    "delete": ("delete",),
    "delete_pod": ("delete",),
    "delete_all": ("deletecollection",),
    "watch": ("watch",),
    "watch_metadata": ("watch",),
}
# Calls whose kind is not written beside them, by module: what these modules make or change.
BY_VALUE: dict[tuple[str, str], set[str]] = {
    ("cluster_controller", "apply"): {
        "ConfigMap",
        "Service",
        "StatefulSet",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "MeshNode",
        "ServiceAccount",
        "RoleBinding",
    },
    ("cluster_controller", "apply_if_known"): {"ServiceMonitor"},
    ("cluster_controller", "create"): {"Secret"},
    ("cluster_controller", "replace"): {"ConfigMap"},
    ("cluster_controller", "delete_pod"): {"Pod"},
    ("daemon_machines", "replace"): {"ConfigMap"},
    ("teardown", "delete_all"): {"ConfigMap", "Secret", "Lease"},
    ("leader_election", "create"): {"Lease"},
    ("leader_election", "replace"): {"Lease"},
    ("event_recorder", "create"): {"Event"},
    ("observed_state", "list_events"): {"Event"},
    ("manager", "watch"): {"Node", *(kind.name for kind in KINDS)},
    ("pod_credentials", "apply"): {"Secret"},
    ("dataset_controller", "create"): {"Secret"},
}


def resource(kind: str, sub: str = "") -> tuple[str, str]:
    group, _, plural, _ = _ALL[kind]
    return group, plural + sub


def used() -> set[Right]:
    """Every call of a `Kube` in the operator's sources."""
    found: set[Right] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and _of_kube(node.func.value)
            ):
                method = node.func.attr
                for kind in _kinds(path.stem, method, node):
                    sub = "/status" if method == "set_status" else ""
                    found |= {(verb, resource(kind, sub)) for verb in VERBS[method]}
    return found


def _of_kube(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("kube", "_kube")


def _kinds(module: str, method: str, call: ast.Call) -> set[str]:
    if method not in VERBS:
        return set()
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return {first.value}
    if isinstance(first, ast.Attribute) and first.attr == "kind":
        return {each.kind for each in BaseController.__subclasses__()}
    return BY_VALUE[module, method]


def table(*tables: dict[tuple[str, str], frozenset[str]]) -> set[Right]:
    return {(verb, name) for each in tables for name, verbs in each.items() for verb in verbs}


def granted(documents: list[dict[str, Any]], kind: str) -> Iterator[Right]:
    for each in documents:
        if each["kind"] == kind and each["metadata"]["name"].endswith("-operator"):
            for rule in each["rules"]:
                for group in rule["apiGroups"]:
                    yield from ((verb, (group, name)) for name in rule["resources"] for verb in rule["verbs"])


def test_the_tables_allow_what_is_used_and_no_more() -> None:
    import meshoperator.manager  # noqa: F401 all loops are known then

    # the bind of the daemons' role is Kubernetes' own check when the RoleBinding is applied
    own = used() | {("bind", ("rbac.authorization.k8s.io", "clusterroles"))}
    assert table(NAMESPACED, CLUSTER) == own


def test_the_chart_grants_what_the_tables_allow_in_the_whole_cluster() -> None:
    assert set(granted(documents("default"), "ClusterRole")) == table(NAMESPACED, CLUSTER)


def test_and_in_namespaces_alone() -> None:
    found = documents("namespaced")
    assert set(granted(found, "Role")) == table(NAMESPACED)
    assert not list(granted(found, "ClusterRole"))
