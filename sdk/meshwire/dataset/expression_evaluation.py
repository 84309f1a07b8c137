"""Evaluation of expressions: the functions they may call, and the nodes they compile to.

Law: total. For any sample a node returns text, a finite float, a truth value, a list or none, and never
raises; an argument of the wrong kind gives none. Time and size of results are bounded by the arguments.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from meshwire.strict_json import PlanError, read_json

Value = str | float | bool | None
"""The result of an expression. Numbers are finite 64-bit floats."""
MAX_RESULT: Final = 1 << 16
_MANY: Final = 16
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the expression language. `usage` shows its arguments, `help` is a short description; it
    takes `least` to `most` arguments."""

    usage: str
    help: str
    run: Callable[..., Any]
    least: int
    most: int


def format_value(value: Value) -> str:
    """Format a value as text: whole numbers without a decimal point, `true`, `false`, `none`."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if value.is_integer() and abs(value) < 1 << 53 else repr(value)


def _of_text(run: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda value: run(value) if isinstance(value, str) else None


def _of_texts(run: Callable[[str, str], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, two: run(one, two) if isinstance(one, str) and isinstance(two, str) else None


def _of_number(run: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda value: float(run(value)) if type(value) is float else None


def _limit_length(text: str) -> str | None:
    return text if len(text) <= MAX_RESULT else None


def _part(text: Any, separator: Any, number: Any) -> str | None:
    if not (isinstance(text, str) and isinstance(separator, str) and separator and type(number) is float):
        return None
    parts = text.split(separator)
    return parts[int(number)] if number.is_integer() and -len(parts) <= number < len(parts) else None


def _slice(text: Any, first: Any, end: Any = math.inf) -> str | None:
    """Slice by positions from 0; negative ones count from the end."""
    if not isinstance(text, str) or type(first) is not float or type(end) is not float:
        return None
    size = len(text)
    return text[int(max(first, -size)) : int(max(-size, min(end, size)))] if first < size else ""


def _replace(text: Any, old: Any, new: Any) -> str | None:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str) and old):
        return None
    size = len(text) + text.count(old) * (len(new) - len(old))
    return text.replace(old, new) if size <= MAX_RESULT else None


@lru_cache(maxsize=256)
def _segments(pattern: str) -> tuple[tuple[str, re.Pattern[str] | None], ...]:
    """Split a pattern at its stars; each segment is literal text, or a regular expression if it contains
    `?`."""
    return tuple((part, _singles(part) if "?" in part else None) for part in pattern.split("*"))


def _singles(part: str) -> re.Pattern[str]:
    return re.compile("".join("." if sign == "?" else re.escape(sign) for sign in part), re.DOTALL)


def _fits(text: str, at: int, part: tuple[str, re.Pattern[str] | None]) -> bool:
    literal, singles = part
    return text.startswith(literal, at) if singles is None else singles.match(text, at) is not None


def _find(text: str, at: int, end: int, part: tuple[str, re.Pattern[str] | None]) -> int:
    literal, singles = part
    if singles is None:
        return text.find(literal, at, end)
    match = singles.search(text, at, end)
    return -1 if match is None else match.start()


def matches(text: str, pattern: str) -> bool:
    """Whether all of `text` matches: `*` is any run of characters including `/`, `?` any single one. Each
    segment is searched once, from left to right, so there is no backtracking."""
    parts = _segments(pattern)
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return len(text) == len(pattern) and _fits(text, 0, first)
    at, end = len(first[0]), len(text) - len(last[0])
    if at > end or not _fits(text, 0, first) or not _fits(text, end, last):
        return False
    for part in parts[1:-1]:
        found = _find(text, at, end, part)
        if found < 0:
            return False
        at = found + len(part[0])
    return True


def _glob(text: Any, pattern: Any) -> bool | None:
    if not isinstance(text, str) or len(text) > MAX_RESULT or len(pattern) > 1024:
        return None
    return matches(text, pattern)


def _length(value: Any) -> float | None:
    return float(len(value)) if isinstance(value, str | list) else None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        text = value.strip() if len(value) <= 128 else ""
        number = float(text) if _NUMBER.fullmatch(text) else math.inf
        return number if math.isfinite(number) else None
    return None if value is None or isinstance(value, list) else float(value)


def _text(value: Any) -> str | None:
    return None if value is None or isinstance(value, list) else format_value(value)


def _hash(value: Any) -> float | None:
    text = _text(value)
    if text is None:
        return None
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest) >> 11)


def _extreme(choose: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        kinds = {type(value) for value in values}
        return choose(list(values)) if kinds in ({float}, {str}) else None

    return run


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _if(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


def _function(usage: str, text: str, run: Callable[..., Any], least: int, most: int = 0) -> Function:
    return Function(usage, text, run, least, most or least)


_ALL: Final = (
    _function("part(text, separator, n)", "the n-th part from 0; −1 is the last", _part, 3),
    _function("slice(text, first, end)", "characters first…end−1; end is optional", _slice, 2, 3),
    _function("folder(key)", "the text before the last /", _of_text(lambda t: t.rpartition("/")[0]), 1),
    _function("base(key)", "the text after the last /", _of_text(lambda t: t.rpartition("/")[2]), 1),
    _function("startswith(text, start)", "whether the text begins with start", _of_texts(str.startswith), 2),
    _function("endswith(text, end)", "whether the text ends with end", _of_texts(str.endswith), 2),
    _function("contains(text, inner)", "whether the text contains inner", _of_texts(lambda a, b: b in a), 2),
    _function(
        'glob(text, "a*b?")', "whether all of it matches; * is any run, / included, ? one character", _glob, 2
    ),
    _function("lower(text)", "in lower case", _of_text(lambda t: _limit_length(t.lower())), 1),
    _function("upper(text)", "in upper case", _of_text(lambda t: _limit_length(t.upper())), 1),
    _function("strip(text)", "without white space at both ends", _of_text(str.strip), 1),
    _function("replace(text, old, new)", "every old replaced by new", _replace, 3),
    _function("length(value)", "characters of a text, elements of a list", _length, 1),
    _function("number(value)", "a text as the number it spells", _number, 1),
    _function("text(value)", "a number as text", _text, 1),
    _function("hash(value)", "a whole number below 2⁵³ that depends only on the value", _hash, 1),
    _function("floor(number)", "rounded down to a whole number", _of_number(math.floor), 1),
    _function("ceil(number)", "rounded up to a whole number", _of_number(math.ceil), 1),
    _function("round(number)", "the nearest whole number, halves to even", _of_number(round), 1),
    _function("abs(number)", "the absolute value", _of_number(abs), 1),
    _function("min(a, b, …)", "the least; all numbers or all texts", _extreme(min), 1, _MANY),
    _function("max(a, b, …)", "the greatest; all numbers or all texts", _extreme(max), 1, _MANY),
    _function("first(a, b, …)", "the first that is not none", _first, 1, _MANY),
    _function("if(condition, yes, no)", "yes if the condition holds, else no", _if, 3),
)
FUNCTIONS: Final[dict[str, Function]] = {each.usage.partition("(")[0]: each for each in _ALL}


class Scope:
    """One sample during the evaluation of an expression; JSON documents in its fields are parsed once."""

    __slots__ = ("parsed", "values")

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = values
        self.parsed: dict[str, Any] = {}

    def document(self, name: str) -> Any:
        if name not in self.parsed:
            self.parsed[name] = _document(self.values.get(name))
        return self.parsed[name]


Node = Callable[[Scope], Any]


def plain(value: Any) -> Value:
    """Convert to a value of the expression language; lists, objects and non-finite numbers become none."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return _finite(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return None
    return None


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _document(value: object) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value)
    if not isinstance(value, bytes | str):
        return value
    try:
        return read_json(value)
    except PlanError:
        return None


