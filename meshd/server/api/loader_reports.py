"""Reports of training loops, sent in headers of their requests, and counted by the name of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.telemetry import training_metrics
from meshd.telemetry.metric_registry import bounded_label
from meshwire.http_values.mesh_headers import (
    LOADER_POSITION_HEADER,
    LOADER_REPORT_HEADER,
    parse_position,
    parse_report,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan


def note_report(
    headers: Mapping[str, str], plan: Plan, user: str, now: float, address: FrameAddress | None = None
) -> None:
    """Count a report of a loop of this user, if there is a valid one, at `now`, seconds since 1970;
    `address`: the frame that its request asks for.

    A loader of an earlier release does not say what it has received, so what it requests counts instead.
    """
    report = parse_report(headers.get(LOADER_REPORT_HEADER))
    if report is None:
        return
    loader = bounded_label("loader", report.name)
    training_metrics.loader_samples.labels(loader).inc(report.samples)
    training_metrics.loader_seconds.labels(loader).inc(report.seconds)
    training_metrics.loader_waited.labels(loader).inc(report.waited)
    for stage, seconds in report.stalls.items():
        training_metrics.loader_stalls.labels(loader, stage).inc(seconds)
    training_metrics.loader_epoch_samples.labels(loader).set(plan.positions)
    training_metrics.record_loop(loader, plan.hash, user, now)
    received = parse_position(headers.get(LOADER_POSITION_HEADER))
    if received is not None:
        training_metrics.loader_epochs.labels(loader).set(_epochs(plan, received.epoch, received.position))
    if address is not None:
        begin = address.first_position
        requested = _epochs(plan, address.epoch, begin + address.batch)
        training_metrics.loader_requested.labels(loader).set(requested)
        if received is None:
            training_metrics.loader_epochs.labels(loader).set(_epochs(plan, address.epoch, begin))


def _epochs(plan: Plan, epoch: int, position: int) -> float:
    return epoch + min(1.0, position / max(1, plan.positions))
