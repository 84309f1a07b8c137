"""Alerts about daemons, MeshClusters, training pods and the operator, and the types of rules.

Law: an alert names a condition somebody has to act on; its runbook is the section of docs/runbooks.md of
the same name. Ratios are of sums, so a quiet node weighs less than a busy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["critical", "warning"]
SCRAPES: Final = 'job="shardmesh"'
RUNBOOKS: Final = "docs/runbooks.md"
"""What the links to runbooks begin with; the chart has a value for where your copy of the docs is."""


@dataclass(frozen=True, slots=True)
class Recording:
    """`record` is `level:metric:operation`, as Prometheus's guide has it."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`wait`: how long `expr` holds before anybody is told. `critical` wakes somebody, `warning` does not."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """Where it is written what to do."""
        return f"{RUNBOOKS}#{self.name.lower()}"


DAEMONS: Final = (
    Alert(
        "ShardmeshNodeDown",
        f"up{{{SCRAPES}}} == 0",
        "2m",
        "critical",
        "{{ $labels.instance }} does not answer",
        "Prometheus has not reached this node for two minutes. Data with another copy is served by that one.",
    ),
    Alert(
        "ShardmeshNodeAway",
        'max(meshd_cluster_nodes{state="away"}) > 0',
        "2m",
        "warning",
        "{{ $value | humanize }} nodes of the mesh do not answer the others",
        "What they hold has a copy less. They are given up after --down-after where nothing is lost by it.",
    ),
    Alert(
        "ShardmeshDataUnavailable",
        "max(meshd_cluster_slots_lost) > 0",
        "1m",
        "critical",
        "Of {{ $value | humanize }} slots of the map no node that has everything answers",
        "Reads and writes of names in these slots are refused (503) until one of their nodes is back.",
    ),
    Alert(
        "ShardmeshCopiesMissing",
        "max(meshd_cluster_slots_short) > 0",
        "30m",
        "warning",
        "{{ $value | humanize }} slots of the map have fewer copies than they should",
        "For half an hour: longer than a node may be away before its share is made again elsewhere.",
    ),
    Alert(
        "ShardmeshControlStoreLost",
        "meshd_cluster_lease_held == 0 and meshd_cluster_map_version > 0",
        "2m",
        "critical",
        "{{ $labels.instance }} cannot reach the control store",
        "Data is read and written all the same; nobody is marked away, and no bucket, user or key changes.",
    ),
    Alert(
        "ShardmeshMapsDiffer",
        "max(meshd_cluster_map_version) - min(meshd_cluster_map_version > 0) > 0",
        "3m",
        "warning",
        "Some nodes go by a cluster map that is {{ $value | humanize }} versions old",
        "They cannot reach the control store, and answer with 503 what others may have changed meanwhile.",
    ),
    Alert(
        "ShardmeshMovementStuck",
        "max(meshd_cluster_rebalancing) > 0 and sum(increase(meshd_rebalance_applied_total[15m])) == 0"
        " and sum(increase(meshd_rebalance_rounds_total[15m])) == 0",
        "30m",
        "warning",
        "Data is to be carried, and nothing moves",
        "No node has fetched anything or ended a comparison for three quarters of an hour.",
    ),
    Alert(
        "ShardmeshWritesRefused",
        "sum by (instance) (increase(meshd_replication_refused_total[10m])) > 0",
        "0m",
        "critical",
        "{{ $labels.instance }} refused {{ $value | humanize }} writes that not all copies took",
        "A node that has to have them did not take them within 15 s, and the map does not say it is away.",
    ),
    Alert(
        "ShardmeshClocksDiffer",
        'sum by (instance) (increase(meshd_forwarded_total{result="skewed"}[5m])) > 0',
        "1m",
        "critical",
        "The clocks of {{ $labels.instance }} and of another node differ by more than five minutes",
        "They refuse each other's requests. Writes of names that the wrong one has are refused.",
    ),
    Alert(
        "ShardmeshClockDrifts",
        "abs(meshd_cluster_clock_ahead_seconds) > 60",
        "5m",
        "warning",
        "The clock of {{ $labels.instance }} and those of the other nodes are {{ $value | humanizeDuration }}"
        " apart",
        "From five minutes on nodes refuse each other's requests, from fifteen their clients'.",
    ),
    Alert(
        "ShardmeshProcessesMissing",
        'meshd_processes_up{role=~"worker|steward"} < 1',
        "1m",
        "critical",
        "{{ $labels.instance }} has no {{ $labels.role }}",
        "The supervisor cannot keep a process of this kind running, so the node is not ready.",
    ),
    Alert(
        "ShardmeshProcessesRestart",
        "sum by (instance, role) (increase(meshd_process_restarts_total[15m])) > 3",
        "0m",
        "warning",
        "{{ $labels.role }} processes of {{ $labels.instance }} keep dying",
        "{{ $value | humanize }} restarts in a quarter of an hour.",
    ),
    Alert(
        "ShardmeshMemoryShort",
        "meshd_memory_free_bytes / meshd_memory_bytes < 0.05",
        "5m",
        "critical",
        "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its memory left",
        "Of the machine's, or of the limit set for it. Soon the kernel ends processes.",
    ),
    Alert(
        "ShardmeshErrors",
        "instance:meshd_http_errors:ratio5m > 0.01",
        "5m",
        "critical",
        "{{ $labels.instance }} fails {{ $value | humanizePercentage }} of its requests",
        "Answers of 500 and above, 503 among them, over all operations.",
    ),
    Alert(
        "ShardmeshSlowReads",
        'operation:meshd_http_request_seconds:p99_5m{operation="GetObject"} > 2.5',
        "10m",
        "warning",
        "One GET in a hundred takes {{ $value | humanizeDuration }}",
        "From the head of the request to the last byte. Large objects and slow clients count, too.",
    ),
    Alert(
        "ShardmeshClientsRefused",
        'sum by (instance) (increase(meshd_http_turned_away_total{why="full"}[10m])) > 0',
        "0m",
        "warning",
        "{{ $labels.instance }} refuses connections",
        "It has as many connections as --max-connections allows, and none of them is idle.",
    ),
    Alert(
        "ShardmeshDiskFull",
        "instance_disk:meshd_store_disk_free:ratio < 0.03",
        "2m",
        "critical",
        "{{ $labels.disk }} of {{ $labels.instance }} has {{ $value | humanizePercentage }} left",
        "The node's other disks take what is new. When none has room, writes are refused (507 or 503) before"
        " the disks are really full; reads and deletions go on.",
    ),
    Alert(
        "ShardmeshDiskFills",
        "instance_disk:meshd_store_disk_free:ratio < 0.3"
        " and predict_linear(meshd_store_disk_free_bytes[2h], 24 * 3600) < 0",
        "30m",
        "warning",
        "{{ $labels.disk }} of {{ $labels.instance }} will be full within a day",
        "At the pace of the last two hours.",
    ),
    Alert(
        "ShardmeshDiskErrors",
        'sum by (instance) (increase(meshd_store_disk_errors_total{kind="failed"}[10m])) > 0',
        "0m",
        "critical",
        "A disk of {{ $labels.instance }} fails",
        "Reads or writes of data files or of the index ended in errors of the device.",
    ),
    Alert(
        "ShardmeshCorruptData",
        "sum by (instance) (increase(meshd_store_corrupt_reads_total[15m])) > 0",
        "0m",
        "critical",
        "{{ $labels.instance }} read bytes that fail their checksum",
        "They were not served. Whoever asked got an error, or the bytes of another copy.",
    ),
    Alert(
        "ShardmeshDiskLost",
        "meshd_store_disks_lost > 0",
        "1m",
        "critical",
        "{{ $value | humanize }} disks of {{ $labels.instance }} are out of service",
        "They failed, or are not mounted. What they had comes from other nodes, where these have it.",
    ),
    Alert(
        "ShardmeshDamagedData",
        "meshd_store_quarantined > 0",
        "10m",
        "critical",
        "{{ $value | humanize }} versions on {{ $labels.instance }} are damaged, and no other node gave them",
        "They are not given out. Damage that another copy can mend is over within a minute.",
    ),
    Alert(
        "ShardmeshSlowDisk",
        "instance:meshd_store_sync_seconds:p99_5m > 1",
        "15m",
        "warning",
        "One fdatasync in a hundred on {{ $labels.instance }} takes {{ $value | humanizeDuration }}",
        "Every acknowledged write waits for one.",
    ),
    Alert(
        "ShardmeshCertificateExpires",
        "meshd_tls_not_after_seconds - time() < 14 * 86400 and meshd_tls_not_after_seconds > 0",
        "1h",
        "warning",
        "The certificate of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}",
        "A new pair of files is taken up within a second; no restart is needed.",
    ),
    Alert(
        "ShardmeshCertificateEnds",
        "meshd_tls_not_after_seconds - time() < 86400 and meshd_tls_not_after_seconds > 0",
        "5m",
        "critical",
        "The certificate of {{ $labels.instance }} ends within a day, or has ended",
        "From then on nobody connects to this node: no client, no other node, no Prometheus that checks it.",
    ),
    Alert(
        "ShardmeshCertificateRefused",
        "meshd_cluster_certificates_refused > 0",
        "2m",
        "critical",
        "{{ $labels.instance }} does not believe the certificates of {{ $value | humanize }} other nodes",
        "Connections that are open stay. As they end, writes of names that those nodes have are refused.",
    ),
    Alert(
        "ShardmeshAuditLost",
        "sum by (instance) (increase(meshd_audit_dropped_total[10m])) > 0",
        "0m",
        "warning",
        "{{ $labels.instance }} could not write {{ $value | humanize }} audit lines",
        "The disk of the audit log is full or too slow; requests are served all the same.",
    ),
    Alert(
        "ShardmeshOriginFails",
        "instance:meshd_origin_errors:ratio5m > 0.05",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of what {{ $labels.instance }} asks origins for fails",
        "What is cached is served; the rest of buckets with an origin fails.",
    ),
    Alert(
        "ShardmeshWriteBackStuck",
        "min_over_time(meshd_origin_dirty_objects[30m]) > 0"
        ' and on (instance) increase(meshd_origin_bytes_total{direction="written"}[30m]) == 0',
        "0m",
        "warning",
        "{{ $value | humanize }} objects on {{ $labels.instance }} do not get to their origin",
        "They are kept here, with their copies, until they are there; nothing was written to it for 30 min.",
    ),
    Alert(
        "ShardmeshTrainingStarves",
        "loader:meshd_loader_stall:ratio5m > 0.1",
        "10m",
        "warning",
        "{{ $labels.loader }} waits {{ $value | humanizePercentage }} of its time for data",
        "The accelerators of this job idle while it waits.",
    ),
    Alert(
        "ShardmeshTransformsQueue",
        "min_over_time(meshd_transform_queue_rows[5m]) > 0",
        "10m",
        "warning",
        "Rows wait for a transform process of {{ $labels.instance }} all the time, {{ $value | humanize }} at"
        " least",
        "Decoding and augmenting is what limits the jobs of this node.",
    ),
    Alert(
        "ShardmeshBatchesRefused",
        "instance:meshd_batches_refused:ratio5m > 0.1",
        "5m",
        "warning",
        "{{ $labels.instance }} puts {{ $value | humanizePercentage }} of the requests for batches off (503)",
        "Loaders ask again every second or so. A job that is put off for 10 minutes (deadline) ends.",
    ),
    Alert(
        "ShardmeshBadSamples",
        "instance:meshd_bad_samples:ratio5m > 0.01",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the samples on {{ $labels.instance }} cannot be prepared",
        "Jobs replace, mask or drop them, or stop, as their plans say.",
    ),
    Alert(
        "ShardmeshUserOpsFail",
        'sum by (instance) (increase(meshd_user_op_processes_total{event!="started"}[15m])) > 10',
        "0m",
        "warning",
        "Ops that users brought keep ending their processes on {{ $labels.instance }}",
        "By crash, by taking too much time or memory, or by answers that make no sense.",
    ),
    Alert(
        "ShardmeshJobsFail",
        'sum by (instance) (increase(meshd_jobs_ended_total{state="failed"}[30m])) > 0',
        "0m",
        "warning",
        "{{ $value | humanize }} assembly jobs failed on {{ $labels.instance }}",
        "They can be started again, and go on where they were.",
    ),
)


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
