"""Sequences, that is arrays by their first axis: cut to a length, filled up to a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import FieldType
from meshd.transform.parameters import Parameter, choice, number, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.randomness import KeyedRandom

MAX_LENGTH = 1 << 24
Side = Literal["left", "right"]


def _check_sequence(field: FieldType) -> None:
    if field.kind != "array" or field.layout or not field.shape:
        raise ValueError(f"needs an array with a first axis, not {field}; tokenize or read one first")


@operation(
    "truncate",
    Parameter("length", whole(1, MAX_LENGTH)),
    Parameter("side", choice("left", "right"), "right"),
    takes="an array [n, …]",
    gives="the same dtype [at most `length`, …]",
)
@dataclass(frozen=True, slots=True)
class Truncate:
    """At most `length` elements of the first axis: what is too many goes at the `side`."""

    length: int
    side: Side

    def infer(self, field: FieldType) -> FieldType:
        _check_sequence(field)
        first = field.shape[0]
        cut = None if first is None else min(first, self.length)
        return FieldType("array", field.dtype, (cut, *field.shape[1:]))

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return value[: self.length] if self.side == "right" else value[max(0, len(value) - self.length) :]


@operation(
    "pad_to",
    Parameter("length", whole(1, MAX_LENGTH)),
    Parameter("value", number(-(2.0**63), 2.0**64), 0.0),
    Parameter("side", choice("left", "right"), "right"),
    takes="an array [n, …]",
    gives="the same dtype [`length`, …]: dense, if the other axes are",
    refuses="longer than `length` (put `truncate` before it)",
)
@dataclass(frozen=True, slots=True)
class PadTo:
    """Filled up with `value` to `length` elements of the first axis, at the `side`."""

    length: int
    value: float
    side: Side

    def infer(self, field: FieldType) -> FieldType:
        _check_sequence(field)
        if field.shape[0] is not None and field.shape[0] > self.length:
            raise ValueError(f"{field} is longer than {self.length}; put truncate before it")
        _fitting(self.value, field.dtype)
        return FieldType("array", field.dtype, (self.length, *field.shape[1:]))

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        missing = self.length - len(value)
        if missing < 0:
            raise BadSampleError(
                f"a sequence of {len(value)}; at most {self.length} are taken: truncate first"
            )
        padded = np.full((self.length, *value.shape[1:]), _fitting(self.value, value.dtype.name), value.dtype)
        start = 0 if self.side == "right" else missing
        padded[start : start + len(value)] = value
        return padded


def _fitting(value: float, dtype: str) -> Any:
    """`value` as the dtype has it. Raises ValueError when it has not."""
    wanted = np.dtype(dtype)
    if wanted.kind not in "iu":
        return wanted.type(value)
    info = np.iinfo(wanted)
    if not value.is_integer() or not info.min <= int(value) <= info.max:
        raise ValueError(f"the value {value:g} is no {dtype}")
    return wanted.type(int(value))
