"""The dashboard of nodes and their disks."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.expressions import AT, quantile, rate
from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row

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
                    "Corrupt reads and disk errors",
                    (
                        Query(
                            f"sum by (instance) (meshd_store_corrupt_reads_total{{{AT}}})",
                            "{{instance}} corrupt reads",
                        ),
                        Query(
                            f"sum by (instance, kind) (meshd_store_disk_errors_total{{{AT}}}) or vector(0)",
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
                            f"sum by (instance, role) (meshd_processes_up{{{AT}}})", "{{instance}} {{role}}"
                        ),
                    ),
                    "none",
                    "Ready processes of each role.",
                ),
                Panel(
                    "Connections turned away",
                    (
                        Query(
                            f"{rate('meshd_http_turned_away_total', 'why')} or vector(0)",
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
