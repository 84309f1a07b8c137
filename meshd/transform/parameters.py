"""Parameters of ops: typed and checked once, when the plan is made.

Law: every invalid argument is a PlanError with its path, such as `ops[2].args.size`; an unknown name is
refused with a suggestion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_integer,
    checked_number,
    checked_object,
    checked_text,
    join_path,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Parse = Callable[[Any, str], Any]
MAX_SIDE = 16384
MAX_CLASSES = 1 << 16
OBJECT_DTYPE_REFUSED = (
    "an array of Python objects (dtype object) is a pickle, which can run any code when it is loaded, and is "
    "not supported: write numbers, such as np.save(file, array.astype('float32')), rows of unequal length as "
    "one file each, text as .txt or .json"
)
_REQUIRED = object()


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of an op. `parse(value, path)` returns the value that the op is built with.

    Without a default, the parameter is required. The first paragraph of the docstring of `parse` tells users
    which values are allowed.
    """

    name: str
    parse: Parse
    default: Any = _REQUIRED

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def kind(self) -> str:
        """The allowed values, in a few words."""
        text = " ".join((self.parse.__doc__ or "").strip().split("\n\n")[0].split()).rstrip(".")
        return text[:1].lower() + text[1:]


def with_description(parse: Parse, kind: str) -> Parse:
    """Return `parse` with a docstring that tells users which values are allowed."""
    parse.__doc__ = kind
    return parse


