"""How much of everything a run does: the real demonstration, and the toy size that the tests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Counts of a run. `digits` None: all of them. `accuracy`: the least held-out share of right answers."""

    digits: int | None = None
    photographs: int = 300
    photo_batch: int = 50
    epochs: int = 12
    batch: int = 64
    jobs: int = 4
    accuracy: float = 0.97


FULL = Scale()
QUICK = Scale(digits=360, photographs=24, photo_batch=8, epochs=3, batch=32, jobs=3, accuracy=0.5)
