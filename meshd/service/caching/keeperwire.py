"""What processes of a node say to the one that has the cache's policy, and what it answers.

Law: frozen structs, told apart by their tag.
"""

from __future__ import annotations

import msgspec

from meshd.service.caching.shelf import Piece  # noqa: TC001  msgspec reads the annotations
from meshd.service.caching.usage import Usage  # noqa: TC001


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """May this stay?"""

    number: int
    piece: Piece


class Read(msgspec.Struct, frozen=True, tag="read"):
    """These were read from the cache."""

    pieces: list[Piece]


class Look(msgspec.Struct, frozen=True, tag="look"):
    """How much is this bucket read?"""

    number: int
    shelf: str


class Word(msgspec.Struct, frozen=True):
    """The answer to either."""

    number: int
    kept: bool = False
    usage: Usage | None = None
