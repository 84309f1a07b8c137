"""Alerts about MeshClusters, training pods and the operator itself: made of the operator's metrics."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.alerting import Alert

_CONDITION: Final = "mesh_operator_cluster_condition"

KUBERNETES: Final = (
    Alert(
        "ShardmeshClusterUnavailable",
        f'max by (namespace, cluster) ({_CONDITION}{{condition="Available"}}) < 1',
        "5m",
        "critical",
        "No daemon of MeshCluster {{ $labels.namespace }}/{{ $labels.cluster }} is ready",
        "Its condition Available says of each daemon why it is not.",
    ),
    Alert(
        "ShardmeshClusterDegraded",
        f'max by (namespace, cluster) ({_CONDITION}{{condition="Degraded"}}) == 1',
        "30m",
        "warning",
        "Daemons of MeshCluster {{ $labels.namespace }}/{{ $labels.cluster }} are away, returning or down",
        "What they have has a copy less. Its condition Degraded names them, and what becomes of them.",
    ),
    Alert(
        "ShardmeshClusterUnsettled",
        f'max by (namespace, cluster) ({_CONDITION}{{condition="Settled"}}) < 1',
        "3h",
        "warning",
        "MeshCluster {{ $labels.namespace }}/{{ $labels.cluster }} has not settled for three hours",
        "Data moves, or cannot: no machine of it can be drained meanwhile, and no roll-out goes on.",
    ),
    Alert(
        "ShardmeshDaemonsMissing",
        'max by (namespace, cluster, pool) (mesh_operator_cluster_nodes{what="ready"})'
        ' < max by (namespace, cluster, pool) (mesh_operator_cluster_nodes{what="desired"})',
        "30m",
        "warning",
        "Pool {{ $labels.pool }} of {{ $labels.namespace }}/{{ $labels.cluster }} lacks daemons",
        "No place, no volume, no image, or they end again and again: the condition Available says which.",
    ),
    Alert(
        "ShardmeshDaemonStuck",
        "max by (namespace, cluster, pod, reason) (mesh_operator_daemon_stuck) == 1",
        "10m",
        "warning",
        "Daemon {{ $labels.pod }} of {{ $labels.namespace }}/{{ $labels.cluster }} does not start:"
        " {{ $labels.reason }}",
        "Its MeshNode and the event DaemonStuck say what Kubernetes says of it, and what to do.",
    ),
    Alert(
        "ShardmeshOperatorGone",
        "(max(mesh_operator_leading) or vector(0)) == 0 and on () max(meshd_cluster_nodes) > 0"
        " and on () count(max_over_time(mesh_operator_leading[1d])) > 0",
        "10m",
        "warning",
        "No operator acts",
        "Daemons go on. Nobody replaces, expands or drains them, and new training pods get no keys.",
    ),
    Alert(
        "ShardmeshOperatorFails",
        'sum by (kind) (rate(mesh_operator_passes_total{outcome="failed"}[15m]))'
        " > 0.5 * sum by (kind) (rate(mesh_operator_passes_total[15m]))",
        "15m",
        "warning",
        "The operator fails at most of its looks at {{ $labels.kind }}s",
        "What they ask for is not done; their statuses are old.",
    ),
    Alert(
        "ShardmeshPodsNotAdmitted",
        'sum(increase(mesh_operator_admissions_total{result="failed"}[15m])'
        ' or increase(mesh_operator_unserved_pods_total{reason="NotAdmitted"}[15m])) > 0',
        "0m",
        "warning",
        "{{ $value | humanize }} training pods were admitted without a look at their datasets",
        "They run far from their data, without endpoint and keys.",
    ),
)
