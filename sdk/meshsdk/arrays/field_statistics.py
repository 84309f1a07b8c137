"""`mesh.field_statistics`: mean, deviation and range of fields, to normalise them.

Law: moments are merged in float64 batch by batch (Chan's update), so the order of batches changes the last
digits alone. Numbers that are not finite are counted and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.errors import ConfigurationError
from meshsdk.loader.loader import Loader

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshsdk.datasets.dataset import Dataset

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class FieldStatistics:
    """Statistics of a field.

    Attributes:
        count: finite numbers.
        missing: numbers that are NaN or infinite.
        mean, std, low, high: of the finite ones; arrays with one number for each index, if an axis was given.
    """

    count: int
    missing: int
    mean: Any
    std: Any
    low: Any
    high: Any


def field_statistics(
    dataset: Dataset, *fields: str, samples: int | None = None, axis: int | None = None, seed: int = 0
) -> dict[str, FieldStatistics]:
    """Return mean, standard deviation, minimum and maximum of fields, as the dataset's ops leave them.

    Arguments:
        dataset: without random ops, which would be measured, too.
        fields: their names. Default: all that have numbers.
        samples: how many samples to look at, drawn evenly. Default: all, which takes an epoch.
        axis: of a sample, such as that of the channels or levels: statistics for each index along it.
            Default: over all numbers of the field.
        seed: of the drawing.

    Raises ConfigurationError if a field has no numbers, and as iterating a loader does.

    Example:
        found = mesh.field_statistics(ds, "t2m")["t2m"]
        ds = ds.map(ops.normalize("t2m", mean=found.mean, std=found.std, scale=1.0))
    """
    schema = dataset.schema()
    names = fields or tuple(schema)
    unknown = next((name for name in names if name not in schema), None)
    if unknown is not None:
        raise ConfigurationError(f"the dataset has no field {unknown!r}; it has {', '.join(schema)}")
    rows = len(dataset) if samples is None else min(samples, len(dataset))
    each = sum(np.prod([extent or 1 for extent in schema[name].shape or ()]) for name in schema) * 8
    batch = int(max(1, min(rows, 256, _BATCH_BYTES // max(1, each))))
    found = {name: _Moments(axis) for name in names}
    with Loader(
        dataset, batch, seed=seed, shuffle=rows < len(dataset), output="numpy", rank=0, world=1
    ) as loader:
        for data in loader:
            kept = (np.asarray(data.status) == 0) & (np.arange(data.rows) < rows)
            rows -= data.rows
            for name, moments in found.items():
                moments.add(name, data[name], kept)
            if rows <= 0:
                break
    return {name: moments.result() for name, moments in found.items()}


class _Moments:
    """Moments of a field, merged batch by batch."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._count: Any = 0
        self._missing = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, name: str, values: Any, kept: npt.NDArray[np.bool_]) -> None:
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            raise ConfigurationError(f"{name!r} is no tensor of numbers: name the fields to measure")
        numbers = values[kept].astype(np.float64)
        if self._axis is not None and not -numbers.ndim < self._axis < numbers.ndim - 1:
            raise ConfigurationError(f"axis={self._axis}: a sample of {name!r} has {numbers.ndim - 1} axes")
        if self._axis is None:
            numbers = numbers.reshape(1, -1)
        else:
            at = self._axis + 1 if self._axis >= 0 else self._axis
            numbers = np.moveaxis(numbers, at, 0).reshape(numbers.shape[at], -1)
        finite = np.isfinite(numbers)
        count = finite.sum(axis=1)
        self._missing += int(finite.size - count.sum())
        clean = np.where(finite, numbers, 0.0)
        mean = clean.sum(axis=1) / np.maximum(count, 1)
        squares = (np.where(finite, numbers - mean[:, None], 0.0) ** 2).sum(axis=1)
        total = np.maximum(self._count + count, 1)
        apart = mean - self._mean
        self._squares = self._squares + squares + apart**2 * self._count * count / total
        self._mean = self._mean + apart * count / total
        self._count = self._count + count
        self._low = np.minimum(self._low, np.where(finite, numbers, np.inf).min(axis=1, initial=np.inf))
        self._high = np.maximum(self._high, np.where(finite, numbers, -np.inf).max(axis=1, initial=-np.inf))

    def result(self) -> FieldStatistics:
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        many = self._axis is not None
        values = (self._mean, std, self._low, self._high)
        shown = values if many else tuple(float(value[0]) for value in values)
        return FieldStatistics(int(np.sum(self._count)), self._missing, *shown)
