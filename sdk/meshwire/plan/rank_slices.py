"""Rank slices: the epoch positions of each step and rank.

Invariant: the ranks' slices in rank order are the global batch, for every world size, and the number of
steps does not depend on the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

Tail = Literal["pad", "drop", "ragged"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "ragged")
MAX_BATCH = 1 << 24
MAX_WORLD = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RankSlice:
    """The rows of one rank in one step. `positions` int64[k]: epoch positions, padding wrapped to the
    beginning of the epoch; `pad` bool[k]: rows that only fill up the last batch; `first`: row of the global
    batch where the slice begins.
    """

    positions: npt.NDArray[np.int64]
    pad: npt.NDArray[np.bool_]
    first: int

    def __len__(self) -> int:
        return self.positions.size


def _check_geometry(n: int, batch: int, origin: int) -> None:
    if not 1 <= batch <= MAX_BATCH:
        raise PlanError("batch", f"{batch} is outside 1…{MAX_BATCH}")
    if not 0 <= origin <= n:
        raise PlanError("origin", f"{origin} is outside 0…{n}, the positions of the epoch")


def step_count(n: int, batch: int, origin: int, tail: Tail) -> int:
    """Return the steps of an epoch of n positions cut into batches from position `origin`; the same on
    every rank.

    Raises PlanError (`batch`, `origin`) for values out of range.
    """
    _check_geometry(n, batch, origin)
    whole, rest = divmod(n - origin, batch)
    return whole + (1 if rest and tail != "drop" else 0)


def batch_rows(n: int, batch: int, origin: int, step: int, tail: Tail) -> int:
    """Return the rows of the global batch of a step, padding included. Raises PlanError (`step`) outside
    the epoch."""
    count = step_count(n, batch, origin, tail)
    if not 0 <= step < count:
        raise PlanError(
            "step", f"{step} is outside the epoch, which has {count} steps of {batch} from {origin} on"
        )
    return batch if tail == "pad" else min(batch, n - origin - step * batch)


def rank_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return (first, end) of a rank's rows within a global batch: ⌊r·rows/W⌋ to ⌊(r+1)·rows/W⌋. May be
    empty."""
    if not 1 <= world <= MAX_WORLD:
        raise PlanError("world", f"{world} is outside 1…{MAX_WORLD}")
    if not 0 <= rank < world:
        raise PlanError("rank", f"{rank} is outside 0…{world - 1} (world={world})")
    return rank * rows // world, (rank + 1) * rows // world


def rank_slice(n: int, batch: int, origin: int, step: int, rank: int, world: int, tail: Tail) -> RankSlice:
    """Return the rows of `rank` of `world` in a step; rank 0 of 1 has the whole global batch.

    Step t covers positions [origin + t·batch, origin + (t+1)·batch). Raises PlanError naming the value out
    of range.
    """
    rows = batch_rows(n, batch, origin, step, tail)
    first, end = rank_rows(rows, rank, world)
    start = origin + step * batch
    unwrapped = np.arange(start + first, start + end, dtype=np.int64)
    pad = unwrapped >= n
    return RankSlice(unwrapped % n, pad, first)
