"""Strict parsing of untrusted JSON: bounded in size, depth and count, typed, without unknown or duplicate
fields.

Law: every fault in a document raises PlanError with the path of the bad field, and no other exception.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_DOCUMENT_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_VALUES = 1 << 17
MAX_TEXT = 1 << 16
MAX_INTEGER = (1 << 63) - 1
_SHOWN = 60
_HASH = re.compile(r"[0-9a-f]{64}")


class PlanError(ValueError):
    """A plan, field list or state that cannot be used. `path` names the faulty field, for example
    `ops[2].args.size`.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


def shown_value(value: object) -> str:
    """Format `value` for a message: one line of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


_TOLD = 30  # names listed in one message
_NEAR = 3
_WORD = re.compile(r"[^\W_]+")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the closest name, or else names that contain a similar word; if there
    is none, list the known names."""
    names, word = sorted(known), word[:100]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6) or [
        name for name in names if difflib.get_close_matches(word, _WORD.findall(name), n=1, cutoff=0.75)
    ]
    if close:
        return f"; did you mean {' or '.join(map(repr, close[:_NEAR]))}?"
    more = ", …" if len(names) > _TOLD else ""
    return f"; known: {', '.join(names[:_TOLD]) or 'none yet'}{more}"


def read_json(source: bytes | str, path: str = "", *, at_most: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parse a JSON document of at most 1 MiB (`at_most` bytes) without NaN, duplicate names or deep nesting.
    Raises PlanError."""
    if len(source) > at_most:
        raise PlanError(path, f"the document has more than {at_most} bytes; send a smaller one")
    try:
        value = json.loads(source, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except PlanError as error:
        raise PlanError(path, error.message) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(path, f"not a JSON document: {shown_value(str(error))}") from error
    return checked_json(value, path)


def _no_constant(name: str) -> NoReturn:
    raise PlanError("", f"{name} is not JSON; write a finite number")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise PlanError("", f"the name {shown_value(doubled)} appears twice in one object; remove one")
    return result


def checked_json(value: Any, path: str) -> Any:
    """Return `value` as plain JSON types (tuples become lists) within this module's limits. Raises
    PlanError."""
    return _Checker().check(value, path, 0)


class _Checker:
    """Checks one document and counts its values."""

    def __init__(self) -> None:
        self.values = 0

    def check(self, value: Any, path: str, depth: int) -> Any:
        self.values += 1
        if depth > MAX_DEPTH or self.values > MAX_VALUES:
            raise PlanError(path, f"nested deeper than {MAX_DEPTH} levels, or more than {MAX_VALUES} values")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return checked_text(value, path)
        if isinstance(value, int):
            return checked_integer(value, path, -MAX_INTEGER, MAX_INTEGER)
        if isinstance(value, float):
            return checked_number(value, path)
        return self._check_container(value, path, depth)

    def _check_container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.check(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {
                checked_text(name, path): self.check(item, join_path(path, name), depth + 1)
                for name, item in value.items()
            }
        raise PlanError(
            path, f"{type(value).__name__} is not a JSON value; use numbers, text, lists or objects"
        )


def join_path(path: str, name: object) -> str:
    text = shown_value(name) if len(str(name)) > _SHOWN else str(name)
    return f"{path}.{text}" if path else text


def checked_text(value: Any, path: str, *, at_most: int = MAX_TEXT) -> str:
    """Return `value` if it is a string of at most `at_most` characters that can be encoded as UTF-8. Raises
    PlanError."""
    if not isinstance(value, str):
        raise PlanError(path, f"expected text, got {shown_value(value)}")
    if len(value) > at_most:
        raise PlanError(path, f"text of {len(value)} characters; at most {at_most} are allowed")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PlanError(path, "text with an unpaired surrogate; send valid Unicode") from error
    return value


def checked_hash(value: Any, path: str) -> str:
    """Return `value` if it is a SHA-256 in lower-case hex. Raises PlanError."""
    text = checked_text(value, path, at_most=64)
    if not _HASH.fullmatch(text):
        raise PlanError(path, f"expected 64 lower-case hex digits, got {text!r}")
    return text


def checked_integer(value: Any, path: str, low: int, high: int) -> int:
    """Return `value` if it is an integer in [low, high]. Raises PlanError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(path, f"expected an integer, got {shown_value(value)}")
    if not low <= value <= high:
        shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
        raise PlanError(path, f"{shown} is outside {low}…{high}")
    return value


def checked_boolean(value: Any, path: str) -> bool:
    """Return `value` if it is true or false. Raises PlanError."""
    if not isinstance(value, bool):
        raise PlanError(path, f"expected true or false, got {shown_value(value)}")
    return value


def checked_number(value: Any, path: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Return `value` as a finite float in [low, high]. Raises PlanError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(path, f"expected a number, got {shown_value(value)}")
    if isinstance(value, int):
        checked_integer(value, path, -MAX_INTEGER, MAX_INTEGER)
    if not math.isfinite(value):
        raise PlanError(path, f"{value} is not a finite number")
    if not low <= value <= high:
        raise PlanError(path, f"{value} is outside {low}…{high}")
    return float(value)


def checked_choice(value: Any, path: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`. Raises PlanError."""
    names = tuple(known)
    if isinstance(value, str) and value in names:
        return value
    if not isinstance(value, str):
        raise PlanError(path, f"expected one of {', '.join(names)}, got {shown_value(value)}")
    raise PlanError(path, f"unknown value {shown_value(value)}{suggestion(value, names)}")


def checked_object(value: Any, path: str, known: Iterable[str]) -> Mapping[str, Any]:
    """Return `value` if it is an object whose names are all in `known`. Raises PlanError."""
    if not isinstance(value, dict):
        raise PlanError(path, f"expected an object, got {shown_value(value)}")
    names = tuple(known)
    for name in value:
        if name not in names:
            raise PlanError(join_path(path, name), f"unknown field{suggestion(str(name), names)}")
    return value


def required_field(document: Mapping[str, Any], name: str, path: str) -> Any:
    """Return the value of a required field. Raises PlanError if it is missing."""
    if name not in document:
        raise PlanError(join_path(path, name), "missing; the field is required")
    return document[name]


def canonical_json(value: Any) -> bytes:
    """Encode a value in its only canonical form: sorted names, no spaces, whole floats below 2**53 as
    integers (as in RFC 8785).

    Defined only for values that `checked_json` accepts.
    """
    text = json.dumps(
        _normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def _normal(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    if isinstance(value, dict):
        return {name: _normal(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    return value
