"""The words of expressions: names, numbers, texts in quotes, operators.

Law: pure; one pass over the text. What is no word becomes one of kind `bad` whose text says why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYWORDS: Final = frozenset({"and", "or", "not", "in", "true", "false", "none"})
# Alternatives that begin differently: nothing here goes back over what it read.
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>==|!=|<=|>=|[-<>+*/%().,\[\]])"
)
_QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "'\"`"}
_ESCAPES: Final = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Token:
    """`at`: where it begins, in characters; `value` of a number or a text."""

    kind: Literal["number", "text", "word", "name", "sign", "end", "bad"]
    text: str
    at: int
    value: str | float = ""


def tokens(text: str) -> Iterator[Token]:
    """The words of `text`, an `end` or a `bad` one last."""
    at = 0
    while at < len(text):
        token, at = _quoted(text, at) if text[at] in _QUOTED else _plain(text, at)
        if token is None:
            continue
        yield token
        if token.kind == "bad":
            return
    yield Token("end", "", len(text))


def _quoted(text: str, at: int) -> tuple[Token | None, int]:
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
        hint = "; compare with ==" if text[at] == "=" else ""
        return Token("bad", f"{text[at]!r} means nothing here{hint}", at), len(text)
    kind, found, end = match.lastgroup, match[0], match.end()
    if kind == "space":
        return None, end
    if kind == "number":
        if len(found) > 40 or abs(float(found)) > 1e300:
            return Token("bad", "a number with more than 40 digits, or above 1e300", at), end
        return Token("number", found, at, float(found)), end
    return Token("word" if kind == "word" else "sign", found, at), end
