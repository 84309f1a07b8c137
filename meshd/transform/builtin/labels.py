"""Labels out of small sidecar files: a number or a class name, as int64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import LABEL
from meshd.transform.parameters import Parameter, classes
from meshd.transform.registry import operation

if TYPE_CHECKING:
    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom

_LONGEST = 4096


def _text(value: bytes) -> str:
    if len(value) > _LONGEST:
        raise BadSampleError(f"a label of {len(value)} bytes; at most {_LONGEST} are taken")
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
    refuses="no integer, or none of 64 bits",
)
@dataclass(frozen=True, slots=True)
class IntLabel:
    """A decimal integer, as `7`, to int64."""

    def infer(self, field: FieldType) -> FieldType:
        _check_bytes(field)
        return LABEL

    def apply(self, value: bytes, random: KeyedRandom) -> int:
        text = _text(value)
        digits = text[1:] if text[:1] in "+-" else text
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise BadSampleError(f"the label {text[:40]!r} is no integer")
        number = int(text)
        if not -(1 << 63) <= number < 1 << 63:
            raise BadSampleError(f"the label {text[:40]!r} does not fit into 64 bits")
        return number


@operation(
    "text_label",
    Parameter("classes", classes),
    takes="bytes: a class name as UTF-8",
    gives="int64: its place in `classes`",
    refuses="a name that is none of `classes`",
)
@dataclass(frozen=True, slots=True)
class TextLabel:
    """A class name to its number in `classes`, as int64."""

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
            raise BadSampleError(f"the label {text[:40]!r} is none of the {len(self.classes)} classes")
        return number
