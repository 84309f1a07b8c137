"""A dataset for Ray Data.

Law: a task requests samples by number and holds no position, so Ray may repeat, move or reorder tasks. For
training, use `mesh.Loader` in each Ray Train worker, and `share=` across Ray Tune trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.datasets.dataset import Dataset

_ROWS = 256


class FetchSamples:
    """Maps a batch of sample numbers to the fields of these samples, stacked if they have equal shapes."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        rows = self.dataset.__getitems__([int(number) for number in batch["id"]])
        return {name: _column([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _column(values: list[Any]) -> Any:
    if len({np.shape(value) for value in values}) == 1:
        return np.stack([np.asarray(value) for value in values])
    column = np.empty(len(values), object)
    column[:] = values
    return column


def as_ray_dataset(dataset: Dataset, rows: int = _ROWS) -> Any:
    """Return a `ray.data.Dataset` of the samples with ops applied, `rows` per request."""
    import ray

    return ray.data.range(len(dataset)).map_batches(FetchSamples(dataset), batch_size=rows)
