"""The dashboard of training input: batches, transforms, what training waits for."""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.expressions import (
    ASKED_BATCHES,
    AT,
    KEPT,
    OP_TIME,
    REFUSED_BATCHES,
    TRANSFORMS,
    rate,
)
from meshoperator.monitoring.panels import Dashboard, Panel, Query, Row

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
