"""Every metric of the operator, in one place. Names start with `mesh_operator_`.

Law: labels are bounded: kinds, reasons, names of MeshClusters and of their daemons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from meshoperator.planners.pod_checks import REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.planners.status import Diagnosis

registry: Final = REGISTRY
leading: Final = Gauge(
    "mesh_operator_leading", "Whether this operator is the one that acts.", registry=registry
)
passes: Final = Counter(
    "mesh_operator_passes_total",
    "Looks at objects; outcome: done, failed.",
    ("kind", "outcome"),
    registry=registry,
)
pass_seconds: Final = Histogram(
    "mesh_operator_pass_seconds",
    "Of one look.",
    ("kind",),
    registry=registry,
    buckets=(0.05, 0.2, 1, 5, 20, 60),
)
actions: Final = Counter(
    "mesh_operator_actions_total",
    "What was done, by the reason of its event.",
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
    "1 for each daemon that does not start, with why in one word.",
    ("namespace", "cluster", "pod", "reason"),
    registry=registry,
)
admissions: Final = Counter(
    "mesh_operator_admissions_total",
    "Training pods that the webhook saw; result: patched, same, odd (left as it is), failed.",
    ("result",),
    registry=registry,
)
admission_seconds: Final = Histogram(
    "mesh_operator_admission_seconds", "Of an answer of the webhook.", registry=registry
)
keys: Final = Counter(
    "mesh_operator_credentials_total",
    "Secrets of training pods that were made or renewed.",
    registry=registry,
)
unserved: Final = Counter(
    "mesh_operator_unserved_pods_total",
    "Pods that ask for a dataset and do not get it as they ask; each once a reason, that of its event.",
    ("reason",),
    registry=registry,
)
for _reason in REASONS:  # from 0, so that the first pod is an increase
    unserved.labels(_reason)
_TRUTH: Final = {"True": 1, "False": 0}


def record_cluster(namespace: str, name: str, status: Mapping[str, object]) -> None:
    """What the status of a MeshCluster says."""
    for each in _list(status, "conditions"):
        conditions.labels(namespace, name, each["type"]).set(_TRUTH.get(str(each["status"]), -1))
    for each in _list(status, "pools"):
        for what in ("desired", "ready", "updated", "draining"):
            nodes.labels(namespace, name, each["name"], what).set(int(str(each.get(what, 0))))


def record_stuck(namespace: str, name: str, found: Mapping[str, Diagnosis]) -> None:
    """Which daemons of a MeshCluster do not start, by name."""
    there = {(namespace, name, pod, each.word) for pod, each in found.items()}
    for labels in [key for key in stuck._metrics if key[:2] == (namespace, name) and key not in there]:
        stuck.remove(*labels)
    for labels in there:
        stuck.labels(*labels).set(1)


def forget_cluster(namespace: str, name: str) -> None:
    """A MeshCluster is gone."""
    for gauge in (conditions, nodes, stuck):
        for labels in [key for key in gauge._metrics if key[:2] == (namespace, name)]:
            gauge.remove(*labels)


def forget_clusters() -> None:
    """Another operator acts: what this one knew is old from now on."""
    for gauge in (conditions, nodes, stuck):
        gauge.clear()


def serve(host: str, port: int) -> None:
    """`/metrics`, in a thread of its own."""
    start_http_server(port, host, registry=registry)


def _list(status: Mapping[str, object], name: str) -> list[dict[str, str]]:
    found = status.get(name) or []
    assert isinstance(found, list)
    return found
