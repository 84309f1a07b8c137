"""The decorator with which a module of user ops declares its functions.

Law: only the standard library and numpy, because user modules import this in processes that have nothing
else. A decorated function itself is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np

from meshwire.plan.op_declarations import (
    ARGUMENTS,
    MEMORY,
    SECONDS,
    Argument,
    OpDeclaration,
    ValueType,
    parse_declaration,
)
from meshwire.strict_json import checked_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.plan.op_declarations import Extent

MARK: Final = "__mesh_op__"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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
    *,
    input: ValueType | None = None,
    output: ValueType | None = None,
    inputs: Mapping[str, ValueType] | None = None,
    outputs: Mapping[str, ValueType] | None = None,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Callable[[_F], _F]:
    """Makes a function an op: `f(value, *, arguments…)` → the value of type `output`.

    Or one over several fields: `f(image, mask, *, arguments…)` with `inputs` of those names → a dict of what
    `outputs` declares, each in the place of the input of its name; inputs that are no outputs stay as they
    are.

    Its arguments are its keyword-only parameters. An annotation of int, float, str, bool, list or dict is
    checked when a plan is made; one of bytes is the content of an object, given as `s3://BUCKET/KEY`. One
    named `random` gets the sample's own draws, a `KeyedRandom`. The function stays what it is and can be
    called. `value` may be written to; it is gone when the function returns.
    """

    if inputs and outputs and input is None and output is None:
        first, made = next(iter(inputs.values())), next(iter(outputs.values()))
    elif input is not None and output is not None and inputs is None and outputs is None:
        first, made = input, output
    else:
        raise TypeError("declare input= and output=, or for several fields inputs={…} and outputs={…}")

    def mark(function: _F) -> _F:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        arguments, random = _arguments(function, tuple(inputs or ()))
        declared = OpDeclaration(
            function.__name__,
            first,
            made,
            arguments,
            random,
            float(seconds),
            int(memory),
            summary[:200],
            tuple((inputs or {}).items()),
            tuple((outputs or {}).items()),
        )
        setattr(function, MARK, parse_declaration(declared.document()))
        return function

    return mark


def _arguments(function: Callable[..., Any], inputs: tuple[str, ...]) -> tuple[tuple[Argument, ...], bool]:
    """The keyword-only parameters, and whether one of them is `random`."""
    parameters = list(inspect.signature(function).parameters.values())
    values, rest = parameters[: len(inputs) or 1], parameters[len(inputs) or 1 :]
    if not values or any(value.kind not in _POSITIONAL for value in values):
        raise TypeError(f"{function.__name__}: the first parameter is the sample's value")
    if inputs and tuple(value.name for value in values) != inputs:
        raise TypeError(f"{function.__name__}: its first parameters are its inputs: {', '.join(inputs)}")
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
