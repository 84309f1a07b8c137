"""The dashboard of nodes and their disks."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.expressions import AT, quantile, rate
from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row


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
