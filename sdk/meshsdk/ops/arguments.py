"""Argument checks of the op constructors.

Law: pure. A bad argument raises a ConfigurationError that names the op, the argument and the accepted values;
whatever depends on the node's build of an op is left to the node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from meshsdk.errors import ConfigurationError

MAX_SIDE = 1 << 14


def fields(op: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Check the names of two or more fields."""
    if isinstance(fields, str) or len(set(fields)) != len(fields) or len(fields) < 2:
        raise ConfigurationError(
            f'{op}: name two or more different fields, such as ("image", "mask"); got {fields!r}'
        )
    return tuple(field(op, name) for name in fields)


FILTERS = ("bilinear", "bicubic", "box", "nearest", "fast")


def filter(op: str, given: str, default: str) -> dict[str, str]:
    """Return the `filter` argument of a resampling op, if it is not the default."""
    if given == "antialias":
        warnings.warn(
            f"{op}: filter='antialias' is now called 'fast'; the next release removes the earlier name",
            DeprecationWarning,
            stacklevel=3,
        )
        given = "fast"
    if given not in FILTERS:
        raise ConfigurationError(
            f"{op}: filter must be one of {', '.join(map(repr, FILTERS))}, not {given!r}"
        )
    # The default is left out, so that plans keep the hash they had before the argument existed.
    return {} if given == default else {"filter": given}


def field(op: str, field: object) -> str:
    """Check the name of a field."""
    if not isinstance(field, str) or not field:
        raise ConfigurationError(
            f'{op}: the first argument is the field, such as ops.{op}("image"); got {field!r}'
        )
    return field


def asset(op: str, file: object) -> str:
    """Check the URL or digest of a file in the store."""
    if not isinstance(file, str) or not file.startswith(("s3://", "sha256:")):
        raise ConfigurationError(
            f"{op}: the file must be an object, such as s3://models/tokenizer.json (upload it with "
            f"`mesh cp`), or sha256:HEX; got {file!r}"
        )
    return file


def extents(op: str, name: str, given: object) -> list[Any]:
    """Check a list of extents, one per axis."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"{op}: {name}={given!r}; pass one extent per axis, such as [64] or [64, None]"
        )
    return list(given)


def array(dtype: str | None, shape: Sequence[int | None] | None) -> dict[str, Any]:
    """Return the arguments that describe an array, without those left out."""
    given = {"dtype": dtype, "shape": None if shape is None else list(shape)}
    return {name: value for name, value in given.items() if value is not None}


def probability(op: str, p: float) -> float:
    """Check a probability, 0 to 1."""
    if not _is_number(p) or not 0 <= p <= 1:
        raise ConfigurationError(f"{op}: p={p!r} must be a probability from 0 to 1")
    return float(p)


def labels(labels: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the `labels` argument, if given."""
    if labels is None:
        return {}
    return {"labels": [labels] if isinstance(labels, str) else list(labels)}


def number(op: str, name: str, value: float) -> float:
    """Check one number."""
    if not _is_number(value):
        raise ConfigurationError(f"{op}: {name}={value!r} must be a number, such as 0.4")
    return float(value)


def numbers(op: str, name: str, values: float | Sequence[float]) -> list[float]:
    """Check one or several numbers; returns a list."""
    given: list[Any] = [values] if _is_number(values) else listed(op, name, values)
    return [number(op, name, each) for each in given]


def listed(op: str, name: str, values: object) -> list[Any]:
    """Check a list of values; a string is not one, although Python counts it as a sequence."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{op}: {name}={values!r}; pass numbers, such as [1, 2]")
    return list(values)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def size(op: str, given: int | Sequence[int]) -> int | list[int]:
    """Check a size in pixels: an integer, or [height, width]."""
    sides = [given] if isinstance(given, int) else list(given) if isinstance(given, Sequence) else []
    if (
        len(sides) != (1 if isinstance(given, int) else 2)
        or isinstance(given, bool)
        or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides)
    ):
        raise ConfigurationError(
            f"{op}: size={given!r}; pass whole pixels from 1 to {MAX_SIDE}, such as 224 or [height, width]"
        )
    return given if isinstance(given, int) else sides


def pair(op: str, name: str, values: Sequence[float]) -> tuple[float, float]:
    """Check a pair (low, high) with 0 < low ≤ high."""
    found = numbers(op, name, values)
    if len(found) != 2 or not 0 < found[0] <= found[1]:
        raise ConfigurationError(f"{op}: {name}={values!r}; pass (low, high) with 0 < low <= high")
    return found[0], found[1]
