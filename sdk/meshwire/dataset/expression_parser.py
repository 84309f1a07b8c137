"""Parser of expressions over a sample, for sorting, grouping and filtering: `ext == "jpg" and size >
10000`.

Law: pure and total. Evaluation gives text, a finite number, a truth value or none for any sample, and never
raises; its time is bounded by the length of the expression times that of the texts. No loops, no regular
expressions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from meshwire.dataset import expression_evaluation as nodes
from meshwire.dataset.expression_evaluation import FUNCTIONS, Scope, Value, format_value
from meshwire.strict_json import PlanError, checked_text, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from meshwire.dataset.expression_evaluation import Node


KEYWORDS: Final = frozenset({"and", "or", "not", "in", "true", "false", "none"})
# The alternatives begin with different characters, so matching never backtracks.
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>==|!=|<=|>=|[-<>+*/%().,\[\]])"
)
_QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "'\"`"}
_ESCAPES: Final = {"n": "\n", "t": "\t"}
# What Python, SQL and others write, and what is written here.
_SIGNS_ELSEWHERE: Final = {
    "=": "; compare with ==",
    "&": "; write `and`",
    "|": "; write `or`",
    "!": "; write `not`, or != to compare",
}
_WORDS_ELSEWHERE: Final = {
    "is": "; compare with == or !=, such as X != none",
    "like": "; write glob(X, 'a*')",
    "(": "; a function stands before its values, such as startswith(key, 'a')",
}
_NAMES_ELSEWHERE: Final = {"None": "none", "null": "none", "NULL": "none", "True": "true", "False": "false"}
_FUNCTIONS_ELSEWHERE: Final = {
    "len": "length",
    "str": "text",
    "int": "floor",
    "float": "number",
    "exists": "X != none",
    "has": "X != none",
    "isnull": "X == none",
    "coalesce": "first",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an expression. `at`: its start in characters; `value` of a number or a text."""

    kind: Literal["number", "text", "word", "name", "sign", "end", "bad"]
    text: str
    at: int
    value: str | float = ""


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of `text`; the last is an `end` or a `bad` token."""
    at = 0
    while at < len(text):
        token, at = _quoted_token(text, at) if text[at] in _QUOTED else _plain(text, at)
        if token is None:
            continue
        yield token
        if token.kind == "bad":
            return
    yield Token("end", "", len(text))


def _quoted_token(text: str, at: int) -> tuple[Token | None, int]:
    quote = text[at]
    match = _QUOTED[quote].match(text, at)
    if match is None:
        return Token("bad", f"the {quote} is never closed", at), len(text)
    inner = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), match[1], flags=re.DOTALL)
    if quote == "`":
        return Token("name", inner, at), match.end()
    return Token("text", match[0], at, inner), match.end()


def _plain(text: str, at: int) -> tuple[Token | None, int]:
    match = _TOKEN.match(text, at)
    if match is None:
        hint = _SIGNS_ELSEWHERE.get(text[at], "")
        return Token("bad", f"{text[at]!r} is not valid here{hint}", at), len(text)
    kind, found, end = match.lastgroup, match[0], match.end()
    if kind == "space":
        return None, end
    if kind == "number":
        if len(found) > 40 or abs(float(found)) > 1e300:
            return Token("bad", "a number with more than 40 digits, or above 1e300", at), end
        return Token("number", found, at, float(found)), end
    return Token("word" if kind == "word" else "sign", found, at), end


__all__ = ["Expression", "Value", "format_value", "parse_expression", "sort_key"]

MAX_LENGTH: Final = 4096
_MAX_NODES: Final = 256
_MAX_DEPTH: Final = 32
_COMPARISONS: Final = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Expression:
    """A compiled expression. `text` is its source; `names`: the names that `evaluate` looks up, without
    their paths."""

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
        """Evaluate over a sample's values by name: text, numbers, truth values, bytes (UTF-8 text; under a
        path a JSON document), JSON lists and objects. A missing name gives none, and so does any
        meaningless operation."""
        return nodes.plain(self._run(Scope(values)))

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether the value is anything other than false, none, zero or empty text."""
        return bool(self.evaluate(values))


def sort_key(value: Value) -> tuple[int, float, str]:
    """Return a key that sorts values of all kinds: numbers (false and true are 0 and 1), then text by its
    UTF-8 bytes, then none."""
    if isinstance(value, str):
        return (1, 0.0, value)
    return (2, 0.0, "") if value is None else (0, float(value), "")


def parse_expression(text: Any, path: str = "", known: Iterable[str] = ()) -> Expression:
    """Parse an expression. Raises PlanError at `path`, with the position in the text, for a syntax error
    or, if `known` is given, for a name not in it."""
    source = checked_text(text, path, at_most=MAX_LENGTH)
    try:
        parser = _Parser(source, tuple(known))
        node = parser.whole()
    except _PlaceError as error:
        raise PlanError(
            path, f"at character {error.at + 1} of {shown_value(source)}: {error.message}"
        ) from None
    return Expression(source, frozenset(parser.names), node)


class _PlaceError(ValueError):
    def __init__(self, at: int, message: str) -> None:
        super().__init__(message)
        self.at, self.message = at, message


