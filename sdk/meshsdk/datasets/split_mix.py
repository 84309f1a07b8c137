"""Splits a dataset into train and validation parts by a hash; the weights of a mix of datasets, as values.

Law: the split of a sample depends only on the value it is split by, the seed and the fractions, so it does
not change when other samples are added or removed. `meshwire` computes which sample each position of a mix
has.
Invariant: the splits of one call have no sample in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from meshsdk.earlier_paths import earlier_names
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.plan.mix import BLOCK, MAX_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Divisible(Protocol):
    """What `split` needs of a dataset."""

    def __len__(self) -> int: ...

    def _filtered(self, expression: str, deadline: float) -> Self: ...


Part = TypeVar("Part", bound=Divisible)
_VALUES = 1 << 53  # the values of `hash` are below this


def split(
    dataset: Part,
    fractions: Mapping[str, float],
    by: str,
    seed: int,
    deadline: float,
    done: Callable[[str], None] = lambda _: None,
) -> dict[str, Part]:
    """Split a dataset as `Dataset.split` does; `done` is called with the name of each finished part."""
    edges = _edges(fractions)
    key = f'hash("{seed}:" + text({by}))'
    parts = {}
    for name, (low, high) in zip(fractions, itertools.pairwise(edges), strict=True):
        try:
            parts[name] = dataset._filtered(f"{key} >= {low} and {key} < {high}", deadline)
        except NotFoundError as error:
            if error.code != "NoSuchKey":  # another cause, such as a deleted dataset
                raise
            raise NotFoundError(
                f"split: none of the {len(dataset)} samples is in {name!r} ({fractions[name]}), by {by!r}: "
                "use a larger fraction or another seed, or split by an expression with more values",
                status=error.status,
                code=error.code,
            ) from error
        done(name)
    found = sum(len(part) for part in parts.values())
    if edges[-1] == _VALUES and found < len(dataset):
        raise ConfigurationError(
            f"{len(dataset) - found} of {len(dataset)} samples are in no split: {by!r} has no value for "
            "them. Filter them out first, or add a fallback with first(a, b)"
        )
    return parts


def proportional_fractions(fractions: Mapping[str, float]) -> dict[str, float] | None:
    """Return fractions in the same ratio whose sum is 1, such as 0.8 and 0.2 for 80 and 20; None if there
    are none of at most four digits."""
    exact = [Fraction(str(fraction)) for fraction in fractions.values()]
    if not exact or min(exact) <= 0:
        return None
    rounded = [round(float(fraction / sum(exact)), 4) for fraction in exact]
    found = dict(zip(fractions, rounded, strict=True))
    return found if min(rounded) > 0 and sum(Fraction(str(each)) for each in rounded) == 1 else None


def _edges(fractions: Mapping[str, float]) -> list[int]:
    """Return the hash values at which each split begins and the last one ends.

    Computed with exact fractions, so that 0.7 + 0.2 + 0.1 is 1. Raises ConfigurationError.
    """
    listed = ", ".join(f"{name}={fraction}" for name, fraction in fractions.items()) or "no fractions"
    try:
        exact = [Fraction(str(fraction)) for fraction in fractions.values()]
    except ValueError as error:
        raise ConfigurationError(f"split: {listed}: expected fractions such as train=0.9, val=0.1") from error
    if not exact or min(exact) <= 0 or sum(exact) > 1:
        suggested = proportional_fractions(fractions) or {"train": 0.9, "val": 0.1}
        write = ", ".join(f"{name}={fraction}" for name, fraction in suggested.items())
        raise ConfigurationError(
            f"split: {listed}: each fraction must be above 0 and their sum at most 1: write {write}"
        )
    return [int(edge * _VALUES) for edge in itertools.accumulate(exact, initial=Fraction(0))]


Weight = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Stage:
    """A change of the weights of a mix at a point of the training; pass it in `schedule` of `mesh.mix`.

    Attributes:
        weights: the new weights, one per dataset.
        epoch: the epoch in which they begin to apply.
        position: the position in that epoch.
        step: the step in that epoch, instead of a position; a loader converts it with its global batch.
    """

    weights: Sequence[Weight]
    epoch: int = 0
    position: int = 0
    step: int | None = None

    def document(self, batch: int | None) -> dict[str, Any]:
        """Return the stage in the form of a plan spec. Raises ConfigurationError."""
        position = self.position
        if self.step is not None:
            if batch is None:
                raise ConfigurationError(
                    f"Stage(step={self.step}) needs the rows of a step: pass position=, or use a Loader"
                )
            position = self.step * batch
        return {"epoch": self.epoch, "position": position, "weights": _whole(self.weights)}


@dataclass(frozen=True, slots=True)
class MixSpec:
    """The parameters of a mix.

    `parts`: number of samples of each dataset; `stages`: in order, the first one from the beginning;
    `positions` of an epoch (0: the number of samples); `block`: positions with exact shares.
    """

    parts: tuple[int, ...]
    stages: tuple[Stage, ...]
    positions: int = 0
    block: int = BLOCK

    def document(self, batch: int | None) -> dict[str, Any]:
        """Return the `mix` value of a plan spec; `batch`: rows of a step, if known."""
        return {
            "parts": list(self.parts),
            "stages": [stage.document(batch) for stage in self.stages],
            "positions": self.positions,
            "block": self.block,
        }


def staged(weights: Sequence[Weight], schedule: Sequence[Stage], datasets: int) -> tuple[Stage, ...]:
    """Return all stages: the initial weights, then those of the schedule. Raises ConfigurationError."""
    listed: Sequence[object] = schedule if isinstance(schedule, Sequence) else [schedule]
    wrong = [type(stage).__name__ for stage in listed if not isinstance(stage, Stage)]
    if wrong or listed is not schedule:
        got = wrong[0] if wrong else type(schedule).__name__  # a single stage without a list
        raise ConfigurationError(
            f"schedule: expected a list of stages, such as [mesh.Stage([1, 1], epoch=2)]; got {got}"
        )
    stages = (Stage(weights), *schedule)
    for stage in stages:
        if not hasattr(stage.weights, "__len__"):
            raise ConfigurationError(
                f"weights={stage.weights!r}: expected one number per dataset, such as [3, 1]"
            )
        if len(stage.weights) != datasets:
            raise ConfigurationError(
                f"{len(stage.weights)} weights for {datasets} datasets: pass one per dataset, in their order"
            )
        _check_step(stage)
    return stages


def _check_step(stage: Stage) -> None:
    """Check the `step` of a stage; the plan spec checks its position. Raises ConfigurationError."""
    if stage.step is None:
        return
    if isinstance(stage.step, bool) or not isinstance(stage.step, int) or stage.step < 0:
        raise ConfigurationError(f"Stage(step={stage.step!r}): expected an integer of at least 0")
    if stage.position:
        raise ConfigurationError("Stage: pass `position` or `step`, not both")


def _whole(weights: Sequence[Weight]) -> list[int]:
    """Return integers in exactly the same ratio: 0.7 and 0.3 become 7 and 3. Raises ConfigurationError."""
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"weights={list(weights)!r}: expected numbers, such as [3, 1] or [0.7, 0.3]"
        ) from error
    if min(exact) < 0:
        raise ConfigurationError(
            f"weights={list(weights)!r}: a weight must be at least 0; 0 leaves the dataset out"
        )
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    if max(whole) > MAX_WEIGHT:
        raise ConfigurationError(
            f"weights={list(weights)!r}: too many digits for an exact ratio; round the weights"
        )
    return whole


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = earlier_names(__name__)
