"""`mesh.field_statistics`: mean, deviation and range of fields, to normalise them.

Law: moments are merged in float64 batch by batch (Chan's update), so the order of batches changes the last
digits alone. Numbers that are not finite are counted and left out. Each number counts once: of samples that
differ in size, larger ones weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.datasets.batch import Ragged
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
        samples: samples measured; bad ones are left out.
    """

    count: int
    missing: int
    mean: Any
    std: Any
    low: Any
    high: Any
    samples: int = 0


def field_statistics(
    dataset: Dataset, *fields: str, samples: int | None = None, axis: int | None = None, seed: int = 0
) -> dict[str, FieldStatistics]:
    """Return mean, standard deviation, minimum and maximum of fields, as the dataset's ops leave them.

    Fields whose samples differ in size (`Ragged` in batches) are measured over the numbers of all samples.

    Arguments:
        dataset: without random ops, which would be measured, too.
        fields: their names. Default: all that have numbers.
        samples: how many samples to look at, drawn evenly. Default: all, which takes an epoch.
        axis: of a sample, such as that of the channels or levels: statistics for each index along it.
            Default: over all numbers of the field.
        seed: of the drawing.

    Raises ConfigurationError if a field has no numbers, or if samples differ along the axis; and as iterating
    a loader does.

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
    batch = max(1, min(rows, 256, _BATCH_BYTES // max(1, _row_bytes(dataset))))
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


def _row_bytes(dataset: Dataset) -> int:
    """Return what a row takes as float64; an average over a few samples if they differ in size."""
    shapes = [field.shape for field in dataset.schema().values()]
    if any(shape is None for shape in shapes):
        return dataset.preflight().row_bytes * 8
    return sum(prod(shape) for shape in shapes if shape is not None) * 8


class _Moments:
    """Moments of a field, merged batch by batch."""

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self._count: Any = 0
        self._missing = 0
        self._samples = 0
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, name: str, values: Any, kept: npt.NDArray[np.bool_]) -> None:
        data = values.data if isinstance(values, Ragged) else values
        if not isinstance(data, np.ndarray) or data.dtype.kind not in "biuf":
            raise ConfigurationError(f"{name!r} is not a tensor of numbers: name the fields to measure")
        self._samples += int(kept.sum())
        if isinstance(values, Ragged):
            rows = [values[int(row)] for row in np.flatnonzero(kept)]
            filled = [self._by_index(name, row[np.newaxis]) for row in rows if row.size]
            if not filled:
                return
            self._check_extents(name, {len(row) for row in filled} | set(np.shape(self._count)))
            numbers = np.concatenate(filled, axis=1).astype(np.float64)
        else:
            numbers = self._by_index(name, values[kept]).astype(np.float64)
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

    def _check_extents(self, name: str, extents: set[int]) -> None:
        if len(extents) > 1:
            raise ConfigurationError(
                f"axis={self._axis}: samples of {name!r} have {min(extents)} to {max(extents)} indices along "
                "it; leave axis out, or name one along which they agree"
            )

    def _by_index(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers of rows [rows, …] as [indices along the axis, numbers of each]."""
        if self._axis is None:
            return rows.reshape(1, -1)
        if not -rows.ndim < self._axis < rows.ndim - 1:
            raise ConfigurationError(f"axis={self._axis}: a sample of {name!r} has {rows.ndim - 1} axes")
        at = self._axis + 1 if self._axis >= 0 else self._axis
        return np.moveaxis(rows, at, 0).reshape(rows.shape[at], -1)

    def result(self) -> FieldStatistics:
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        values: tuple[Any, ...] = (self._mean, std, self._low, self._high)
        if self._axis is None:
            values = tuple(float(np.atleast_1d(value)[0]) for value in values)
        mean, std, low, high = values
        return FieldStatistics(int(np.sum(self._count)), self._missing, mean, std, low, high, self._samples)
