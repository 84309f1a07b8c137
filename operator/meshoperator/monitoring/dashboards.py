"""Dashboards: training input, nodes and disks, datasets, and the list of all.

Law: a dashboard answers one reader's questions from the top down: is all well, what is it doing, what
limits it. Every expression yields data from a busy node; a test asks a real Prometheus.
"""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.dashboard_cluster import CLUSTER
from meshoperator.monitoring.panels import (
    ASKED_BATCHES,
    AT,
    KEPT,
    OP_TIME,
    REFUSED_BATCHES,
    TRANSFORMS,
    Dashboard,
    Panel,
    Query,
    Row,
    quantile,
    rate,
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
                    (Query(f"sum by (instance) (meshd_store_objects{{{AT}}})", "{{instance}}"),),
                    "short",
                    "Current objects, copies counted.",
                    width=8,
                ),
                Panel(
                    "Older versions and delete markers",
                    (Query(f"sum by (instance) (meshd_store_versions{{{AT}}})", "{{instance}}"),),
                    "short",
                    "Of buckets with versioning. Lifecycle rules remove them.",
                    width=8,
                ),
                Panel(
                    "Uploads in progress",
                    (Query(f"sum by (instance) (meshd_store_uploads{{{AT}}})", "{{instance}}"),),
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
                    (Query(f"sum by (instance) (meshd_view_result_bytes{{{AT}}})", "{{instance}}"),),
                    "bytes",
                    "--view-cache bounds it; what was not read for longest goes first.",
                    width=8,
                ),
                Panel(
                    "Written by jobs",
                    (Query(rate("meshd_job_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "Shards that `mesh shard`, `reshard` and the like write.",
                    width=8,
                ),
                Panel(
                    "Gathered items",
                    (Query(rate("meshd_gather_items_total", "result"), "{{result}}"),),
                    "ops",
                    "Objects, members and ranges handed out by gather.",
                    width=8,
                    stacked=True,
                ),
            ),
        ),
    ),
)


