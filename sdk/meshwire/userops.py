"""The decorator with which a module of one's own ops declares them.

Law: nothing but the standard library and numpy: a module imports this where nothing else is. A marked
function stays what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np

from meshwire.declarations import (
    ARGUMENTS,
    MEMORY,
    SECONDS,
    Argument,
    Declaration,
    ValueType,
    parse_declaration,
)
from meshwire.documents import checked_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.declarations import Extent

MARK: Final = "__mesh_op__"
_F = TypeVar("_F", bound=Callable[..., Any])


class BadSample(Exception):
    """Raise it in an op when the sample itself is at fault: `on_bad` decides what becomes of the row."""


def array(dtype: str = "", shape: Sequence[Extent] | None = None) -> ValueType:
    """An array. `shape`: numbers, names (`"h"` is the same number wherever it stands, or the value of the
    argument of that name), None for what differs from sample to sample."""
    return ValueType("array", np.dtype(dtype).name if dtype else "", None if shape is None else tuple(shape))


def image(
    height: Extent = None,
    width: Extent = None,
    channels: Extent = 3,
    *,
    layout: Literal["hwc", "chw"] = "hwc",
) -> ValueType:
    """An uint8 image, channels last ("hwc") or first ("chw")."""
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    return ValueType("image", "uint8", shape, layout)


def op(
    *, input: ValueType, output: ValueType, seconds: float = SECONDS, memory: int = MEMORY
) -> Callable[[_F], _F]:
    """Makes a function an op: `f(value, *, arguments…)` → the value of type `output`.

    Its arguments are its keyword-only parameters. An annotation of int, float, str, bool, list or dict is
    checked when a plan is made; one of bytes is the content of an object, given as `s3://BUCKET/KEY`. One
    named `random` gets the sample's own draws, a `KeyedRandom`. The function stays what it is and can be
    called. `value` may be written to; it is gone when the function returns.
    """

    def mark(function: _F) -> _F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        arguments, random = _arguments(function)
        declared = Declaration(
            function.__name__, input, output, arguments, random, float(seconds), int(memory), summary[:200]
        )
        setattr(function, MARK, parse_declaration(declared.document()))
        return function

    return mark


def _arguments(function: Callable[..., Any]) -> tuple[tuple[Argument, ...], bool]:
    """The keyword-only parameters, and whether one of them is `random`."""
    value, *rest = inspect.signature(function).parameters.values()
    if value.kind not in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{function.__name__}: the first parameter is the sample's value")
    wrong = [parameter.name for parameter in rest if parameter.kind is not parameter.KEYWORD_ONLY]
    if wrong:
        raise TypeError(f"{function.__name__}: write `*` before {wrong[0]!r}: arguments are given by name")
    found = tuple(_argument(parameter) for parameter in rest if parameter.name != "random")
    return found, any(parameter.name == "random" for parameter in rest)


def _argument(parameter: inspect.Parameter) -> Argument:
    given = parameter.annotation
    text = given if isinstance(given, str) else getattr(given, "__name__", "any")
    kind = text.partition("[")[0].strip()
    needed = parameter.default is parameter.empty
    default = None if needed else checked_json(parameter.default, parameter.name)
    return Argument(parameter.name, kind if kind in ARGUMENTS else "any", needed, default)