def constant_node(value: Value) -> Node:
    return lambda scope: value


def name_node(name: str) -> Node:
    def run(scope: Scope) -> Any:
        value = scope.values.get(name)
        return value if isinstance(value, str | list) else plain(value)

    return run


def path_node(name: str, steps: tuple[str | int, ...]) -> Node:
    def run(scope: Scope) -> Any:
        value = scope.document(name)
        for step in steps:
            if isinstance(value, Mapping) and isinstance(step, str):
                value = value.get(step)
            elif isinstance(value, list | tuple) and isinstance(step, int) and -1 < step < len(value):
                value = value[step]
            else:
                return None
        return value if isinstance(value, list) else plain(value)

    return run


def or_node(left: Node, right: Node) -> Node:
    return lambda scope: bool(left(scope)) or bool(right(scope))


def and_node(left: Node, right: Node) -> Node:
    return lambda scope: bool(left(scope)) and bool(right(scope))


def truth_node(node: Node, inverted: bool) -> Node:
    return lambda scope: bool(node(scope)) is not inverted


def _alike(left: Any, right: Any) -> bool:
    """Whether two values are of one kind: both text, both numbers or both truth values."""
    return type(left) is type(right) and not isinstance(left, list)


def comparison_node(sign: str, left: Node, right: Node) -> Node:
    test = _TESTS[sign]

    def run(scope: Scope) -> bool:
        one, two = left(scope), right(scope)
        return test(one, two) if _alike(one, two) and one is not None else _unlike(sign, one, two)

    return run


def _unlike(sign: str, left: Any, right: Any) -> bool:
    """Compare values of different kinds: they are unequal and unordered; none equals none."""
    same = left is None and right is None
    return same if sign == "==" else not same if sign == "!=" else False


_TESTS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "==": lambda left, right: bool(left == right),
    "!=": lambda left, right: bool(left != right),
    "<": lambda left, right: bool(left < right),
    "<=": lambda left, right: bool(left <= right),
    ">": lambda left, right: bool(left > right),
    ">=": lambda left, right: bool(left >= right),
}


def membership_node(node: Node, items: list[Node]) -> Node:
    def run(scope: Scope) -> bool:
        value = node(scope)
        found = (item(scope) for item in items)
        return any(_alike(value, item) and value == item for item in found)

    return run


def arithmetic_node(sign: str, left: Node, right: Node) -> Node:
    calculate = _OPERATORS[sign]

    def run(scope: Scope) -> Any:
        one, two = left(scope), right(scope)
        if isinstance(one, str) and isinstance(two, str):
            return one + two if sign == "+" and len(one) + len(two) <= MAX_RESULT else None
        if type(one) is not float or type(two) is not float:
            return None
        try:
            return _finite(calculate(one, two))
        except (ZeroDivisionError, OverflowError):
            return None

    return run


_OPERATORS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
    "%": lambda left, right: left % right,
}


def call_node(run: Callable[..., Any], arguments: list[Node]) -> Node:
    return lambda scope: run(*[argument(scope) for argument in arguments])
