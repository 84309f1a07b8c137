"""Every metric of the operator, in one place. Names start with `mesh_operator_`.

Law: labels are bounded: kinds, reasons, names of MeshClusters and names of their daemons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from meshoperator.listen_socket import usable_host
from meshoperator.planners.pod_checks import REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.planners.status import Diagnosis

registry: Final = REGISTRY
leading: Final = Gauge("mesh_operator_leading", "Whether this operator is the leader.", registry=registry)
passes: Final = Counter(
    "mesh_operator_passes_total",
    "Reconcile passes; outcome: done, failed.",
    ("kind", "outcome"),
    registry=registry,
)
pass_seconds: Final = Histogram(
    "mesh_operator_pass_seconds",
    "Duration of a reconcile pass.",
    ("kind",),
    registry=registry,
    buckets=(0.05, 0.2, 1, 5, 20, 60),
)
actions: Final = Counter(
    "mesh_operator_actions_total",
    "Actions, by the reason of their event.",
    ("reason",),
    registry=registry,
)
conditions: Final = Gauge(
    "mesh_operator_cluster_condition",
    "Conditions of MeshClusters: 1 true, 0 false, -1 unknown.",
    ("namespace", "cluster", "condition"),
    registry=registry,
)
nodes: Final = Gauge(
    "mesh_operator_cluster_nodes",
    "Daemons by pool.",
    ("namespace", "cluster", "pool", "what"),
    registry=registry,
)
stuck: Final = Gauge(
    "mesh_operator_daemon_stuck",
    "1 for each daemon that does not start, with a one-word reason.",
    ("namespace", "cluster", "pod", "reason"),
    registry=registry,
)
admissions: Final = Counter(
    "mesh_operator_admissions_total",
    "Training pods reviewed by the webhook; result: patched, same, odd (left unchanged), failed.",
    ("result",),
    registry=registry,
)
admission_seconds: Final = Histogram(
    "mesh_operator_admission_seconds", "Duration of a webhook review.", registry=registry
)
keys: Final = Counter(
    "mesh_operator_credentials_total",
    "Secrets of training pods created or renewed.",
    registry=registry,
)
unserved: Final = Counter(
    "mesh_operator_unserved_pods_total",
    "Pods that request a dataset and do not get it as requested; once per pod and event reason.",
    ("reason",),
    registry=registry,
)
unserved_now: Final = Gauge(
    "mesh_operator_pods_unserved",
    "Pods that have not ended and do not get a dataset that they request; by event reason.",
    ("reason",),
    registry=registry,
)
for _reason in REASONS:  # start at 0, so that the first pod shows as an increase
    unserved.labels(_reason)
_TRUTH: Final = {"True": 1, "False": 0}


def record_cluster(namespace: str, name: str, status: Mapping[str, object]) -> None:
    """Export the conditions and pools of a MeshCluster's status."""
    for each in _list(status, "conditions"):
        conditions.labels(namespace, name, each["type"]).set(_TRUTH.get(str(each["status"]), -1))
    for each in _list(status, "pools"):
        for what in ("desired", "ready", "updated", "draining"):
            nodes.labels(namespace, name, each["name"], what).set(int(str(each.get(what, 0))))


def record_stuck(namespace: str, name: str, found: Mapping[str, Diagnosis]) -> None:
    """Export the daemons of a MeshCluster that do not start, by name."""
    there = {(namespace, name, pod, each.word) for pod, each in found.items()}
    for labels in [key for key in stuck._metrics if key[:2] == (namespace, name) and key not in there]:
        stuck.remove(*labels)
    for labels in there:
        stuck.labels(*labels).set(1)


def forget_cluster(namespace: str, name: str) -> None:
    """Drop the series of a deleted MeshCluster."""
    for gauge in (conditions, nodes, stuck):
        for labels in [key for key in gauge._metrics if key[:2] == (namespace, name)]:
            gauge.remove(*labels)


def record_unserved(counts: Mapping[str, int]) -> None:
    """Export how many pods there are that do not get a dataset, by reason."""
    for reason in REASONS:
        unserved_now.labels(reason).set(counts.get(reason, 0))


def forget_clusters() -> None:
    """Drop the series of all MeshClusters and pods; another operator leads and exports them."""
    for gauge in (conditions, nodes, stuck, unserved_now):
        gauge.clear()


def serve(host: str, port: int) -> None:
    """Serve `/metrics` from a thread."""
    start_http_server(port, usable_host(host), registry=registry)


def _list(status: Mapping[str, object], name: str) -> list[dict[str, str]]:
    found = status.get(name) or []
    assert isinstance(found, list)
    return found
