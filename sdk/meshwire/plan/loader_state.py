"""Loader state and rank slices: a training job's position, and which positions each step and rank holds.

Law: the state counts batches returned, takes about 200 bytes of JSON and is the same on all ranks. Global
batch and world size are not in it, since both may change on resume.
Invariant: the ranks' slices in rank order are the global batch, for every world size, and the number of
steps does not depend on the rank.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    checked_integer,
    checked_json,
    checked_object,
    checked_text,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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


STATE_VERSION = 1
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("version", "plan", "snapshot", "seed", "epoch", "position", "skips")


class StateMismatchError(PlanError):
    """The state belongs to other data or another plan. `path` names the first field that differs."""


def checked_hash(value: Any, path: str) -> str:
    """Return `value` if it is a SHA-256 in lower-case hex. Raises PlanError."""
    text = checked_text(value, path, at_most=64)
    if not _HASH.fullmatch(text):
        raise PlanError(path, f"expected 64 lower-case hex digits, got {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The position of a training job. `position`: the next epoch position to deliver, over all ranks;
    `skips`: positions skipped so far on request (never delivered), which reports of samples seen subtract.
    """

    plan: str
    snapshot: str
    seed: int
    epoch: int = 0
    position: int = 0
    skips: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, suitable for `torch.save` and `load_state_dict`."""
        return {
            "version": STATE_VERSION,
            "plan": self.plan,
            "snapshot": self.snapshot,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "skips": self.skips,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, source: bytes | str | Mapping[str, Any]) -> LoaderState:
        """Parse a state from JSON text or a plain dict. Raises PlanError with the path of the bad field."""
        if isinstance(source, (bytes, str)):
            value = read_json(source, "state")
        else:
            value = checked_json(dict(source), "state")
        document = checked_object(value, "state", _FIELDS)
        version = checked_integer(document.get("version", 1), "state.version", 1, MAX_INTEGER)
        if version != STATE_VERSION:
            raise PlanError(
                "state.version", f"{version} is newer than this SDK supports (1); upgrade shardmesh"
            )
        return cls(
            checked_hash(required_field(document, "plan", "state"), "state.plan"),
            checked_hash(required_field(document, "snapshot", "state"), "state.snapshot"),
            checked_integer(required_field(document, "seed", "state"), "state.seed", 0, MAX_INTEGER),
            checked_integer(document.get("epoch", 0), "state.epoch", 0, MAX_INTEGER),
            checked_integer(document.get("position", 0), "state.position", 0, MAX_INTEGER),
            checked_integer(document.get("skips", 0), "state.skips", 0, MAX_INTEGER),
        )

    def check(self, *, plan: str, snapshot: str, seed: int, samples: int | None = None) -> None:
        """Raise StateMismatchError naming the field that differs, and what to do about it."""
        if self.snapshot != snapshot:
            _differ(
                "snapshot", self.snapshot, snapshot,
                "the data changed, or this is another dataset; open it with snapshot=<the state's> to "
                "continue with the old data, or start a new epoch without the state",
            )  # fmt: skip
        if self.seed != seed:
            _differ(
                "seed",
                self.seed,
                seed,
                f"create the loader with seed={self.seed}, or start without the state",
            )
        if self.plan != plan:
            _differ(
                "plan", self.plan, plan,
                "ops, op versions, shuffle, mix, tail or on_bad differ; create the loader as in the job that "
                "wrote the state (ops.pin(op, VERSION) keeps the version of an op), or start without it",
            )  # fmt: skip
        if samples is not None and self.position > samples:
            raise StateMismatchError(
                "state.position",
                f"{self.position} is beyond the epoch's {samples} positions; the state is damaged",
            )

    def origin(self, batch: int) -> int:
        """Return the epoch position where step 0 starts if the epoch continues in batches of `batch`."""
        return self.position % batch

    def step(self, batch: int) -> int:
        """Return the next step, counted from `origin(batch)`."""
        return self.position // batch

    def after_batch(self, batch: int, samples: int, tail: Tail) -> LoaderState:
        """Return the state after the next global batch of `batch` rows; after the last one, that is the
        next epoch.
        """
        done = self.step(batch) + 1
        if done >= step_count(samples, batch, self.origin(batch), tail):
            return replace(self, epoch=self.epoch + 1, position=0)
        return replace(self, position=self.position + batch)


def _differ(field: str, saved: object, current: object, advice: str) -> None:
    message = f"the state has {saved}, this loader {current}: {advice}"
    raise StateMismatchError(f"state.{field}", message)
