"""Expressions over a sample's names: what to sort, group and filter by, as `part(key, "/", 1)` or
`ext == "jpg" and size > 10000`.

Law: pure and total. Whatever the sample, evaluating gives text, a finite number, a truth value or none, and
never raises; time is bounded by the expression's length times the texts'. No loops, no regular expressions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshwire import expressionnodes as nodes
from meshwire.documents import PlanError, checked_text, shown, suggestion
from meshwire.expressionfunctions import FUNCTIONS, Value, spelled
from meshwire.expressionnodes import Scope
from meshwire.expressiontokens import KEYWORDS, tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwire.expressionnodes import Node
    from meshwire.expressiontokens import Token

__all__ = ["Expression", "Value", "order_key", "parse_expression", "spelled"]

MAX_LENGTH: Final = 4096
_MAX_NODES: Final = 256
_MAX_DEPTH: Final = 32
_COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Expression:
    """`text` as it was given; `names`: what `evaluate` looks up, the names before any path."""

    text: str
    names: frozenset[str]
    _run: Node

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def evaluate(self, values: Mapping[str, object]) -> Value:
        """Of a sample's values by name: text, numbers, truth values, bytes (UTF-8 text; under a path a JSON
        document), JSON lists and objects. A name that is missing, like all that makes no sense, is none."""
        return nodes.plain(self._run(Scope(values)))

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether the value is anything but false, none, zero and empty text."""
        return bool(self.evaluate(values))


def order_key(value: Value) -> tuple[int, float, str]:
    """Sorts values of all kinds: numbers (false and true are 0 and 1), then text by its UTF-8 bytes, then
    none."""
    if isinstance(value, str):
        return (1, 0.0, value)
    return (2, 0.0, "") if value is None else (0, float(value), "")


def parse_expression(text: Any, path: str = "", known: Iterable[str] = ()) -> Expression:
    """Raises PlanError at `path`, with the place in the text; for a name that is not `known`, if any are
    given, too."""
    source = checked_text(text, path, at_most=MAX_LENGTH)
    try:
        parser = _Parser(source, tuple(known))
        node = parser.whole()
    except _PlaceError as error:
        raise PlanError(path, f"at character {error.at + 1} of {shown(source)}: {error.message}") from None
    return Expression(source, frozenset(parser.names), node)


class _PlaceError(ValueError):
    def __init__(self, at: int, message: str) -> None:
        super().__init__(message)
        self.at, self.message = at, message


