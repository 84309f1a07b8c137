"""Wildcard patterns with `*`, `?` and policy variables (`${aws:username}`).

Law: matching never backtracks; its cost is bounded by pattern length times text length.
Invariant: the value of a variable is compared literally, and a variable without a value matches nothing.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwire.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable

    Resolve = Callable[[str], str | None]


class Wildcard(Enum):
    ONE = "?"
    MANY = "*"


@dataclass(frozen=True, slots=True)
class Variable:
    """A policy variable. `name` is a condition key in lower case; `default` is used if the key has no
    value."""

    name: str
    default: str | None = None


Piece = str | Wildcard | Variable


class MaskedSegment(NamedTuple):
    """A segment that contains `?`; `length` in characters; `literals`: each character, None for a `?`."""

    expression: re.Pattern[str]
    length: int
    literals: tuple[str | None, ...]


Segment = str | MaskedSegment
# A variable, the start of an invalid variable, or a wildcard.
_SPECIAL = re.compile(r"\$\{\s*([A-Za-z0-9:/._+=@-]+|[*?$])\s*(?:,\s*'([^']*)'\s*)?\}|(\$\{)|[*?]")
_WILD = re.compile(r"[*?]")


def parse_pieces(text: str, path: str, *, wild: bool, variables: bool) -> tuple[Piece, ...]:
    """Split `text` into literals, wildcards and variables. Raises PolicyError for an invalid variable."""
    pieces: list[Piece] = []
    at = 0
    for found in (_SPECIAL if variables else _WILD).finditer(text):
        pieces += [text[at : found.start()], _special(found, path, wild=wild)]
        at = found.end()
    return tuple(_join_literals([*pieces, text[at:]]))


def _special(found: re.Match[str], path: str, *, wild: bool) -> Piece:
    if found[0] in "*?":
        return Wildcard(found[0]) if wild else found[0]
    name = found[1]
    if name is None:
        raise PolicyError(path, "a policy variable has the form ${aws:username} or ${name, 'default'}")
    return name if name in "*?$" else Variable(name.lower(), found[2])


def _join_literals(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbouring literals, drop empty ones, and reduce `**` to `*`."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif piece and not (piece is Wildcard.MANY and last is Wildcard.MANY):
            joined.append(piece)
    return joined


class Glob:
    """A compiled pattern. `text` is the source; `fold` compares without regard to case."""

    __slots__ = ("_fixed", "_fold", "_pieces", "text")

    def __init__(
        self, text: str, path: str = "", *, wild: bool = True, variables: bool = False, fold: bool = False
    ) -> None:
        self.text = text
        self._fold = fold
        self._pieces = parse_pieces(text, path, wild=wild, variables=variables)
        self._fixed = None if self.variables else _segments(_literal(self._pieces, fold=fold))

    def __repr__(self) -> str:
        return f"<Glob {self.text!r}>"

    @property
    def variables(self) -> set[str]:
        """The condition keys of its variables."""
        return {piece.name for piece in self._pieces if isinstance(piece, Variable)}

    @property
    def has_wildcards(self) -> bool:
        return any(isinstance(piece, Wildcard) for piece in self._pieces)

    def matches(self, text: str, resolve: Resolve) -> bool | None:
        """Whether the pattern matches all of `text`; None if a variable has no value."""
        segments = self._fixed
        if segments is None:
            resolved = self._resolve_parts(resolve)
            if resolved is None:
                return None
            segments = _cached_segments(resolved)
        return segments_match(segments, text.casefold() if self._fold else text)

    def bind_variables(self, resolve: Resolve) -> tuple[Segment, ...] | None:
        """Return the segments with every variable replaced, or None if one has no value."""
        if self._fixed is not None:
            return self._fixed
        resolved = self._resolve_parts(resolve)
        return None if resolved is None else _cached_segments(resolved)

    def _resolve_parts(self, resolve: Resolve) -> tuple[str | Wildcard, ...] | None:
        values: list[Piece] = []
        for piece in self._pieces:
            if isinstance(piece, Variable):
                value = resolve(piece.name)
                value = piece.default if value is None else value
                if value is None:
                    return None
                values.append(value)
            else:
                values.append(piece)
        return _literal(tuple(_join_literals(values)), fold=self._fold)


def _literal(pieces: tuple[Piece, ...], *, fold: bool) -> tuple[str | Wildcard, ...]:
    return tuple(
        piece.casefold() if fold and isinstance(piece, str) else piece
        for piece in pieces
        if not isinstance(piece, Variable)
    )


@lru_cache(maxsize=1024)
def _cached_segments(pieces: tuple[str | Wildcard, ...]) -> tuple[Segment, ...]:
    return _segments(pieces)


def _segments(pieces: tuple[str | Wildcard, ...]) -> tuple[Segment, ...]:
    """Split at each `*`; a segment with `?` becomes a regular expression of fixed length."""
    segments: list[list[str | Wildcard]] = [[]]
    for piece in pieces:
        if piece is Wildcard.MANY:
            segments.append([])
        else:
            segments[-1].append(piece)
    return tuple(_segment(segment) for segment in segments)


def _segment(pieces: list[str | Wildcard]) -> Segment:
    if Wildcard.ONE not in pieces:
        return "".join(piece for piece in pieces if isinstance(piece, str))
    expression = "".join("." if piece is Wildcard.ONE else re.escape(str(piece)) for piece in pieces)
    literals = tuple(c for piece in pieces for c in ((None,) if piece is Wildcard.ONE else str(piece)))
    return MaskedSegment(re.compile(expression, re.DOTALL), len(literals), literals)


def matches_every_suffix(segments: tuple[Segment, ...], prefix: str) -> bool:
    """Whether every text that begins with `prefix` matches these segments. May be False if only the prefix
    itself does not match."""
    return len(segments) > 1 and segments[-1] == "" and segments_match(segments, prefix)


def matches_some_suffix(segments: tuple[Segment, ...], prefix: str) -> bool:
    """Whether any text that begins with `prefix` matches these segments."""
    first = segments[0]
    literals = first if isinstance(first, str) else first.literals
    if len(segments) == 1 and len(literals) < len(prefix):
        return False
    return all(literal in (None, c) for literal, c in zip(literals, prefix, strict=False))


def segments_match(segments: tuple[Segment, ...], text: str) -> bool:
    """Whether `text` consists of these segments in order, with anything between two of them."""
    if len(segments) == 1:
        only = segments[0]
        return text == only if isinstance(only, str) else only.expression.fullmatch(text) is not None
    at = _after_first(segments[0], text)
    for segment in segments[1:-1]:
        if at < 0:
            return False
        at = _after_next(segment, text, at)
    return at >= 0 and _ends(segments[-1], text, at)


def _after_first(segment: Segment, text: str) -> int:
    if isinstance(segment, str):
        return len(segment) if text.startswith(segment) else -1
    return -1 if segment.expression.match(text) is None else segment.length


def _after_next(segment: Segment, text: str, at: int) -> int:
    """Return the end of the leftmost match from `at`: a segment's length is fixed, so leftmost is best."""
    if isinstance(segment, str):
        found = text.find(segment, at)
        return -1 if found < 0 else found + len(segment)
    match = segment.expression.search(text, at)
    return -1 if match is None else match.end()


def _ends(segment: Segment, text: str, at: int) -> bool:
    length = len(segment) if isinstance(segment, str) else segment.length
    if len(text) - length < at:
        return False
    if isinstance(segment, str):
        return text.endswith(segment)
    return segment.expression.fullmatch(text, len(text) - length) is not None
