"""Splits and mixes: train and validation parts by a hash, and several datasets in exact shares.

Law: a sample's split follows from its key, the seed and the fractions alone, so it stays when others
come and go. `meshwire` computes which sample a position of a mix holds.
Invariant: the splits of one call have no sample in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

from meshsdk.client.native_api import derive_snapshot
from meshsdk.datasets.dataset import Dataset
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.plan.mix import BLOCK, MAX_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshwire.plan.plan_spec import OpSpec


_VALUES = 1 << 53  # what `hash` gives lies below


def split(
    dataset: Dataset,
    fractions: Mapping[str, float],
    by: str,
    seed: int,
    deadline: float,
    done: Callable[[str], None] = lambda _: None,
) -> dict[str, Dataset]:
    """See `Dataset.split`; `done` is told each part that is cut."""
    edges = _edges(fractions)
    key = f'hash("{seed}:" + text({by}))'
    parts = {}
    for name, (low, high) in zip(fractions, itertools.pairwise(edges), strict=True):
        try:
            parts[name] = dataset._filtered(f"{key} >= {low} and {key} < {high}", deadline)
        except NotFoundError as error:
            if error.code != "NoSuchKey":  # the dataset itself is gone, say
                raise
            raise NotFoundError(
                f"split: none of the {len(dataset)} samples is in {name!r} ({fractions[name]}), by {by!r}: "
                "give it a larger fraction or another seed, or split by what has more values",
                status=error.status,
                code=error.code,
            ) from error
        done(name)
    found = sum(len(part) for part in parts.values())
    if edges[-1] == _VALUES and found < len(dataset):
        raise ConfigurationError(
            f"{len(dataset) - found} of {len(dataset)} samples are in no split: {by!r} gives none for them. "
            "Filter them out before, or name something else with first(a, b)"
        )
    return parts


def _edges(fractions: Mapping[str, float]) -> list[int]:
    """Of the hash's values, where each split begins and the last one ends; exact, so that 0.7 + 0.2 + 0.1 is
    1."""
    try:
        exact = [Fraction(str(fraction)) for fraction in fractions.values()]
    except ValueError as error:
        raise ConfigurationError(
            f"split: {dict(fractions)}: fractions of 1, as train=0.9, val=0.1"
        ) from error
    if not exact or min(exact) <= 0 or sum(exact) > 1:
        raise ConfigurationError(
            f"split: {dict(fractions)}: fractions of all samples, above 0 and together at most 1, as "
            "train=0.9, val=0.1"
        )
    return [int(edge * _VALUES) for edge in itertools.accumulate(exact, initial=Fraction(0))]


Weight = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Stage:
    """Other weights, from a place of `epoch` on: its `position`, or its `step`, which a loader turns into a
    position with its global batch.
    """

    weights: Sequence[Weight]
    epoch: int = 0
    position: int = 0
    step: int | None = None

    def document(self, batch: int | None) -> dict[str, Any]:
        """As the protocol says it."""
        position = self.position
        if self.step is not None:
            if batch is None:
                raise ConfigurationError(
                    f"Stage(step={self.step}): how many rows is a step? Give position=, or use a Loader"
                )
            position = self.step * batch
        return {"epoch": self.epoch, "position": position, "weights": _whole(self.weights)}


@dataclass(frozen=True, slots=True)
class MixSpec:
    """`parts`: samples of each dataset; `stages` in order, the first from the beginning on."""

    parts: tuple[int, ...]
    stages: tuple[Stage, ...]
    positions: int = 0
    block: int = BLOCK

    def document(self, batch: int | None) -> dict[str, Any]:
        """The spec's `mix`."""
        return {
            "parts": list(self.parts),
            "stages": [stage.document(batch) for stage in self.stages],
            "positions": self.positions,
            "block": self.block,
        }


