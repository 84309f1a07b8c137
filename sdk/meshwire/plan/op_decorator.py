"""The decorator with which a module of user ops declares its functions.

Law: only the standard library and numpy, because user modules import this in processes that have nothing
else. A decorated function itself is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Never, TypeVar

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
_EXAMPLE: Final = "@op(input=image('h', 'w', 3), output=image('h', 'w', 3))"
_F = TypeVar("_F", bound=Callable[..., Any])


class BadSample(Exception):
    """Raised by an op if the sample itself is bad; `on_bad` determines what happens to the row."""


def array(dtype: str = "", shape: Sequence[Extent] | None = None) -> ValueType:
    """Declare an array. `shape`: numbers, names (`"h"` is the same number wherever it appears, or the value
    of the argument with that name), None for sizes that vary between samples."""
    return ValueType("array", np.dtype(dtype).name if dtype else "", None if shape is None else tuple(shape))


def image(
    height: Extent = None,
    width: Extent = None,
    channels: Extent = 3,
    *,
    layout: Literal["hwc", "chw"] = "hwc",
) -> ValueType:
    """Declare a uint8 image, channels last ("hwc") or first ("chw")."""
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    return ValueType("image", "uint8", shape, layout)


def op(
    *unnamed: Never,
    input: ValueType | None = None,
    output: ValueType | None = None,
    inputs: Mapping[str, ValueType] | None = None,
    outputs: Mapping[str, ValueType] | None = None,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Callable[[_F], _F]:
    """Make a function an op: `f(value, *, arguments…)` returns the value of type `output`.

    For an op over several fields: `f(image, mask, *, arguments…)` with `inputs` of those names returns a
    dict of the values declared in `outputs`, each of which replaces the input of its name; other inputs
    stay unchanged.

    The arguments of the op are the keyword-only parameters. An annotation of int, float, str, bool, list or
    dict is checked when a plan is created; a bytes argument is the content of an object, given as
    `s3://BUCKET/KEY`. A parameter named `random` receives the random draws of the sample, a `KeyedRandom`.
    The function itself is unchanged and can be called. It may modify `value`, which is discarded when the
    function returns.
    """

    if unnamed:
        raise TypeError(f"op takes its types by name: write {_EXAMPLE}")
    _check_types((("input", input), ("output", output)), (("inputs", inputs), ("outputs", outputs)))
    if inputs and outputs and input is None and output is None:
        first, made = next(iter(inputs.values())), next(iter(outputs.values()))
    elif input is not None and output is not None and inputs is None and outputs is None:
        first, made = input, output
    else:
        raise TypeError(f"write {_EXAMPLE}, or for several fields inputs={{…}} and outputs={{…}}")

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


def _check_types(single: tuple[tuple[str, object], ...], several: tuple[tuple[str, object], ...]) -> None:
    for name, given in single:
        if given is not None and not isinstance(given, ValueType):
            raise TypeError(
                f"{name}= is one type, such as image('h', 'w', 3), not a {type(given).__name__}; for several "
                f"fields write {name}s={{…}}"
            )
    for name, given in several:
        if given is not None and (
            not isinstance(given, dict) or not all(isinstance(each, ValueType) for each in given.values())
        ):
            raise TypeError(
                f"{name}= is a dictionary of types by the names of the parameters, such as {name}={{"
                "'picture': image('h', 'w', 3), 'boxes': array('float32', (None, 4))}"
            )


def _arguments(function: Callable[..., Any], inputs: tuple[str, ...]) -> tuple[tuple[Argument, ...], bool]:
    """Return the keyword-only parameters, and whether one of them is `random`."""
    parameters = list(inspect.signature(function).parameters.values())
    values, rest = parameters[: len(inputs) or 1], parameters[len(inputs) or 1 :]
    if not values or any(value.kind not in _POSITIONAL for value in values):
        raise TypeError(
            f"{function.__name__}: the first parameter must be positional; it receives the sample's value"
        )
    if inputs and tuple(value.name for value in values) != inputs:
        raise TypeError(f"{function.__name__}: its first parameters must be its inputs: {', '.join(inputs)}")
    wrong = [parameter.name for parameter in rest if parameter.kind is not parameter.KEYWORD_ONLY]
    if wrong:
        fields = "" if inputs else "; another field of the sample needs inputs={…} and outputs={…}"
        raise TypeError(
            f"{function.__name__}: write `*` before {wrong[0]!r}: arguments are passed by name{fields}"
        )
    found = tuple(_argument(parameter) for parameter in rest if parameter.name != "random")
    return found, any(parameter.name == "random" for parameter in rest)


def _argument(parameter: inspect.Parameter) -> Argument:
    given = parameter.annotation
    text = given if isinstance(given, str) else getattr(given, "__name__", "any")
    kind = text.partition("[")[0].strip()
    needed = parameter.default is parameter.empty
    default = None if needed else checked_json(parameter.default, parameter.name)
    return Argument(parameter.name, kind if kind in ARGUMENTS else "any", needed, default)
