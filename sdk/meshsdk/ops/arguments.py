"""Argument checks of the op constructors.

Law: pure. A bad argument is a ConfigurationError that names the op, the argument and the accepted
values; only the node checks what only the node can know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from meshsdk.errors import ConfigurationError

MAX_SIDE = 1 << 14


def fields(op: str, fields: Sequence[str]) -> tuple[str, ...]:
    """Names of two fields or more."""
    if isinstance(fields, str) or len(set(fields)) != len(fields) or len(fields) < 2:
        raise ConfigurationError(f'{op}: name two fields or more, as ("image", "mask"); got {fields!r}')
    return tuple(field(op, name) for name in fields)


def filter(op: str, given: str) -> dict[str, str]:
    """How pixels are resampled."""
    if given not in ("antialias", "nearest"):
        raise ConfigurationError(f"{op}: filter is 'antialias' or 'nearest', not {given!r}")
    return {} if given == "antialias" else {"filter": given}  # left out, a plan keeps the hash it always had


def field(op: str, field: object) -> str:
    """The name of one."""
    if not isinstance(field, str) or not field:
        raise ConfigurationError(f'{op}: name the field first, as ops.{op}("image"); got {field!r}')
    return field


def asset(op: str, file: object) -> str:
    """A file of the store."""
    if not isinstance(file, str) or not file.startswith(("s3://", "sha256:")):
        raise ConfigurationError(
            f"{op}: the file is an object, as s3://models/tokenizer.json (put it there with `mesh cp`), or "
            f"sha256:HEX; got {file!r}"
        )
    return file


def extents(op: str, name: str, given: object) -> list[Any]:
    """One along each axis."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{op}: {name}={given!r}; give one for each axis, as [64] or [64, None]")
    return list(given)


def array(dtype: str | None, shape: Sequence[int | None] | None) -> dict[str, Any]:
    """What is said of an array, and no more."""
    given = {"dtype": dtype, "shape": None if shape is None else list(shape)}
    return {name: value for name, value in given.items() if value is not None}


def probability(op: str, p: float) -> float:
    """0 to 1."""
    if not _is_number(p) or not 0 <= p <= 1:
        raise ConfigurationError(f"{op}: p={p!r} is a probability, 0 to 1")
    return float(p)


def labels(labels: Sequence[str] | None) -> dict[str, list[str]]:
    """Which fields are labels, if that is said."""
    if labels is None:
        return {}
    return {"labels": [labels] if isinstance(labels, str) else list(labels)}


def number(op: str, name: str, value: float) -> float:
    """One."""
    if not _is_number(value):
        raise ConfigurationError(f"{op}: {name}={value!r} is one number, as 0.4")
    return float(value)


def numbers(op: str, name: str, values: float | Sequence[float]) -> list[float]:
    """One or several."""
    given: list[Any] = [values] if _is_number(values) else listed(op, name, values)
    return [number(op, name, each) for each in given]


def listed(op: str, name: str, values: object) -> list[Any]:
    """Several; a text is none of them, though Python takes it for a sequence."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{op}: {name}={values!r}; give numbers, as [1, 2]")
    return list(values)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def size(op: str, given: int | Sequence[int]) -> int | list[int]:
    """Pixels: a number, or [height, width]."""
    sides = [given] if isinstance(given, int) else list(given) if isinstance(given, Sequence) else []
    if (
        len(sides) != (1 if isinstance(given, int) else 2)
        or isinstance(given, bool)
        or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides)
    ):
        raise ConfigurationError(f"{op}: size={given!r}; give whole pixels, as 224 or [height, width]")
    return given if isinstance(given, int) else sides


def pair(op: str, name: str, values: Sequence[float]) -> tuple[float, float]:
    """(low, high), both above 0."""
    found = numbers(op, name, values)
    if len(found) != 2 or not 0 < found[0] <= found[1]:
        raise ConfigurationError(f"{op}: {name}={values!r}; give (low, high), both above 0")
    return found[0], found[1]