def mix(
    *datasets: Dataset,
    weights: Sequence[Weight] | None = None,
    schedule: Sequence[Stage] = (),
    positions: int | None = None,
    block: int = BLOCK,
    deadline: float = 600.0,
) -> Dataset:
    """One dataset of several with the same fields and ops, drawn from by weight (left out: by size, so that
    an epoch has every sample once).

    In each `block` of positions every dataset has exactly its share, shuffled over the block;
    block=global_batch gives it in every batch. An epoch has `positions` (left out: as many as there are
    samples). A dataset of n samples that is drawn K times in an epoch gives each of them ⌊K/n⌋ or ⌈K/n⌉
    times; the next epoch goes on with those that had less. `schedule` changes the weights at places of the
    training. `ds[i]` and `len` are those of all samples, one dataset after the other. Raises
    ConfigurationError.
    """
    ops = _checked(datasets)
    if positions == 0:
        raise ConfigurationError(
            "positions=0: of an epoch, one at least; left out, as many as there are samples"
        )
    given = [dataset.snapshot.samples for dataset in datasets] if weights is None else weights
    stages = staged(given, schedule, len(datasets))
    first = datasets[0]
    change = {"concat": [dataset.snapshot.hash for dataset in datasets[1:]]}
    snapshot = derive_snapshot(first.client.transport, first.snapshot, change, deadline)
    parts = tuple(dataset.snapshot.samples for dataset in datasets)
    made = MixSpec(parts, stages, 0 if positions is None else positions, block)
    mixed = Dataset(first.client, snapshot, ops, first.epoch, None, made)
    if all(stage.step is None for stage in stages):
        mixed.spec()  # what is wrong with the numbers is said now
    return mixed


def staged(weights: Sequence[Weight], schedule: Sequence[Stage], datasets: int) -> tuple[Stage, ...]:
    """The weights from the beginning on, then those of the schedule. Raises ConfigurationError."""
    listed: Sequence[object] = schedule if isinstance(schedule, Sequence) else [schedule]
    wrong = [type(stage).__name__ for stage in listed if not isinstance(stage, Stage)]
    if wrong or listed is not schedule:
        got = wrong[0] if wrong else type(schedule).__name__  # one stage, in no list
        raise ConfigurationError(f"schedule: stages, as [mesh.Stage([1, 1], epoch=2)]; got {got}")
    stages = (Stage(weights), *schedule)
    for stage in stages:
        if not hasattr(stage.weights, "__len__"):
            raise ConfigurationError(f"weights={stage.weights!r}: a number for each dataset, as [3, 1]")
        if len(stage.weights) != datasets:
            raise ConfigurationError(
                f"{len(stage.weights)} weights for {datasets} datasets: one for each, in their order"
            )
        _check_step(stage)
    return stages


def _check_step(stage: Stage) -> None:
    """What only a loader turns into a position, which is looked at with the rest."""
    if stage.step is None:
        return
    if isinstance(stage.step, bool) or not isinstance(stage.step, int) or stage.step < 0:
        raise ConfigurationError(f"Stage(step={stage.step!r}): a step of its epoch, an integer from 0 on")
    if stage.position:
        raise ConfigurationError("Stage: give `position` or `step`, not both")


def _checked(datasets: Sequence[Dataset]) -> tuple[OpSpec, ...]:
    """The ops all have."""
    other = next((given for given in datasets if not isinstance(given, Dataset)), None)
    if len(datasets) < 2 or other is not None:
        given = "" if other is None else f"; got {type(other).__name__}"
        raise ConfigurationError(
            f"mix takes two datasets at least, one by one, as mesh.mix(web, books, weights=[3, 1]){given}"
        )
    first = datasets[0]
    for number, dataset in enumerate(datasets):
        if dataset.packing is not None or dataset.mixing is not None:
            raise ConfigurationError(
                f"dataset {number} is a packed or mixed one: mix first, then pack; mix all at once"
            )
        if dataset.ops != first.ops:
            raise ConfigurationError(
                f"the ops of dataset {number} are not those of the first: map after mixing, as "
                "mesh.mix(...).map(...)"
            )
        if sorted(dataset.fields) != sorted(first.fields):
            raise ConfigurationError(
                f"dataset {number} has the fields {', '.join(dataset.fields)}, the first "
                f"{', '.join(first.fields)}: select and rename until all have the same"
            )
    return first.ops


def _whole(weights: Sequence[Weight]) -> list[int]:
    """In the same ratio, exactly: 0.7 and 0.3 are 7 and 3."""
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigurationError(f"weights={list(weights)!r}: numbers, as [3, 1] or [0.7, 0.3]") from error
    if min(exact) < 0:
        raise ConfigurationError(
            f"weights={list(weights)!r}: none is below 0; a dataset of 0 is not drawn from"
        )
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    if max(whole) > MAX_WEIGHT:
        raise ConfigurationError(f"weights={list(weights)!r}: too many digits; round them")
    return whole
