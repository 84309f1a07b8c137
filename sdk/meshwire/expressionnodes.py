"""What an expression is compiled to: functions of one sample.

Law: total. Whatever the sample, a node gives text, a finite float, a truth value, a list of a document, or
none, and never raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from meshwire.documents import PlanError, read_json
from meshwire.expressionfunctions import MAX_RESULT

if TYPE_CHECKING:
    from meshwire.expressionfunctions import Value


class Scope:
    """One sample while an expression is evaluated; documents in its fields are parsed once."""

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
    """As a value of an expression; lists, objects and numbers that are none become none."""
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


def constant(value: Value) -> Node:
    return lambda scope: value


def named(name: str) -> Node:
    def run(scope: Scope) -> Any:
        value = scope.values.get(name)
        return value if isinstance(value, str | list) else plain(value)

    return run


def walked(name: str, steps: tuple[str | int, ...]) -> Node:
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


def either(left: Node, right: Node) -> Node:
    return lambda scope: bool(left(scope)) or bool(right(scope))


def both(left: Node, right: Node) -> Node:
    return lambda scope: bool(left(scope)) and bool(right(scope))


def truth(node: Node, inverted: bool) -> Node:
    return lambda scope: bool(node(scope)) is not inverted


def _alike(left: Any, right: Any) -> bool:
    """Whether two values are of one kind: both text, both numbers or both truth values."""
    return type(left) is type(right) and not isinstance(left, list)


def compared(sign: str, left: Node, right: Node) -> Node:
    test = _TESTS[sign]

    def run(scope: Scope) -> bool:
        one, two = left(scope), right(scope)
        return test(one, two) if _alike(one, two) and one is not None else _unlike(sign, one, two)

    return run


def _unlike(sign: str, left: Any, right: Any) -> bool:
    """Values of different kinds are unequal and in no order; none equals none."""
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


def member(node: Node, items: list[Node]) -> Node:
    def run(scope: Scope) -> bool:
        value = node(scope)
        found = (item(scope) for item in items)
        return any(_alike(value, item) and value == item for item in found)

    return run


def calculated(sign: str, left: Node, right: Node) -> Node:
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


def called(run: Callable[..., Any], arguments: list[Node]) -> Node:
    return lambda scope: run(*[argument(scope) for argument in arguments])
