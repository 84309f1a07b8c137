"""The dashboard of datasets: what is read of them, and what is cached."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.expressions import AT, rate
from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row

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
