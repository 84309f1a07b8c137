"""The dashboards: cluster, training input, nodes and disks, datasets.

Law: a dashboard answers one reader's questions from the top down: is all well, what is it doing, what limits
it. Every expression gives data from a node that has work; a test asks a real Prometheus.
"""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row

_AT: Final = 'instance=~"$instance"'
_R: Final = "$__rate_interval"


def _rate(metric: str, *labels: str, more: str = "") -> str:
    """Increase a second, summed by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    chosen = f"{_AT}, {more}" if more else _AT
    return f"sum{by} (rate({metric}{{{chosen}}}[{_R}]))"


def _quantile(q: float, metric: str, *labels: str, more: str = "") -> str:
    return f"histogram_quantile({q}, {_rate(f'{metric}_bucket', *labels, 'le', more=more)})"


_OP_TIME: Final = _rate("meshd_op_seconds_total", "op")
_FAILED: Final = _rate("meshd_http_requests_total", more='status=~"5.."')
_KEPT: Final = 'result="hit"'
_HITS: Final = _rate("meshd_cache_reads_total", more='result="hit"')

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
                    (Query(f"({_FAILED} or vector(0)) / {_rate('meshd_http_requests_total')}"),),
                    "percentunit",
                    "Answers of 500 and above, of all.",
                    "stat",
                    5,
                    4,
                    limits=(0.001, 0.01),
                ),
                Panel(
                    "Requests",
                    (Query(_rate("meshd_http_requests_total")),),
                    "reqps",
                    "S3 and native, all nodes chosen.",
                    "stat",
                    5,
                    4,
                ),
                Panel(
                    "Served",
                    (Query(_rate("meshd_http_bytes_total", more='direction="out"')),),
                    "Bps",
                    "Bytes of answers' bodies.",
                    "stat",
                    5,
                    4,
                ),
                Panel(
                    "Least room on a disk",
                    (Query(f"min(meshd_store_disk_free_bytes{{{_AT}}} / meshd_store_disk_bytes{{{_AT}}})"),),
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
                    (Query(_rate("meshd_http_requests_total", "operation"), "{{operation}}"),),
                    "reqps",
                    "What clients ask for.",
                    stacked=True,
                ),
                Panel(
                    "Bytes",
                    (Query(_rate("meshd_http_bytes_total", "direction"), "{{direction}}"),),
                    "Bps",
                    "Bodies taken in and sent out.",
                ),
                Panel(
                    "Answers by status",
                    (Query(_rate("meshd_http_requests_total", "status"), "{{status}}"),),
                    "reqps",
                    "403 and 404 are mostly clients' doing; 503 asks for patience; other 5xx are faults.",
                    stacked=True,
                ),
                Panel(
                    "Time of an answer",
                    (
                        Query(_quantile(0.5, "meshd_http_request_seconds"), "half are faster"),
                        Query(_quantile(0.99, "meshd_http_request_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "From the head of a request to the last byte of its answer; slow clients count.",
                ),
                Panel(
                    "99 % by operation",
                    (Query(_quantile(0.99, "meshd_http_request_seconds", "operation"), "{{operation}}"),),
                    "s",
                    "Which operation is slow.",
                ),
                Panel(
                    "Connections",
                    (Query(f"sum by (instance) (meshd_http_connections{{{_AT}}})", "{{instance}}"),),
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
                    (Query(f"max by (state) (meshd_cluster_nodes{{{_AT}}})", "{{state}}"),),
                    "none",
                    "By the map. `mesh cluster status` names them. away: the runbook of ShardmeshNodeAway.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Copies that are missing",
                    (
                        Query(f"max(meshd_cluster_slots_short{{{_AT}}})", "slots with too few copies"),
                        Query(f"max(meshd_cluster_slots_lost{{{_AT}}})", "slots that nobody can answer for"),
                    ),
                    "short",
                    "Of all slots of the map (16,384, if you did not choose). 0 when all is well; falls to 0 "
                    "while a lost node's share is made again.",
                    width=8,
                ),
                Panel(
                    "Control store and map",
                    (
                        Query(f"min(meshd_cluster_lease_held{{{_AT}}})", "1: every node reaches it"),
                        Query(
                            f"max(meshd_cluster_map_version{{{_AT}}})"
                            f" - min(meshd_cluster_map_version{{{_AT}}} > 0)",
                            "versions between newest and oldest map",
                        ),
                    ),
                    "none",
                    "0 and a growing distance: nodes that cannot reach the control store.",
                    width=8,
                ),
                Panel(
                    "Fetched from other nodes to be kept",
                    (Query(_rate("meshd_moves_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "By nodes that join, return, take a share over, or repair. It gives way to clients.",
                    width=8,
                ),
                Panel(
                    "Movement",
                    (
                        Query(f"max(meshd_cluster_moving{{{_AT}}})", "1: the map wants data elsewhere"),
                        Query(
                            f"sum by (instance) (meshd_moves_lacking{{{_AT}}}) or vector(0)",
                            "{{instance}} is known to lack",
                        ),
                    ),
                    "short",
                    "Stays at 1 and nothing is fetched: runbook of ShardmeshMovementStuck.",
                    width=8,
                ),
                Panel(
                    "Passed on to the node that answers",
                    (Query(f"{_rate('meshd_forwarded_total', 'result')} or vector(0)", "{{result}}"),),
                    "reqps",
                    "misdirected: by another map, asked again; unreachable: another copy was asked. Clients "
                    "that know the map go straight to the owner.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Until a write is at all its nodes",
                    (
                        Query(_quantile(0.5, "meshd_replication_seconds"), "half are faster"),
                        Query(_quantile(0.99, "meshd_replication_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "From the decider's commit on. Clients wait for it.",
                ),
                Panel(
                    "Writes that are not everywhere",
                    (
                        Query(f"sum by (instance) (meshd_replication_behind{{{_AT}}})", "{{instance}} waits"),
                        Query(_rate("meshd_replication_refused_total", "instance"), "{{instance}} refused"),
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
                            f"({_HITS} or vector(0)) / ({_rate('meshd_cache_reads_total')} or vector(0))",
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
                            f"{_rate('meshd_origin_bytes_total', 'direction')} or vector(0)", "{{direction}}"
                        ),
                    ),
                    "Bps",
                    "What the cache cannot serve, prefetching, and what is written through and back.",
                    width=8,
                ),
                Panel(
                    "Trouble with origins",
                    (
                        Query(_rate("meshd_origin_errors_total", "instance"), "{{instance}} failed requests"),
                        Query(
                            f"sum by (instance) (meshd_origin_dirty_objects{{{_AT}}}) or vector(0)",
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


TRAINING: Final = Dashboard(
    "shardmesh-training",
    "Shardmesh / Training input",
    "Which jobs starve, and why.",
    (
        Row(
            "Jobs",
            (
                Panel(
                    "Share of time that jobs wait for data",
                    (
                        Query(
                            f"{_rate('meshd_loader_waited_seconds_total', 'loader')}"
                            f" / {_rate('meshd_loader_seconds_total', 'loader')}",
                            "{{loader}}",
                        ),
                    ),
                    "percentunit",
                    "What the job's own loader measures. Near 0: the accelerators are busy. High: see below "
                    "what limits it.",
                    limits=(0.05, 0.2),
                ),
                Panel(
                    "Samples a second",
                    (Query(_rate("meshd_loader_samples_total", "loader"), "{{loader}}"),),
                    "short",
                    "Rows that loaders handed to training loops.",
                ),
            ),
        ),
        Row(
            "What limits them",
            (
                Panel(
                    "What jobs wait for",
                    (
                        Query(
                            _rate("meshd_loader_stall_seconds_total", "loader", "stage"),
                            "{{loader}} {{stage}}",
                        ),
                    ),
                    "s",
                    "Seconds a second, of all ranks. `mesh doctor -- COMMAND` finds the cause and the fix.",
                    width=24,
                ),
                Panel(
                    "Rows served",
                    (Query(_rate("meshd_batch_rows_served_total", "instance"), "{{instance}}"),),
                    "short",
                    "Rows of batches a second, by node.",
                    width=8,
                ),
                Panel(
                    "Frames by how they came about",
                    (Query(_rate("meshd_frames_total", "result"), "{{result}}"),),
                    "ops",
                    "hit: kept from before; joined: another job had asked; miss: computed. Jobs that share "
                    "a plan should mostly hit.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Rows that wait for a transform process",
                    (Query(f"sum by (instance) (meshd_transform_queue_rows{{{_AT}}})", "{{instance}}"),),
                    "short",
                    "Always more than 0: decoding limits. Add compute nodes, or make the ops cheaper.",
                    width=8,
                ),
                Panel(
                    "Processor time by op",
                    (Query(_rate("meshd_op_seconds_total", "op"), "{{op}}"),),
                    "short",
                    "Processors kept busy by each op. Ops that are done in one step stand together.",
                    stacked=True,
                ),
                Panel(
                    "Time of an op for a sample",
                    (
                        Query(
                            f"{_OP_TIME} / {_rate('meshd_op_calls_total', 'op')}",
                            "{{op}}",
                        ),
                    ),
                    "s",
                    "Which op is dear.",
                ),
                Panel(
                    "Bad samples",
                    (Query(_rate("meshd_transform_failures_total", "op"), "{{op}}"),),
                    "short",
                    "Samples an op could not take. `mesh bad ls` names them, `mesh replay` does one again.",
                    width=8,
                ),
                Panel(
                    "Memory of finished batches",
                    (Query(f"sum by (instance) (meshd_frame_cache_bytes{{{_AT}}})", "{{instance}}"),),
                    "bytes",
                    "Shared memory; --frame-cache bounds it.",
                    width=8,
                ),
                Panel(
                    "Results of views",
                    (Query(_rate("meshd_view_results_total", "result"), "{{result}}"),),
                    "ops",
                    "hit: kept from before; miss: computed.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Results of views that were kept",
                    (
                        Query(
                            f"{_rate('meshd_view_results_total', 'view', more=_KEPT)}"
                            f" / {_rate('meshd_view_results_total', 'view')}",
                            "{{view}}",
                        ),
                    ),
                    "percentunit",
                    "By view. Low for long: --view-cache is too small for what is read again.",
                    width=8,
                ),
            ),
        ),
    ),
)

NODES: Final = Dashboard(
    "shardmesh-nodes",
    "Shardmesh / Nodes and disks",
    "What each node and disk does, and how full it is.",
    (
        Row(
            "Disks",
            (
                Panel(
                    "Room left",
                    (
                        Query(
                            f"meshd_store_disk_free_bytes{{{_AT}}} / meshd_store_disk_bytes{{{_AT}}}",
                            "{{instance}} {{disk}}",
                        ),
                    ),
                    "percentunit",
                    "Of each disk. At 3 % writes are soon refused.",
                    limits=(0.15, 0.03),
                ),
                Panel(
                    "Bytes in the store",
                    (
                        Query(f"sum(meshd_store_live_bytes{{{_AT}}})", "in use"),
                        Query(f"sum(meshd_store_dead_bytes{{{_AT}}})", "to be won by compaction"),
                    ),
                    "bytes",
                    "Dead bytes are of deleted and replaced objects; compaction wins them.",
                    stacked=True,
                ),
                Panel(
                    "Bytes written",
                    (Query(_rate("meshd_store_written_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "To data files: clients' bytes, and what compaction and movement write again.",
                    width=8,
                ),
                Panel(
                    "Time of fdatasync",
                    (
                        Query(_quantile(0.5, "meshd_store_sync_seconds"), "half are faster"),
                        Query(_quantile(0.99, "meshd_store_sync_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "A write is acknowledged after one. Slow: the disk is busy, or failing.",
                    width=8,
                ),
                Panel(
                    "Writes made durable together",
                    (
                        Query(
                            f"{_rate('meshd_store_writes_total', 'instance')}"
                            f" / {_rate('meshd_store_commits_total', 'instance')}",
                            "{{instance}}",
                        ),
                    ),
                    "short",
                    "Requests that share an fdatasync. More under more load: that is as it should be.",
                    width=8,
                ),
            ),
        ),
        Row(
            "Trouble",
            (
                Panel(
                    "Corrupt reads and disk errors",
                    (
                        Query(
                            f"sum by (instance) (meshd_store_corrupt_reads_total{{{_AT}}})",
                            "{{instance}} corrupt reads",
                        ),
                        Query(
                            f"sum by (instance, kind) (meshd_store_disk_errors_total{{{_AT}}}) or vector(0)",
                            "{{instance}} disk {{kind}}",
                        ),
                    ),
                    "none",
                    "Since the nodes started. Anything that grows wants a look at the runbooks.",
                ),
                Panel(
                    "Processes",
                    (
                        Query(
                            f"sum by (instance, role) (meshd_processes_up{{{_AT}}})", "{{instance}} {{role}}"
                        ),
                    ),
                    "none",
                    "Ready processes of each role.",
                ),
                Panel(
                    "Connections turned away",
                    (
                        Query(
                            f"{_rate('meshd_http_turned_away_total', 'why')} or vector(0)",
                            "{{why}}",
                        ),
                    ),
                    "ops",
                    "full: as many as allowed; slow head, stalled: clients that do not go on.",
                ),
                Panel(
                    "Assembly jobs",
                    (
                        Query(f"sum(meshd_jobs_running{{{_AT}}})", "running"),
                        Query(f"sum(meshd_jobs_waiting{{{_AT}}})", "waiting"),
                    ),
                    "none",
                    "`mesh job ls` has names and progress.",
                ),
            ),
        ),
    ),
)

DATASETS: Final = Dashboard(
    "shardmesh-datasets",
    "Shardmesh / Datasets",
    "What is stored, and what is made of it.",
    (
        Row(
            "Stored",
            (
                Panel(
                    "Objects",
                    (Query(f"sum by (instance) (meshd_store_objects{{{_AT}}})", "{{instance}}"),),
                    "short",
                    "Current objects, copies counted.",
                    width=8,
                ),
                Panel(
                    "Older versions and delete markers",
                    (Query(f"sum by (instance) (meshd_store_versions{{{_AT}}})", "{{instance}}"),),
                    "short",
                    "Of buckets with versioning. Lifecycle rules remove them.",
                    width=8,
                ),
                Panel(
                    "Uploads in progress",
                    (Query(f"sum by (instance) (meshd_store_uploads{{{_AT}}})", "{{instance}}"),),
                    "short",
                    "Multipart uploads that nobody has completed yet.",
                    width=8,
                ),
            ),
        ),
        Row(
            "Made of it",
            (
                Panel(
                    "Results of views kept",
                    (Query(f"sum by (instance) (meshd_view_result_bytes{{{_AT}}})", "{{instance}}"),),
                    "bytes",
                    "--view-cache bounds it; what was not read for longest goes first.",
                    width=8,
                ),
                Panel(
                    "Written by jobs",
                    (Query(_rate("meshd_job_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "Shards that `mesh shard`, `reshard` and the like write.",
                    width=8,
                ),
                Panel(
                    "Gathered items",
                    (Query(_rate("meshd_gather_items_total", "result"), "{{result}}"),),
                    "ops",
                    "Objects, members and ranges handed out by gather.",
                    width=8,
                    stacked=True,
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = (CLUSTER, TRAINING, NODES, DATASETS)
