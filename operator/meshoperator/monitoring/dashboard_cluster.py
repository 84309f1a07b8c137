"""The dashboard of the whole mesh: is it well, what does it serve, how fast."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.expressions import AT, FAILED, HITS, quantile, rate
from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row

CLUSTER: Final = Dashboard(
    "shardmesh-cluster",
    "Shardmesh / Cluster",
    "Is the mesh well, how much does it serve, how fast.",
    (
        Row(
            "Is all well",
            (
                Panel(
                    "Nodes that answer",
                    (Query('sum(up{job="shardmesh"})'),),
                    "none",
                    "Nodes that Prometheus reaches. Fewer than you have: runbook of ShardmeshNodeDown.",
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Failed requests",
                    (Query(f"({FAILED} or vector(0)) / {rate('meshd_http_requests_total')}"),),
                    "percentunit",
                    "Answers of 500 and above, of all.",
                    "stat",
                    5,
                    4,
                    limits=(0.001, 0.01),
                ),
                Panel(
                    "Requests",
                    (Query(rate("meshd_http_requests_total")),),
                    "reqps",
                    "S3 and native, all nodes chosen.",
                    "stat",
                    5,
                    4,
                ),
                Panel(
                    "Served",
                    (Query(rate("meshd_http_bytes_total", more='direction="out"')),),
                    "Bps",
                    "Bytes of answers' bodies.",
                    "stat",
                    5,
                    4,
                ),
                Panel(
                    "Least room on a disk",
                    (Query(f"min(meshd_store_disk_free_bytes{{{AT}}} / meshd_store_disk_bytes{{{AT}}})"),),
                    "percentunit",
                    "Of the fullest disk. Below 3 % writes are soon refused.",
                    "stat",
                    5,
                    4,
                    limits=(0.15, 0.03),
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Requests by operation",
                    (Query(rate("meshd_http_requests_total", "operation"), "{{operation}}"),),
                    "reqps",
                    "What clients ask for.",
                    stacked=True,
                ),
                Panel(
                    "Bytes",
                    (Query(rate("meshd_http_bytes_total", "direction"), "{{direction}}"),),
                    "Bps",
                    "Bodies taken in and sent out.",
                ),
                Panel(
                    "Answers by status",
                    (Query(rate("meshd_http_requests_total", "status"), "{{status}}"),),
                    "reqps",
                    "403 and 404 are mostly clients' doing; 503 asks for patience; other 5xx are faults.",
                    stacked=True,
                ),
                Panel(
                    "Time of an answer",
                    (
                        Query(quantile(0.5, "meshd_http_request_seconds"), "half are faster"),
                        Query(quantile(0.99, "meshd_http_request_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "From the head of a request to the last byte of its answer; slow clients count.",
                ),
                Panel(
                    "99 % by operation",
                    (Query(quantile(0.99, "meshd_http_request_seconds", "operation"), "{{operation}}"),),
                    "s",
                    "Which operation is slow.",
                ),
                Panel(
                    "Connections",
                    (Query(f"sum by (instance) (meshd_http_connections{{{AT}}})", "{{instance}}"),),
                    "none",
                    "Open now. They are refused beyond --max-connections.",
                ),
            ),
        ),
        Row(
            "The mesh",
            (
                Panel(
                    "Nodes by state",
                    (Query(f"max by (state) (meshd_cluster_nodes{{{AT}}})", "{{state}}"),),
                    "none",
                    "By the map. `mesh cluster status` names them. away: the runbook of ShardmeshNodeAway.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Copies that are missing",
                    (
                        Query(f"max(meshd_cluster_slots_short{{{AT}}})", "slots with too few copies"),
                        Query(f"max(meshd_cluster_slots_lost{{{AT}}})", "slots that nobody can answer for"),
                    ),
                    "short",
                    "Of all slots of the map (16,384, if you did not choose). 0 when all is well; falls to 0 "
                    "while a lost node's share is made again.",
                    width=8,
                ),
                Panel(
                    "Control store and map",
                    (
                        Query(f"min(meshd_cluster_lease_held{{{AT}}})", "1: every node reaches it"),
                        Query(
                            f"max(meshd_cluster_map_version{{{AT}}})"
                            f" - min(meshd_cluster_map_version{{{AT}}} > 0)",
                            "versions between newest and oldest map",
                        ),
                    ),
                    "none",
                    "0 and a growing distance: nodes that cannot reach the control store.",
                    width=8,
                ),
                Panel(
                    "Fetched from other nodes to be kept",
                    (Query(rate("meshd_moves_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "By nodes that join, return, take a share over, or repair. It gives way to clients.",
                    width=8,
                ),
                Panel(
                    "Movement",
                    (
                        Query(f"max(meshd_cluster_moving{{{AT}}})", "1: the map wants data elsewhere"),
                        Query(
                            f"sum by (instance) (meshd_moves_lacking{{{AT}}}) or vector(0)",
                            "{{instance}} is known to lack",
                        ),
                    ),
                    "short",
                    "Stays at 1 and nothing is fetched: runbook of ShardmeshMovementStuck.",
                    width=8,
                ),
                Panel(
                    "Passed on to the node that answers",
                    (Query(f"{rate('meshd_forwarded_total', 'result')} or vector(0)", "{{result}}"),),
                    "reqps",
                    "misdirected: by another map, asked again; unreachable: another copy was asked. Clients "
                    "that know the map go straight to the owner.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Until a write is at all its nodes",
                    (
                        Query(quantile(0.5, "meshd_replication_seconds"), "half are faster"),
                        Query(quantile(0.99, "meshd_replication_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "From the decider's commit on. Clients wait for it.",
                ),
                Panel(
                    "Writes that are not everywhere",
                    (
                        Query(f"sum by (instance) (meshd_replication_behind{{{AT}}})", "{{instance}} waits"),
                        Query(rate("meshd_replication_refused_total", "instance"), "{{instance}} refused"),
                    ),
                    "short",
                    "Those that wait for a node, and those that were answered with 503 a second.",
                ),
            ),
        ),
        Row(
            "Origins",
            (
                Panel(
                    "Reads served by the cache",
                    (
                        Query(
                            f"({HITS} or vector(0)) / ({rate('meshd_cache_reads_total')} or vector(0))",
                            "hit ratio",
                        ),
                    ),
                    "percentunit",
                    "Of objects and chunks of buckets with an origin.",
                    width=8,
                ),
                Panel(
                    "Bytes from and to origins",
                    (
                        Query(
                            f"{rate('meshd_origin_bytes_total', 'direction')} or vector(0)", "{{direction}}"
                        ),
                    ),
                    "Bps",
                    "What the cache cannot serve, prefetching, and what is written through and back.",
                    width=8,
                ),
                Panel(
                    "Trouble with origins",
                    (
                        Query(rate("meshd_origin_errors_total", "instance"), "{{instance}} failed requests"),
                        Query(
                            f"sum by (instance) (meshd_origin_dirty_objects{{{AT}}}) or vector(0)",
                            "{{instance}} not written back yet",
                        ),
                    ),
                    "short",
                    "Runbooks of ShardmeshOriginFails and ShardmeshWriteBackStuck.",
                    width=8,
                ),
            ),
        ),
    ),
)