def _lately(counter: str, *labels: str) -> str:
    """By how much a counter of nodes grew within the hour: what is long over is no trouble. 0 of what never
    happened."""
    return f"sum by ({', '.join(('instance', *labels))}) (increase({counter}{{{AT}}}[1h])) or on() vector(0)"


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
                            f"meshd_store_disk_free_bytes{{{AT}}} / meshd_store_disk_bytes{{{AT}}}",
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
                        Query(f"sum(meshd_store_live_bytes{{{AT}}})", "in use"),
                        Query(f"sum(meshd_store_dead_bytes{{{AT}}})", "to be won by compaction"),
                    ),
                    "bytes",
                    "Dead bytes are of deleted and replaced objects; compaction wins them.",
                    stacked=True,
                ),
                Panel(
                    "Bytes written",
                    (Query(rate("meshd_store_written_bytes_total", "instance"), "{{instance}}"),),
                    "Bps",
                    "To data files: clients' bytes, and what compaction and movement write again.",
                    width=8,
                ),
                Panel(
                    "Time of fdatasync",
                    (
                        Query(quantile(0.5, "meshd_store_sync_seconds"), "half are faster"),
                        Query(quantile(0.99, "meshd_store_sync_seconds"), "99 % are faster"),
                    ),
                    "s",
                    "A write is acknowledged after one. Slow: the disk is busy, or failing.",
                    width=8,
                ),
                Panel(
                    "Writes made durable together",
                    (
                        Query(
                            f"{rate('meshd_store_writes_total', 'instance')}"
                            f" / {rate('meshd_store_commits_total', 'instance')}",
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
                    "Disks in trouble",
                    (
                        Query(f"sum by (instance) (meshd_store_disks_lost{{{AT}}})", "{{instance}} lost"),
                        Query(_lately("meshd_store_disk_errors_total", "kind"), "{{instance}} {{kind}}"),
                    ),
                    "none",
                    "Disks out of service, and errors of disks within the hour: full or failed.",
                    limits=(1, 1),
                ),
                Panel(
                    "Damaged bytes",
                    (
                        Query(
                            f"sum by (instance) (meshd_store_quarantined{{{AT}}})", "{{instance}} not mended"
                        ),
                        Query(_lately("meshd_store_corrupt_reads_total"), "{{instance}} read"),
                    ),
                    "none",
                    "Versions that no other node could give, and reads of such bytes within the hour.",
                    limits=(1, 1),
                ),
                Panel(
                    "Processes",
                    (
                        Query(
                            f"sum by (instance, role) (meshd_processes_up{{{AT}}})", "{{instance}} {{role}}"
                        ),
                    ),
                    "none",
                    "Ready processes of each role. The mover is there while data moves.",
                ),
                Panel(
                    "Processes that died",
                    (Query(_lately("meshd_process_restarts_total", "role"), "{{instance}} {{role}}"),),
                    "none",
                    "Within the hour. Runbook of ShardmeshProcessesRestart.",
                    limits=(1, 4),
                ),
                Panel(
                    "Memory left",
                    (Query(f"meshd_memory_free_bytes{{{AT}}} / meshd_memory_bytes{{{AT}}}", "{{instance}}"),),
                    "percentunit",
                    "Of the machine, or of the limit set for the node. Runbook of ShardmeshMemoryShort.",
                    limits=(0.15, 0.05),
                ),
                Panel(
                    "Memory of processes",
                    (
                        Query(
                            f"sum by (instance, role) (meshd_process_memory_bytes{{{AT}}})",
                            "{{instance}} {{role}}",
                        ),
                    ),
                    "bytes",
                    "Of each role together. Finished batches are not in it: --frame-cache bounds them.",
                ),
                Panel(
                    "Connections turned away",
                    (
                        Query(
                            f"{rate('meshd_http_turned_away_total', 'why')} or on() vector(0)",
                            "{{why}}",
                        ),
                    ),
                    "ops",
                    "full: as many as allowed; slow head, stalled: clients that do not go on.",
                ),
                Panel(
                    "Assembly jobs",
                    (
                        Query(f"sum(meshd_jobs_running{{{AT}}})", "running"),
                        Query(f"sum(meshd_jobs_waiting{{{AT}}})", "waiting"),
                    ),
                    "none",
                    "`mesh job ls` has names and progress.",
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
                            f"{rate('meshd_loader_waited_seconds_total', 'loader')}"
                            f" / {rate('meshd_loader_seconds_total', 'loader')}",
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
                    (Query(rate("meshd_loader_samples_total", "loader"), "{{loader}}"),),
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
                            rate("meshd_loader_stall_seconds_total", "loader", "stage"),
                            "{{loader}} {{stage}}",
                        ),
                    ),
                    "s",
                    "Seconds a second, of all ranks. `mesh doctor -- COMMAND` finds the cause and the fix.",
                    width=24,
                ),
                Panel(
                    "Rows served",
                    (Query(rate("meshd_batch_rows_served_total", "instance"), "{{instance}}"),),
                    "short",
                    "Rows of batches a second, by node.",
                    width=8,
                ),
                Panel(
                    "Frames by how they came about",
                    (Query(rate("meshd_frames_total", "result"), "{{result}}"),),
                    "ops",
                    "hit: kept from before; joined: another job had asked; miss: computed. Jobs that share "
                    "a plan should mostly hit.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Rows that wait for a transform process",
                    (Query(f"sum by (instance) (meshd_transform_queue_rows{{{AT}}})", "{{instance}}"),),
                    "short",
                    "With those under way. Never 0: decoding limits, runbook of ShardmeshTransformsQueue.",
                    width=8,
                ),
                Panel(
                    "Transform processes that are busy",
                    (
                        Query(
                            f"{rate('meshd_transform_seconds_sum', 'instance')} / {TRANSFORMS}",
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                    "Of those that run. Near 1: decoding limits.",
                    limits=(0.8, 0.95),
                ),
                Panel(
                    "Requests for batches that are put off",
                    (
                        Query(
                            f"{REFUSED_BATCHES} / ({ASKED_BATCHES} > 0) or 0 * {ASKED_BATCHES}",
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                    "With 503, of all. Runbook of ShardmeshBatchesRefused.",
                    limits=(0.01, 0.1),
                ),
                Panel(
                    "Processor time by op",
                    (Query(rate("meshd_op_seconds_total", "op"), "{{op}}"),),
                    "short",
                    "Processors kept busy by each op. Ops that are done in one step stand together.",
                    stacked=True,
                ),
                Panel(
                    "Time of an op for a sample",
                    (
                        Query(
                            f"{OP_TIME} / {rate('meshd_op_calls_total', 'op')}",
                            "{{op}}",
                        ),
                    ),
                    "s",
                    "Which op is dear.",
                ),
                Panel(
                    "Bad samples",
                    (Query(rate("meshd_transform_failures_total", "op"), "{{op}}"),),
                    "short",
                    "Samples an op could not take. `mesh bad ls` names them, `mesh replay` does one again.",
                    width=8,
                ),
                Panel(
                    "Memory of finished batches",
                    (Query(f"sum by (instance) (meshd_frame_cache_bytes{{{AT}}})", "{{instance}}"),),
                    "bytes",
                    "Shared memory; --frame-cache bounds it.",
                    width=8,
                ),
                Panel(
                    "Results of views",
                    (Query(rate("meshd_view_results_total", "result"), "{{result}}"),),
                    "ops",
                    "hit: kept from before; miss: computed.",
                    width=8,
                    stacked=True,
                ),
                Panel(
                    "Results of views that were kept",
                    (
                        Query(
                            f"{rate('meshd_view_results_total', 'view', more=KEPT)}"
                            f" / {rate('meshd_view_results_total', 'view')}",
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


DASHBOARDS: Final = (CLUSTER, TRAINING, NODES, DATASETS)
