"""Text ops: validated, normalized UTF-8, and values from JSON documents.

Law: text travels between ops as UTF-8 bytes. Invalid text is a bad sample, never silently replaced.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import BYTES, LABEL, FieldType
from meshd.transform.parameters import Parameter, choice, flag
from meshd.transform.registry import operation
from meshwire.strict_json import PlanError, checked_text, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshwire.plan.keyed_random import KeyedRandom

MAX_TEXT_BYTES = 16 << 20
_STEP = re.compile(r"(?:\.|^)([^.\[\]]+)|\[(\d{1,9})\]")
Step = str | int
_SHOWN = 60
_NAMES: Mapping[type, str] = {
    **{type(None): "null", bool: "a boolean", int: "a number", float: "a number"},
    **{str: "a text", list: "a list", dict: "an object"},
}
"""What JSON calls the values that Python's parser returns."""


def text_of(value: bytes) -> str:
    """Decode UTF-8 text. Raises BadSampleError."""
    if len(value) > MAX_TEXT_BYTES:
        raise BadSampleError(f"a text of {len(value)} bytes; at most {MAX_TEXT_BYTES} are allowed")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadSampleError(f"not UTF-8 text: byte {error.start} is {value[error.start]:#04x}") from error


def check_bytes(given: FieldType) -> None:
    """Raises ValueError unless the type is bytes, as ops that read bytes need."""
    if given.kind != "bytes":
        raise ValueError(f"needs bytes, not {given}; put it before the op that converts them to an array")


@operation(
    "utf8",
    Parameter("form", choice("none", "NFC", "NFKC"), "none"),
    Parameter("strip", flag, False),
    takes="bytes of a text",
    gives="bytes: the text as UTF-8, without a byte order mark",
    refuses="not valid UTF-8, or more than 16 MiB",
)
class Utf8(msgspec.Struct, frozen=True):
    """Valid UTF-8 text: checked, without a byte order mark, in the Unicode normal `form`, and with `strip`
    without white space at both ends. The normal forms are those of the node's Python."""

    form: Literal["none", "NFC", "NFKC"]
    strip: bool

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return BYTES

    def apply(self, value: bytes, random: KeyedRandom) -> bytes:
        text = text_of(value).removeprefix("\ufeff")
        if self.form != "none":
            text = unicodedata.normalize(self.form, text)
        return (text.strip() if self.strip else text).encode()


def parse_json_path(value: Any, path: str) -> tuple[Step, ...]:
    """Names and indices, such as "messages[0].text"; empty for the document itself."""
    text = checked_text(value, path, at_most=1000)
    steps, end = list[Step](), 0
    while end < len(text):
        found = _STEP.match(text, end) if end == 0 or text[end] in ".[" else None
        if found is None or (found[1] and end == 0 and text.startswith(".")):
            raise PlanError(path, f"expected a path such as messages[0].text, got {shown_value(text)}")
        steps.append(int(found[2]) if found[2] else found[1])
        end = found.end()
    return tuple(steps)


JsonType = Literal["text", "integer", "number", "numbers", "json"]
_TYPES: dict[JsonType, FieldType] = {
    "text": BYTES,
    "json": BYTES,
    "integer": LABEL,
    "number": FieldType("array", "float64", ()),
    "numbers": FieldType("array", "float64", (None,)),
}


@operation(
    "json",
    Parameter("path", parse_json_path),
    Parameter("type", choice(*_TYPES), "text"),
    takes="bytes of a JSON document, such as a line of a JSONL file",
    gives='bytes (`type` "text", "json"), int64 ("integer"), float64 ("number"), float64 [n] ("numbers")',
    refuses="not JSON, nothing at `path`, or a value of another type; more than 16 MiB",
)
@dataclass(frozen=True, slots=True)
class Json:
    """The value at `path` of a JSON document: text as UTF-8, a number, a list of numbers, or ("json") any
    value, encoded compactly."""

    path: tuple[Step, ...]
    type: JsonType
    _shown: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spelled = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        object.__setattr__(self, "_shown", spelled.removeprefix(".") or "the document")

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return _TYPES[self.type]

    def apply(self, value: bytes, random: KeyedRandom) -> Any:
        found = self._find(value)
        if self.type == "json":
            return self._encode(json.dumps(found, ensure_ascii=False, separators=(",", ":")))
        if self.type == "text":
            if isinstance(found, (list, dict)):
                raise BadSampleError(f"{self._wrong(found, 'a text')}; type='json' takes it, as JSON")
            if not isinstance(found, str):
                raise self._wrong(found, "a text")
            return self._encode(found)
        if self.type == "integer":
            return self._integer(found)
        if self.type == "number":
            return np.float64(self._number(found))
        return self._numbers(found)

    def _find(self, value: bytes) -> Any:
        try:
            found = json.loads(text_of(value))
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"not a JSON document: {error}") from error
        for step in self.path:
            if isinstance(step, int):
                there = isinstance(found, list) and step < len(found)
            else:
                there = isinstance(found, dict) and step in found
            if not there:
                raise BadSampleError(f"the document has nothing at {self._shown}")
            found = found[step]
        return found

    def _encode(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise BadSampleError(f"{self._shown} holds half a surrogate pair") from error

    def _integer(self, found: Any) -> int:
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not -(1 << 63) <= found < 1 << 63:
            raise self._wrong(found, "an integer of 64 bits")
        return found

    def _number(self, found: Any) -> float:
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._wrong(found, "a number")
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(found, "a finite number")
        return number

    def _numbers(self, found: Any) -> npt.NDArray[np.float64]:
        if not isinstance(found, list):
            raise self._wrong(found, "a list of numbers")
        return np.array([self._number(item) for item in found], np.float64)

    def _wrong(self, found: Any, wanted: str) -> BadSampleError:
        value = shown_value(found[:_SHOWN]) if isinstance(found, str) else json.dumps(found)[:_SHOWN]
        return BadSampleError(f"{self._shown} is {_NAMES[type(found)]}, not {wanted}: {value}")
