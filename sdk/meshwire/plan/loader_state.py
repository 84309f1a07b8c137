"""Loader state: a training job's position, which a checkpoint saves.

Law: the state counts batches returned, takes about 200 bytes of JSON and is the same on all ranks. Global
batch and world size are not in it, since both may change on resume.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwire.plan.rank_slices import step_count
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    checked_hash,
    checked_integer,
    checked_json,
    checked_object,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.plan.rank_slices import Tail

STATE_VERSION = 1
_FIELDS = ("version", "plan", "snapshot", "seed", "epoch", "position", "skips")


class StateMismatchError(PlanError):
    """The state belongs to other data or another plan. `path` names the first field that differs."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The position of a training job. `position`: the next epoch position to deliver, over all ranks;
    `skips`: the positions that were skipped on request and never delivered. Reports of samples seen subtract
    them.
    """

    plan: str
    snapshot: str
    seed: int
    epoch: int = 0
    position: int = 0
    skips: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, suitable for `torch.save` and `load_state_dict`."""
        return {"version": STATE_VERSION, **asdict(self)}

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
            newer = f"{version} is newer than this SDK supports ({STATE_VERSION}); upgrade shardmesh"
            raise PlanError("state.version", newer)
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
            raise _mismatch(
                "snapshot",
                self.snapshot,
                snapshot,
                "the data changed, or this is another dataset; open it with snapshot=<the state's> to "
                "continue with the old data, or start a new epoch without the state",
            )
        if self.seed != seed:
            advice = f"create the loader with seed={self.seed}, or start without the state"
            raise _mismatch("seed", self.seed, seed, advice)
        if self.plan != plan:
            raise _mismatch(
                "plan",
                self.plan,
                plan,
                "ops, op versions, shuffle, mix, tail or on_bad differ; create the loader as in the job that "
                "wrote the state (ops.pin(op, VERSION) keeps the version of an op), or start without it",
            )
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
        """Return the state after the next global batch of `batch` rows. After the last batch of an epoch, it
        is the beginning of the next epoch."""
        done = self.step(batch) + 1
        if done >= step_count(samples, batch, self.origin(batch), tail):
            return replace(self, epoch=self.epoch + 1, position=0)
        return replace(self, position=self.position + batch)


def _mismatch(field: str, saved: object, current: object, advice: str) -> StateMismatchError:
    return StateMismatchError(f"state.{field}", f"the state has {saved}, this loader {current}: {advice}")
