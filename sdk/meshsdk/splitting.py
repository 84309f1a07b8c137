"""Splits: train, validation and test samples, told apart by a hash of what they are called.

Law: where a sample goes follows from its key, the seed and the fractions alone: it stays there when others
come and go, and on another day. Invariant: splits of one call have no sample in common.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

from meshsdk.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.datasets import Dataset

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
