"""Metrics of training: what loaders report of their loops, and what plans cost this node.

Plans are named by the first digits of their hash. The number of plans with a counter of their own is bounded,
as for names that users choose.
"""

from __future__ import annotations

from typing import Final

from meshd.telemetry.metric_registry import OTHER, bounded_label, counter, latest_gauge

DIGITS: Final = 12
_MAX_KNOWN: Final = 400

plan_rows = counter("meshd_plan_rows_total", "Rows rendered for batches of a plan.", "plan")
plan_cpu_seconds = counter(
    "meshd_plan_cpu_seconds_total", "CPU time that transform processes spent on a plan.", "plan"
)
plan_read_seconds = counter(
    "meshd_plan_read_seconds_total",
    "Time that a plan's sources took to read: by transform processes, and ahead of them by disks.",
    "plan",
)
plan_seeks = counter(
    "meshd_plan_seeks_total", "Reads ahead for a plan that did not continue the one before.", "plan"
)
plan_read_ahead = counter(
    "meshd_plan_read_ahead_samples_total", "Samples of a plan that were read ahead.", "plan"
)
plan_frames = counter(
    "meshd_plan_frames_total", "Frames of a plan requested; result is hit, joined or miss.", "plan", "result"
)
# what loaders report about themselves; loader is the name that they choose
loader_samples = counter("meshd_loader_samples_total", "Rows handed to training loops.", "loader")
loader_seconds = counter("meshd_loader_seconds_total", "Time of training loops.", "loader")
loader_waited = counter(
    "meshd_loader_waited_seconds_total", "Time that training loops waited for a batch.", "loader"
)
loader_stalls = counter(
    "meshd_loader_stall_seconds_total",
    "Time that training loops waited, by cause: network, preprocessing or fetch.",
    "loader",
    "stage",
)
loader_plan = latest_gauge(
    "meshd_loader_plan_seconds",
    "Time of a training loop's last report that it reads a plan, in seconds since 1970.",
    "loader",
    "plan",
    "user",
)
loader_epochs = latest_gauge(
    "meshd_loader_epochs",
    "Progress of a training loop in epochs, including the share of the current epoch received.",
    "loader",
)
loader_requested = latest_gauge(
    "meshd_loader_epochs_requested",
    "How far the loader of a training loop has requested data, in epochs.",
    "loader",
)
loader_epoch_samples = latest_gauge(
    "meshd_loader_epoch_samples", "Samples of an epoch of a training loop.", "loader"
)
_known: set[tuple[str, str, str]] = set()


def record_rendering(plan: str, rows: int, cpu: float, reading: float) -> None:
    """Count rows that were rendered for a plan: seconds of processor time, and of reading."""
    label = plan[:DIGITS]
    plan_rows.labels(label).inc(rows)
    plan_cpu_seconds.labels(label).inc(cpu)
    plan_read_seconds.labels(label).inc(reading)


def record_reading_ahead(plan: str, seeks: int, seconds: float) -> None:
    """Count a window of a plan that was read ahead."""
    plan_seeks.labels(plan[:DIGITS]).inc(seeks)
    plan_read_seconds.labels(plan[:DIGITS]).inc(seconds)


def record_loop(loader: str, plan: str, user: str, now: float) -> None:
    """Note that a loop of a user, named by its label, reads a plan at `now`, seconds since 1970."""
    found = loader, bounded_label("plan", plan[:DIGITS]), bounded_label("user", user)
    if OTHER in found or (found not in _known and len(_known) >= _MAX_KNOWN):
        return
    _known.add(found)
    loader_plan.labels(*found).set(now)
