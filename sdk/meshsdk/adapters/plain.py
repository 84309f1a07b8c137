"""Batches as plain tuples and dicts of arrays or tensors, for training loops that accept nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.datasets.batch import as_dict, as_tuple
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.loader.loader import Loader

__all__ = ["PlainLoader", "as_dict", "as_tuple", "as_tuples", "plain_types"]


def as_tuples(loader: Loader, names: Sequence[str]) -> PlainLoader:
    """Wrap a loader so that its batches are tuples of these fields, as `Loader.as_tuples` does."""
    return loader.as_tuples(*names)


def plain_types(loader: Loader) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """Return the numpy dtype and shape of each entry of `as_dict` for this loader's batches.

    Fetches one batch to find them. The first axis, whose length varies, is None.
    """
    # A resumed epoch may have no batch left; the next epoch has one.
    coming = loader.at(loader.step) if loader.remaining else loader.at(0, loader.epoch + 1)
    looked = {name: np.asarray(value) for name, value in as_dict(coming).items()}
    return {name: (value.dtype, (None, *value.shape[1:])) for name, value in looked.items()}
