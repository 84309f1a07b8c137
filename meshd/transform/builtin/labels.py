"""Labels from small sidecar files: a number or a class name, as int64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import LABEL
from meshd.transform.parameters import MAX_CLASSES, Parameter, classes, whole
from meshd.transform.registry import operation
from meshwire.strict_json import PlanError, checked_integer, checked_text, join_path

if TYPE_CHECKING:
    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

_LONGEST = 4096


def _text(value: bytes) -> str:
    if len(value) > _LONGEST:
        raise BadSampleError(f"a label of {len(value)} bytes; at most {_LONGEST} are allowed")
    try:
        return value.decode().strip()
    except UnicodeDecodeError as error:
        raise BadSampleError("the label is not UTF-8 text") from error


def _check_bytes(given: FieldType) -> None:
    if given.kind != "bytes":
        raise ValueError(f"needs the source's bytes, not {given}; make it the first op")


@operation(
    "int_label",
    takes="bytes: a decimal integer as text",
    gives="int64",
    refuses="not an integer, or not one of 64 bits",
)
class IntLabel(msgspec.Struct, frozen=True):
    """A decimal integer, such as `7`, as int64."""

    def infer(self, field: FieldType) -> FieldType:
        _check_bytes(field)
        return LABEL

    def apply(self, value: bytes, random: KeyedRandom) -> int:
        text = _text(value)
        digits = text[1:] if text[:1] in "+-" else text
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise BadSampleError(f"the label {text[:40]!r} is not an integer")
        number = int(text)
        if not -(1 << 63) <= number < 1 << 63:
            raise BadSampleError(f"the label {text[:40]!r} does not fit into 64 bits")
        return number


@operation(
    "text_label",
    Parameter("classes", classes),
    takes="bytes: a class name as UTF-8",
    gives="int64: its index in `classes`",
    refuses="a name that is not in `classes`",
)
@dataclass(frozen=True, slots=True)
class TextLabel:
    """The index of a class name in `classes`, as int64."""

    classes: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {name: number for number, name in enumerate(self.classes)})

    def infer(self, field: FieldType) -> FieldType:
        _check_bytes(field)
        return LABEL

    def apply(self, value: bytes, random: KeyedRandom) -> int:
        text = _text(value)
        number = self._numbers.get(text)
        if number is None:
            raise BadSampleError(f"the label {text[:40]!r} is not one of the {len(self.classes)} classes")
        return number


def _mapping(value: Any, path: str) -> dict[str, int]:
    """An object that maps class names, or old numbers as text, to numbers."""
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_CLASSES:
        raise PlanError(path, f'expected an object of 1…{MAX_CLASSES} names, such as {{"cat": 0, "dog": 0}}')
    bound = 1 << 62
    return {
        checked_text(name, path, at_most=1000): checked_integer(number, join_path(path, name), -bound, bound)
        for name, number in value.items()
    }


def _anything(value: Any, path: str) -> int | None:
    """An integer for labels that are not in the map; null makes them bad samples."""
    return None if value is None else whole(-(1 << 62), 1 << 62)(value, path)


@operation(
    "label_map",
    Parameter("map", _mapping),
    Parameter("other", _anything, None),
    takes="bytes: a class name as UTF-8; or a label",
    gives="int64: its number in `map`",
    refuses="not in `map`, and no `other`",
)
class LabelMap(msgspec.Struct, frozen=True):
    """Classes renumbered, merged or dropped: a name (or a label's number, as text) becomes its number in
    `map`."""

    map: dict[str, int]
    other: int | None

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "label":
            _check_bytes(field)
        return LABEL

    def apply(self, value: Any, random: KeyedRandom) -> int:
        text = _text(value) if isinstance(value, bytes) else str(int(value))
        number = self.map.get(text, self.other)
        if number is None:
            raise BadSampleError(f"the label {text[:40]!r} is not in the map of {len(self.map)}")
        return number
