"""Columns of arrays: some of the last axis chosen; numbers of classes spread over an axis of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import FieldType
from meshd.transform.parameters import MAX_CLASSES, Parameter, choice, told, whole
from meshd.transform.registry import operation
from meshwire.documents import PlanError, checked_integer

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.randomness import KeyedRandom


def _columns(value: Any, path: str) -> tuple[int, ...]:
    """Column numbers from 0 on; negative ones count from the end."""
    given = [value] if isinstance(value, int) else value
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CLASSES:
        raise PlanError(path, f"expected a list of 1…{MAX_CLASSES} column numbers")
    bound = 1 << 31
    return tuple(checked_integer(item, f"{path}[{i}]", -bound, bound) for i, item in enumerate(given))


@operation(
    "gather_columns",
    Parameter("columns", _columns),
    takes="an array […, n]",
    gives="the same dtype […, number of `columns`]",
    refuses="fewer columns than asked for",
)
@dataclass(frozen=True, slots=True)
class GatherColumns:
    """These columns of the last axis, in this order; one may stand twice."""

    columns: tuple[int, ...]
    _indices: npt.NDArray[np.intp] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_indices", np.array(self.columns, np.intp))

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.layout or not field.shape:
            raise ValueError(f"needs an array with at least one axis, not {field}")
        if field.shape[-1] is not None:
            self._check(field.shape[-1])
        return FieldType("array", field.dtype, (*field.shape[:-1], len(self.columns)))

    def _check(self, width: int) -> None:
        wrong = next((column for column in self.columns if not -width <= column < width), None)
        if wrong is not None:
            raise ValueError(f"there is no column {wrong} among {width}")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        try:
            self._check(value.shape[-1])
        except ValueError as error:
            raise BadSampleError(str(error)) from error
        return value[..., self._indices]


@operation(
    "one_hot",
    Parameter("classes", told(whole(1, MAX_CLASSES), f"how many there are, 1…{MAX_CLASSES}")),
    Parameter("dtype", choice("uint8", "float16", "float32"), "float32"),
    takes="a label, or an array of integers […]",
    gives="`dtype` […, `classes`]: 1 at the number, else 0",
    refuses="a number outside 0…classes − 1",
)
@dataclass(frozen=True, slots=True)
class OneHot:
    """The number of a class as a vector of `classes` elements."""

    classes: int
    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        if field.kind not in ("label", "array") or field.layout or np.dtype(field.dtype).kind not in "iu":
            raise ValueError(f"needs a label or integers, not {field}")
        return FieldType("array", self.dtype, (*field.shape, self.classes))

    def apply(self, value: Any, random: KeyedRandom) -> npt.NDArray[Any]:
        numbers = np.asarray(value)
        if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < self.classes):
            raise BadSampleError(f"a class outside 0…{self.classes - 1}")
        vectors = np.zeros((numbers.size, self.classes), self.dtype)
        vectors[np.arange(numbers.size), numbers.reshape(-1).astype(np.intp)] = 1
        return vectors.reshape(*numbers.shape, self.classes)
