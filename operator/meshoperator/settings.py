"""Settings of the operator: a frozen dataclass, documented field by field.

Law: validated once, at construction; passed down as a value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """How the operator watches and how eager it is to move data. Raises ValueError for impossible values."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: the whole cluster."""
    resync_seconds: float = 60.0
    """Every object is looked at again after this long, whatever events said."""
    move_bytes_per_second: int = 200 << 20
    """All movement for the better together, so that training keeps its bandwidth. 0: copies that are there
    stay; what is missing is still made."""
    plan_seconds: float = 300.0
    """From one plan to the next."""
    moves_at_once: int = 4
    """Datasets whose copies are being moved at the same time."""
    high_watermark: float = 0.85
    """Share of a node's capacity above which nothing new is placed on it."""
    move_gain: float = 0.2
    """A copy moves only for a score better by this much: without it, small changes make data wander."""

    copy_gpus: float = 4.0
    """One more copy than asked for is made for this many GPUs that come near it (on its host: 1 each, in its
    rack 0.6, in its zone 0.3); it goes again when it serves less than half as many."""

    @property
    def move_bytes(self) -> int:
        """What may move by one plan."""
        return int(self.move_bytes_per_second * self.plan_seconds)

    def __post_init__(self) -> None:
        if not 0 < self.high_watermark <= 1:
            raise ValueError("high_watermark must be above 0 and at most 1")
        if self.resync_seconds <= 0 or self.plan_seconds <= 0:
            raise ValueError("resync_seconds and plan_seconds must be above 0")
        if self.moves_at_once < 1 or self.move_bytes_per_second < 0:
            raise ValueError("moves_at_once must be at least 1, move_bytes_per_second at least 0")
        if self.move_gain < 0 or self.copy_gpus <= 0:
            raise ValueError("move_gain must not be negative, copy_gpus must be above 0")