class _Parser:
    """Recursive descent; each method compiles what it reads to a function of the scope."""

    def __init__(self, text: str, known: tuple[str, ...]) -> None:
        self.names: set[str] = set()
        self._known, self._at, self._nodes, self._depth = known, 0, 0, 0
        self._tokens = list(tokens(text))
        bad = next((token for token in self._tokens if token.kind == "bad"), None)
        if bad is not None:
            raise _PlaceError(bad.at, bad.text)

    def whole(self) -> Node:
        node = self._either()
        if self._next.kind != "end":
            raise self._unexpected("an operator or the end")
        return node

    # --- tokens ----------------------------------------------------------------------------------------

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self, *texts: str) -> Token | None:
        token = self._next
        if token.kind in ("sign", "word") and token.text in texts:
            self._at += 1
            return token
        return None

    def _expect(self, sign: str) -> None:
        if self._take(sign) is None:
            raise self._unexpected(repr(sign))

    def _unexpected(self, wanted: str) -> _PlaceError:
        token = self._next
        found = "the end" if token.kind == "end" else shown(token.text)
        return _PlaceError(token.at, f"expected {wanted}, not {found}")

    def _counted(self, node: Node) -> Node:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise _PlaceError(self._next.at, f"the expression has more than {_MAX_NODES} parts")
        return node

    # --- grammar, the loosest operator first -----------------------------------------------------------

    def _either(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _PlaceError(self._next.at, f"nested deeper than {_MAX_DEPTH}")
        node = self._both()
        while self._take("or"):
            node = self._counted(nodes.either(node, self._both()))
        self._depth -= 1
        return node

    def _both(self) -> Node:
        node = self._negated()
        while self._take("and"):
            node = self._counted(nodes.both(node, self._negated()))
        return node

    def _negated(self) -> Node:
        count = 0
        while self._take("not"):
            count += 1
        node = self._compared()
        return self._counted(nodes.truth(node, count % 2 == 1)) if count else node

    def _compared(self) -> Node:
        node = self._sum()
        if sign := self._take(*_COMPARISONS):
            node = self._counted(nodes.compared(sign.text, node, self._sum()))
        elif self._take("in"):
            node = self._counted(nodes.member(node, self._list()))
        elif self._next.text == "not" and self._next.kind == "word":
            self._at += 1
            if self._take("in") is None:
                raise self._unexpected("'in'")
            node = self._counted(nodes.truth(nodes.member(node, self._list()), True))
        if self._next.kind == "sign" and self._next.text in _COMPARISONS:
            raise _PlaceError(self._next.at, "comparisons do not chain; join two with `and`")
        return node

    def _list(self) -> list[Node]:
        self._expect("(")
        return self._arguments()

    def _arguments(self) -> list[Node]:
        """Up to the closing parenthesis; the opening one is read."""
        found: list[Node] = []
        if self._take(")"):
            return found
        while True:
            found.append(self._either())
            if self._take(")"):
                return found
            self._expect(",")

    def _sum(self) -> Node:
        node = self._product()
        while sign := self._take("+", "-"):
            node = self._counted(nodes.calculated(sign.text, node, self._product()))
        return node

    def _product(self) -> Node:
        node = self._signed()
        while sign := self._take("*", "/", "%"):
            node = self._counted(nodes.calculated(sign.text, node, self._signed()))
        return node

    def _signed(self) -> Node:
        count = 0
        while self._take("-"):
            count += 1
        node = self._operand()
        for _ in range(2 - count % 2 if count else 0):  # twice is no change of sign, but still a number
            node = self._counted(nodes.calculated("-", nodes.constant(0.0), node))
        return node

    def _operand(self) -> Node:
        token = self._next
        if token.kind in ("number", "text"):
            self._at += 1
            return self._counted(nodes.constant(token.value))
        if self._take("("):
            node = self._either()
            self._expect(")")
            return node
        if token.kind == "word" and token.text in KEYWORDS:
            if token.text not in _CONSTANTS:
                raise self._unexpected("a value")
            self._at += 1
            return self._counted(nodes.constant(_CONSTANTS[token.text]))
        if token.kind not in ("word", "name"):
            raise self._unexpected("a name, a number, a text in quotes or (")
        self._at += 1
        if token.kind == "word" and self._take("("):
            return self._counted(self._call(token))
        return self._counted(self._name(token))

    def _name(self, token: Token) -> Node:
        name = token.text
        if self._known and name not in self._known:
            raise _PlaceError(
                token.at, f"there is no {shown(name)} (a text has quotes){suggestion(name, self._known)}"
            )
        self.names.add(name)
        steps: list[str | int] = []
        while sign := self._take(".", "["):
            step = self._next
            if sign.text == "." and step.kind in ("word", "name"):
                steps.append(step.text)
            elif sign.text == "[" and step.kind == "text":
                steps.append(str(step.value))
            elif sign.text == "[" and step.kind == "number" and float(str(step.value)).is_integer():
                steps.append(int(float(str(step.value))))
            else:
                raise self._unexpected("a name" if sign.text == "." else "a position or a name in quotes")
            self._at += 1
            if sign.text == "[":
                self._expect("]")
        return nodes.walked(name, tuple(steps)) if steps else nodes.named(name)

    def _call(self, token: Token) -> Node:
        function = FUNCTIONS.get(token.text)
        if function is None:
            raise _PlaceError(token.at, f"no function {token.text}(){suggestion(token.text, FUNCTIONS)}")
        arguments = self._arguments()
        if not function.least <= len(arguments) <= function.most:
            raise _PlaceError(token.at, f"write {function.usage}")
        comma, pattern, _ = self._tokens[self._at - 3 : self._at]
        if token.text == "glob" and not (comma.text == "," and pattern.kind == "text"):
            raise _PlaceError(token.at, f"the pattern is a text in quotes: write {function.usage}")
        return nodes.called(function.run, arguments)


_CONSTANTS: Final[Mapping[str, Value]] = {"true": True, "false": False, "none": None}
