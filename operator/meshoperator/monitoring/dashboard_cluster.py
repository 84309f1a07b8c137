"""Dashboard of the whole mesh: health, load and latency."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.panels import (
    AT,
    AWAY,
    FAILED,
    FAILED_BY,
    HITS,
    ORIGIN_ASKED,
    ORIGIN_FAILED,
    Dashboard,
    Panel,
    Query,
    Row,
    quantile,
    rate,
)

CLUSTER: Final = Dashboard(
    "shardmesh-cluster",
    "Shardmesh / Cluster",
    "Is the mesh well, how much does it serve, how fast.",
    (
        Row(
            "Is all well",
            (
                Panel(
                    "Alerts",
                    (
                        Query(
                            'count by (alertname) (ALERTS{alertname=~"Shardmesh.+", alertstate="firing"})',
                            "{{alertname}}",
                        ),
                    ),
                    "none",
                    "That fire now, and how many times; docs/runbooks.md has a section of each one's name.",
                    "stat",
                    24,
                    4,
                    limits=(1, 1),
                    empty="none",
                ),
                Panel(
                    "Nodes that answer",
                    (Query('sum(up{job="shardmesh"})'),),
                    "none",
                    "Nodes that Prometheus reaches.",
                    "stat",
                    3,
                    4,
                ),
                Panel(
                    "Nodes that do not answer",
                    (
                        Query('count(up{job="shardmesh"} == 0) or on() vector(0)', "Prometheus"),
                        Query(f"{AWAY} or on() vector(0)", "the others"),
                    ),
                    "none",
                    "Runbooks of ShardmeshNodeDown, and of ShardmeshNodeAway: away or given up by the map.",
                    "stat",
                    5,
                    4,
                    limits=(1, 1),
                ),
                Panel(
                    "Failed requests",
                    (Query(f"{FAILED} / ({rate('meshd_http_requests_total')} > 0) or on() vector(0)"),),
                    "percentunit",
                    "Answers of 500 and above, of all.",
                    "stat",
                    4,
                    4,
                    limits=(0.001, 0.01),
                ),
                Panel(
                    "Requests",
                    (Query(rate("meshd_http_requests_total")),),
                    "reqps",
                    "S3 and native, all nodes chosen.",
                    "stat",
                    3,
                    4,
                ),
                Panel(
                    "Served",
                    (Query(rate("meshd_http_bytes_total", more='direction="out"')),),
                    "Bps",
                    "Bytes of answers' bodies.",
                    "stat",
                    3,
                    4,
                ),
                Panel(
                    "Least room on a disk",
                    (Query(f"min(meshd_store_disk_free_bytes{{{AT}}} / meshd_store_disk_bytes{{{AT}}})"),),
                    "percentunit",
                    "Of the fullest disk. Below 3 % writes are soon refused.",
                    "stat",
                    3,
                    4,
                    limits=(0.15, 0.03),
                ),
                Panel(
                    "Least memory left",
                    (Query(f"min(meshd_memory_free_bytes{{{AT}}} / meshd_memory_bytes{{{AT}}})"),),
                    "percentunit",
                    "Of the node with the least. Runbook of ShardmeshMemoryShort.",
                    "stat",
                    3,
                    4,
                    limits=(0.15, 0.05),
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
                    "Failed requests by operation",
                    (Query(f"{FAILED_BY} or on() vector(0)", "{{instance}} {{operation}} {{status}}"),),
                    "reqps",
                    "Who fails at what: runbook of ShardmeshErrors. /-/plans/ is batches.",
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
                    (Query(rate("meshd_rebalance_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "By nodes that join, return, take a share over, or repair. It gives way to clients.",
                    width=8,
                ),
                Panel(
                    "Movement",
                    (
                        Query(f"max(meshd_cluster_rebalancing{{{AT}}})", "1: the map wants data elsewhere"),
                        Query(
                            f"sum by (instance) (meshd_rebalance_missing{{{AT}}}) or on() vector(0)",
                            "{{instance}} is known to lack",
                        ),
                    ),
                    "short",
                    "Stays at 1 and nothing is fetched: runbook of ShardmeshMovementStuck.",
                    width=8,
                ),
                Panel(
                    "Passed on to the node that answers",
                    (Query(f"{rate('meshd_forwarded_total', 'result')} or on() vector(0)", "{{result}}"),),
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
                Panel(
                    "Certificates that are refused",
                    (
                        Query(
                            f"sum by (instance) (meshd_cluster_certificates_refused{{{AT}}})",
                            "{{instance}} refuses",
                        ),
                    ),
                    "none",
                    "Of other nodes: no new connection to them. Runbook of ShardmeshCertificateRefused.",
                    limits=(1, 1),
                ),
                Panel(
                    "Clocks",
                    (
                        Query(
                            f"abs(sum by (instance) (meshd_cluster_clock_ahead_seconds{{{AT}}}))",
                            "{{instance}}",
                        ),
                    ),
                    "s",
                    "Distance from what most nodes show. From 5 min on nodes refuse each other's requests.",
                    limits=(60, 300),
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
                            f"{HITS} / {rate('meshd_cache_reads_total')} or on() vector(0)",
                            "hit ratio",
                        ),
                    ),
                    "percentunit",
                    "Of objects and chunks of buckets with an origin.",
                    width=6,
                ),
                Panel(
                    "Bytes from and to origins",
                    (
                        Query(
                            f"{rate('meshd_origin_bytes_total', 'direction')} or on() vector(0)",
                            "{{direction}}",
                        ),
                    ),
                    "Bps",
                    "What the cache cannot serve, prefetching, and what is written through and back.",
                    width=6,
                ),
                Panel(
                    "Requests to origins that fail",
                    (
                        Query(
                            f"{ORIGIN_FAILED} / ({ORIGIN_ASKED} > 0) or 0 * {ORIGIN_FAILED}", "{{instance}}"
                        ),
                    ),
                    "percentunit",
                    "Of all. Runbook of ShardmeshOriginFails; the nodes' logs name bucket and reason.",
                    width=6,
                    limits=(0.01, 0.05),
                ),
                Panel(
                    "Not written back yet",
                    (Query(f"sum by (instance) (meshd_origin_dirty_objects{{{AT}}})", "{{instance}}"),),
                    "short",
                    "Objects not at their origin. Does not fall: runbook of ShardmeshWriteBackStuck.",
                    width=6,
                ),
            ),
        ),
    ),
)
