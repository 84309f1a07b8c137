"""Which view is being read, and how often what it gives was kept.

Law: whoever finds a view by its name says so before its reader is asked; readers do not know names. What is
counted belongs to the task that reads, and to those it starts.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from meshd.telemetry import metrics

_READ: Final = ContextVar("view", default="")


def reading(name: str) -> None:
    """From here on results are of this view."""
    _READ.set(name)


def count(*, kept: bool) -> None:
    """A result was asked for. Both are told from the first one on: a view without hits has a ratio, too."""
    label = metrics.view_label(_READ.get())
    metrics.view_results.labels("hit", label).inc(kept)
    metrics.view_results.labels("miss", label).inc(not kept)