class _Parser:
    """Recursive descent parser; each method compiles what it reads to a function of the scope."""

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
            raise self._unexpected_error("an operator or the end")
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
            raise self._unexpected_error(repr(sign))

    def _unexpected_error(self, wanted: str) -> _PlaceError:
        token = self._next
        found = "the end" if token.kind == "end" else shown_value(token.text)
        hint = _WORDS_ELSEWHERE.get(token.text, "") if "operator" in wanted else ""
        return _PlaceError(token.at, f"expected {wanted}, not {found}{hint}")

    def _count_node(self, node: Node) -> Node:
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
            node = self._count_node(nodes.or_node(node, self._both()))
        self._depth -= 1
        return node

    def _both(self) -> Node:
        node = self._parse_negation()
        while self._take("and"):
            node = self._count_node(nodes.and_node(node, self._parse_negation()))
        return node

    def _parse_negation(self) -> Node:
        count = 0
        while self._take("not"):
            count += 1
        node = self._parse_comparison()
        return self._count_node(nodes.truth_node(node, count % 2 == 1)) if count else node

    def _parse_comparison(self) -> Node:
        node = self._sum()
        if sign := self._take(*_COMPARISONS):
            node = self._count_node(nodes.comparison_node(sign.text, node, self._sum()))
        elif self._take("in"):
            node = self._count_node(nodes.membership_node(node, self._list()))
        elif self._next.text == "not" and self._next.kind == "word":
            self._at += 1
            if self._take("in") is None:
                raise self._unexpected_error("'in'")
            node = self._count_node(nodes.truth_node(nodes.membership_node(node, self._list()), True))
        if self._next.kind == "sign" and self._next.text in _COMPARISONS:
            raise _PlaceError(self._next.at, "comparisons do not chain; join two with `and`")
        return node

    def _list(self) -> list[Node]:
        if self._take("(") is None:
            raise self._unexpected_error(
                "'(' of a list, as in X in ('a', 'b'), or contains(text, part) for a text"
            )
        return self._arguments()

    def _arguments(self) -> list[Node]:
        """Parse the arguments up to the closing parenthesis; the opening one has been consumed."""
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
            node = self._count_node(nodes.arithmetic_node(sign.text, node, self._product()))
        return node

    def _product(self) -> Node:
        node = self._parse_sign()
        while sign := self._take("*", "/", "%"):
            node = self._count_node(nodes.arithmetic_node(sign.text, node, self._parse_sign()))
        return node

    def _parse_sign(self) -> Node:
        count = 0
        while self._take("-"):
            count += 1
        node = self._operand()
        for _ in range(2 - count % 2 if count else 0):  # a double negation still requires a number
            node = self._count_node(nodes.arithmetic_node("-", nodes.constant_node(0.0), node))
        return node

    def _operand(self) -> Node:
        token = self._next
        if token.kind in ("number", "text"):
            self._at += 1
            return self._count_node(nodes.constant_node(token.value))
        if self._take("("):
            node = self._either()
            self._expect(")")
            return node
        if token.kind == "word" and token.text in KEYWORDS:
            if token.text not in _CONSTANTS:
                raise self._unexpected_error("a value")
            self._at += 1
            return self._count_node(nodes.constant_node(_CONSTANTS[token.text]))
        if token.kind not in ("word", "name"):
            raise self._unexpected_error("a name, a number, a text in quotes or (")
        self._at += 1
        if token.kind == "word" and self._take("("):
            return self._count_node(self._call(token))
        return self._count_node(self._name(token))

    def _name(self, token: Token) -> Node:
        name = token.text
        if self._known and name not in self._known:
            raise _PlaceError(token.at, f"there is no {shown_value(name)}{self._name_hint(name)}")
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
                raise self._unexpected_error(
                    "a name" if sign.text == "." else "a position or a name in quotes"
                )
            self._at += 1
            if sign.text == "[":
                self._expect("]")
        return nodes.path_node(name, tuple(steps)) if steps else nodes.name_node(name)

    def _name_hint(self, name: str) -> str:
        if name in _NAMES_ELSEWHERE:
            return f"; write {_NAMES_ELSEWHERE[name]}"
        return f" (put text in quotes){suggestion(name, self._known)}"

    def _call(self, token: Token) -> Node:
        function = FUNCTIONS.get(token.text)
        if function is None:
            meant = _FUNCTIONS_ELSEWHERE.get(token.text.lower())
            hint = f"; write {FUNCTIONS[meant].usage if meant in FUNCTIONS else meant}" if meant else ""
            raise _PlaceError(
                token.at, f"no function {token.text}(){hint or suggestion(token.text, FUNCTIONS)}"
            )
        arguments = self._arguments()
        if not function.least <= len(arguments) <= function.most:
            raise _PlaceError(token.at, f"write {function.usage}")
        comma, pattern, _ = self._tokens[self._at - 3 : self._at]
        if token.text == "glob" and not (comma.text == "," and pattern.kind == "text"):
            raise _PlaceError(token.at, f"the pattern must be a text in quotes: write {function.usage}")
        return nodes.call_node(function.run, arguments)


_CONSTANTS: Final[Mapping[str, Value]] = {"true": True, "false": False, "none": None}
