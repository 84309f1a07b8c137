"""Activity of a node in a few numbers, and its last hour: what the console shows without a Prometheus.

The numbers are sums of the node's metrics, over all its processes. The coordinator appends a sample to the
history every ten seconds; the history is a ring of fixed size in the run directory, which every process of
the node may read while it is written.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any, Final

from meshd.telemetry.metric_registry import OTHER, counter_samples, merged_samples

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INTERVAL: Final = 10.0
"""Seconds between two samples of the history."""
_SLOTS: Final = 360

TOTALS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "requests": ("meshd_http_requests_total", {}),
    "bytes_in": ("meshd_http_bytes_total", {"direction": "in"}),
    "bytes_out": ("meshd_http_bytes_total", {"direction": "out"}),
    "rows": ("meshd_batch_rows_served_total", {}),
    "frames_hit": ("meshd_frames_total", {"result": "hit"}),
    "frames_joined": ("meshd_frames_total", {"result": "joined"}),
    "frames_miss": ("meshd_frames_total", {"result": "miss"}),
    "decoded_hit": ("meshd_decoded_cache_reads_total", {"result": "hit"}),
    "decoded_miss": ("meshd_decoded_cache_reads_total", {"result": "miss"}),
    "cache_hit": ("meshd_cache_reads_total", {"result": "hit"}),
    "cache_miss": ("meshd_cache_reads_total", {"result": "miss"}),
    "transformed": ("meshd_transform_samples_total", {}),
    "transform_failures": ("meshd_transform_failures_total", {}),
    "moved_bytes": ("meshd_rebalance_bytes_total", {}),
    "decoded_seconds_saved": ("meshd_decoded_cache_cpu_seconds_saved_total", {}),
    "read_ahead_seconds": ("meshd_read_ahead_seconds_total", {}),
    "transform_processes": ("meshd_processes_up", {"role": "transform"}),
}
"""Counters, and processes that are up, by the name that they have here: the metric, and the labels of the
series that are summed."""
GAUGES: Final[Mapping[str, str]] = {
    "objects": "meshd_store_objects",
    "live_bytes": "meshd_store_live_bytes",
    "dead_bytes": "meshd_store_dead_bytes",
    "uploads": "meshd_store_uploads",
    "quarantined": "meshd_store_quarantined",
    "disks_lost": "meshd_store_disks_lost",
    "disk_bytes": "meshd_store_disk_bytes",
    "disk_free_bytes": "meshd_store_disk_free_bytes",
    "frame_cache_bytes": "meshd_frame_cache_bytes",
    "frame_cache_limit": "meshd_frame_cache_limit_bytes",
    "decoded_cache_bytes": "meshd_decoded_cache_bytes",
    "decoded_cache_limit": "meshd_decoded_cache_limit_bytes",
    "cache_bytes": "meshd_cache_bytes",
    "cache_capacity": "meshd_cache_capacity_bytes",
    "memory_bytes": "meshd_memory_bytes",
    "memory_free_bytes": "meshd_memory_free_bytes",
    "cores": "meshd_cores",
    "connections": "meshd_http_connections",
    "missing_bytes": "meshd_rebalance_missing_bytes",
    "jobs_running": "meshd_jobs_running",
    "read_ahead_bytes": "meshd_read_ahead_window_bytes",
    "decoded_at_quota": "meshd_decoded_cache_buckets_at_quota",
}
_LOADERS: Final[Mapping[str, str]] = {
    "meshd_loader_samples_total": "samples",
    "meshd_loader_seconds_total": "seconds",
    "meshd_loader_waited_seconds_total": "waited",
    "meshd_loader_epochs": "epochs",
    "meshd_loader_epochs_requested": "epochs_requested",
    "meshd_loader_epoch_samples": "epoch_samples",
}
_STALLS: Final = "meshd_loader_stall_seconds_total"
_LOOPS: Final = "meshd_loader_plan_seconds"
_PLANS: Final[Mapping[str, str]] = {
    "meshd_plan_rows_total": "rows",
    "meshd_plan_cpu_seconds_total": "cpu",
    "meshd_plan_read_seconds_total": "reading",
    "meshd_plan_seeks_total": "seeks",
    "meshd_plan_read_ahead_samples_total": "read_ahead",
}
_PLAN_FRAMES: Final = "meshd_plan_frames_total"
_TIERS: Final = {
    "meshd_store_disk_bytes": "bytes",
    "meshd_store_disk_free_bytes": "free",
    "meshd_store_disk_rotational": "rotational",
}
_HISTORY: Final = ("requests", "bytes_in", "bytes_out", "rows", "frames_hit", "frames_joined", "frames_miss")
_SLOT: Final = struct.Struct(f"<q{len(_HISTORY)}d")
_HEAD: Final = struct.Struct("<q")


def collect_history() -> dict[str, float]:
    """Return the totals that the history keeps. Blocking, a fraction of the time of `collect_activity`."""
    totals = dict.fromkeys(_HISTORY, 0.0)
    metrics = {TOTALS[name][0] for name in _HISTORY}
    for metric, labels, value in counter_samples(metrics):
        for name in _HISTORY:
            of, chosen = TOTALS[name]
            if metric == of and chosen.items() <= labels.items():
                totals[name] += value
    return totals


def collect_activity() -> dict[str, Any]:
    """Return totals and gauges by name, `loaders`: by name, what each reports about itself, `plans`: by the
    first digits of its hash, what each costs, and `disks`: by kind, number, size and free space. Blocking,
    some milliseconds."""
    totals, gauges = dict.fromkeys(TOTALS, 0.0), dict.fromkeys(GAUGES, 0.0)
    wanted: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for name, (metric, labels) in TOTALS.items():
        wanted.setdefault(metric, []).append((name, labels))
    named = {metric: name for name, metric in GAUGES.items()}
    loaders: dict[str, dict[str, Any]] = {}
    plans: dict[str, dict[str, float]] = {}
    disks: dict[str, dict[str, float]] = {}
    since: dict[str, float] = {}
    for metric, labels, value in merged_samples():
        if metric in _TIERS:
            disks.setdefault(labels["disk"], dict.fromkeys(_TIERS.values(), 0.0))[_TIERS[metric]] = value
        elif metric in _PLANS or metric == _PLAN_FRAMES:
            plan = plans.setdefault(labels["plan"], dict.fromkeys((*_PLANS.values(), "made", "shared"), 0.0))
            made = "made" if labels.get("result") == "miss" else "shared"
            plan[_PLANS.get(metric, made)] += value
        elif metric == _LOOPS and value > since.get(labels["loader"], 0.0):
            since[labels["loader"]] = value
            _loader(loaders, labels).update(plan=labels["plan"], user=labels["user"])
        for name, chosen in wanted.get(metric, ()):
            if all(labels.get(label) == of for label, of in chosen.items()):
                totals[name] += value
        if metric in named:
            gauges[named[metric]] += value
        elif metric in _LOADERS or metric == _STALLS:
            loader = _loader(loaders, labels)
            if metric == _STALLS:
                loader["stalls"][labels["stage"]] = value
            else:
                loader[_LOADERS[metric]] = value
    plans.pop(OTHER, None)
    kinds = {kind: {"bytes": 0.0, "free": 0.0, "disks": 0.0} for kind in ("rotational", "solid-state")}
    for disk in disks.values():
        kind = kinds["rotational" if disk["rotational"] else "solid-state"]
        for name, gained in (("bytes", disk["bytes"]), ("free", disk["free"]), ("disks", 1.0)):
            kind[name] += gained
    return {"totals": totals, "gauges": gauges, "loaders": loaders, "plans": plans, "disks": kinds}


def _loader(loaders: dict[str, dict[str, Any]], labels: Mapping[str, str]) -> dict[str, Any]:
    empty = {**dict.fromkeys(_LOADERS.values(), 0.0), "stalls": {}, "plan": "", "user": ""}
    return loaders.setdefault(labels["loader"], empty)


class ActivityHistory:
    """The last hour of a node, a sample every ten seconds, in the file `path`. One process appends; the
    number of samples is written after the sample itself, so that a reader sees whole ones."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<ActivityHistory {self._path}>"

    def append(self, now_ms: int, totals: Mapping[str, float]) -> None:
        """Append a sample; the oldest one makes room. Blocking."""
        size = _HEAD.size + _SLOTS * _SLOT.size
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here, not a SIGBUS below
            with mmap.mmap(descriptor, size) as memory:
                (count,) = _HEAD.unpack_from(memory)
                place = _HEAD.size + count % _SLOTS * _SLOT.size
                _SLOT.pack_into(memory, place, now_ms, *(totals[name] for name in _HISTORY))
                _HEAD.pack_into(memory, 0, count + 1)
        finally:
            os.close(descriptor)

    def read(self) -> dict[str, list[float]]:
        """Return the samples, the oldest first: `time` in milliseconds since 1970, and counters by name.
        Empty lists if there are none. Blocking."""
        try:
            data = self._path.read_bytes()
        except OSError:
            data = b""
        found: dict[str, list[float]] = {"time": [], **{name: [] for name in _HISTORY}}
        if len(data) < _HEAD.size + _SLOTS * _SLOT.size:
            return found
        (count,) = _HEAD.unpack_from(data)
        for number in range(max(0, count - _SLOTS + 1), count):  # the oldest may be overwritten meanwhile
            time, *values = _SLOT.unpack_from(data, _HEAD.size + number % _SLOTS * _SLOT.size)
            found["time"].append(time)
            for name, value in zip(_HISTORY, values, strict=True):
                found[name].append(value)
        return found