def parse_arguments(parameters: tuple[Parameter, ...], args: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the parsed arguments by name, with defaults filled in. Raises PlanError."""
    given = checked_object(dict(args), path, [parameter.name for parameter in parameters])
    return {parameter.name: _argument(parameter, given, path) for parameter in parameters}


def _argument(parameter: Parameter, given: Mapping[str, Any], path: str) -> Any:
    where = join_path(path, parameter.name)
    if parameter.name in given:
        return parameter.parse(given[parameter.name], where)
    if parameter.required:
        raise PlanError(where, "missing; the op has no default for it")
    return parameter.default


def side_or_size(value: Any, path: str) -> int | tuple[int, int]:
    """The shorter side in pixels, or [height, width]."""
    if isinstance(value, list):
        return size(value, path)
    return checked_integer(value, path, 1, MAX_SIDE)


def size(value: Any, path: str) -> tuple[int, int]:
    """Pixels: a number (a square), or [height, width]."""
    if not isinstance(value, list):
        side = checked_integer(value, path, 1, MAX_SIDE)
        return side, side
    if len(value) != 2:
        raise PlanError(path, f"expected a number or [height, width], got {shown_value(value)}")
    height, width = (checked_integer(item, f"{path}[{i}]", 1, MAX_SIDE) for i, item in enumerate(value))
    return height, width


def probability(value: Any, path: str) -> float:
    """A number in [0, 1]."""
    return checked_number(value, path, 0.0, 1.0)


def number(low: float, high: float) -> Parse:
    """Return a parser of a number in [low, high]."""

    def parse(value: Any, path: str) -> float:
        return checked_number(value, path, low, high)

    return with_description(parse, f"a number in {low:g}…{high:g}")


def pair(low: float, high: float) -> Parse:
    """Return a parser of `[first, last]` with low ≤ first ≤ last ≤ high; x ≥ 0 stands for [−x, x]."""

    def parse(value: Any, path: str) -> tuple[float, float]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            size = checked_number(value, path, 0.0, high)
            return -size, size
        if not isinstance(value, list) or len(value) != 2:
            raise PlanError(path, f"expected a number or [lowest, highest], got {shown_value(value)}")
        first, last = (checked_number(item, f"{path}[{i}]", low, high) for i, item in enumerate(value))
        if first > last:
            raise PlanError(path, f"expected lowest ≤ highest, got {shown_value(value)}")
        return first, last

    return with_description(parse, f"[lowest, highest] in {low:g}…{high:g}, or x for [−x, x]")


def sides(value: Any, path: str) -> tuple[int, int, int, int]:
    """Pixels: a number, or [top, right, bottom, left]."""
    given = value if isinstance(value, list) else [value] * 4
    if len(given) != 4:
        raise PlanError(path, f"expected a number or [top, right, bottom, left], got {shown_value(value)}")
    top, right, bottom, left = (
        checked_integer(item, f"{path}[{i}]", 0, MAX_SIDE) for i, item in enumerate(given)
    )
    return top, right, bottom, left


def numbers(value: Any, path: str) -> tuple[float, ...]:
    """A number, or a list of at most 16 numbers."""
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= 16:
        raise PlanError(path, f"expected 1…16 numbers, got {shown_value(value)}")
    return tuple(checked_number(item, f"{path}[{i}]", -1e9, 1e9) for i, item in enumerate(given))


def whole(low: int, high: int) -> Parse:
    """Return a parser of an integer in [low, high]."""

    def parse(value: Any, path: str) -> int:
        return checked_integer(value, path, low, high)

    return with_description(parse, f"an integer in {low}…{high}")


def whole_or_none(low: int, high: int) -> Parse:
    """Return a parser of an integer in [low, high], or None."""

    def parse(value: Any, path: str) -> int | None:
        return None if value is None else checked_integer(value, path, low, high)

    return with_description(parse, f"an integer in {low}…{high}, or null")


def flag(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise PlanError(path, f"expected true or false, got {shown_value(value)}")
    return value


def interval(low: float, high: float) -> Parse:
    """Return a parser of `[first, last]` with low < first ≤ last ≤ high."""

    def parse(value: Any, path: str) -> tuple[float, float]:
        if not isinstance(value, list) or len(value) != 2:
            raise PlanError(path, f"expected [lowest, highest], got {shown_value(value)}")
        first, last = (checked_number(item, f"{path}[{i}]", low, high) for i, item in enumerate(value))
        if not low < first <= last:
            raise PlanError(path, f"expected {low:g} < lowest ≤ highest, got {shown_value(value)}")
        return first, last

    return with_description(parse, f"[lowest, highest], above {low:g} and at most {high:g}")


def choice(*names: str) -> Parse:
    """Return a parser of one of `names`."""

    def parse(value: Any, path: str) -> str:
        return checked_choice(value, path, names)

    return with_description(parse, "one of " + ", ".join(f'"{name}"' for name in names))


def classes(value: Any, path: str) -> tuple[str, ...]:
    """Distinct class names, in the order of their numbers."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CLASSES:
        raise PlanError(path, f"expected a list of 1…{MAX_CLASSES} class names")
    names = tuple(checked_text(item, f"{path}[{i}]", at_most=1000) for i, item in enumerate(value))
    if len(set(names)) != len(names):
        raise PlanError(path, "a class name is repeated; class names must be distinct")
    return names


def fields(value: Any, path: str) -> tuple[str, ...] | None:
    """Names of fields, or null for all label fields."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > 64:
        raise PlanError(path, f"expected a list of field names, or null, got {shown_value(value)}")
    names = tuple(checked_text(item, f"{path}[{i}]", at_most=100) for i, item in enumerate(value))
    if len(set(names)) != len(names):
        raise PlanError(path, "a field is repeated; field names must be distinct")
    return names


def dtype(value: Any, path: str) -> str:
    """The name of a numeric dtype, such as "float32"."""
    if value == "object":
        raise PlanError(path, OBJECT_DTYPE_REFUSED)
    known = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
    name = checked_choice(value, path, ["bool", *known, "float16", "float32", "float64"])
    return np.dtype(name).name


def dtype_or_none(value: Any, path: str) -> str | None:
    """The name of a numeric dtype, such as "uint16", or null."""
    return None if value is None else dtype(value, path)


Extents = tuple[int | None, ...]


def extents(value: Any, path: str) -> Extents | None:
    """The extents of an array, with null for each that differs between samples; or null."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > 16:
        raise PlanError(path, f"expected a list of at most 16 extents, or null, got {shown_value(value)}")
    return tuple(
        None if item is None else checked_integer(item, f"{path}[{i}]", 0, 1 << 31)
        for i, item in enumerate(value)
    )
