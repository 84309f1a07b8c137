"""What the processes of a node say to each other about fetches and writes, over Unix sockets.

Law: frozen structs, told apart by their tag. A descriptor rides on `Began` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.origin import errors
from meshd.origin.interface import Facts  # noqa: TC001  msgspec reads the annotations
from meshd.store.errors import NotDeciderError, NotReplicatedError

if TYPE_CHECKING:
    from meshd.errors import MeshdError


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`what`: fetch (a piece), check, forget, push, remove, quiet (by map `version`). `number` is the
    asker's, for the answers."""

    number: int
    what: str
    bucket: str
    key: str
    chunk: int = 0
    etag: str = ""
    version: int = 0


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The origin has answered, and so many bytes are there; the descriptor is of the file that they come
    into, from `base` on."""

    number: int
    facts: Facts
    length: int
    base: int
    have: int


class Grew(msgspec.Struct, frozen=True, tag="grew"):
    """So many bytes are there."""

    number: int
    have: int
    done: bool = False


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer to what is no fetch."""

    number: int
    facts: Facts | None = None
    text: str = ""
    quiet: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An error, by the name of its class."""

    number: int
    kind: str
    message: str


Answer = Began | Grew | Told | Failed

_KINDS: dict[str, type[MeshdError]] = {
    kind.__name__: kind
    for kind in (
        errors.OriginMissingError,
        errors.OriginChangedError,
        errors.OriginRangeError,
        errors.OriginRefusedError,
        errors.OriginDownError,
        errors.OriginPieceError,
        errors.OriginKeyError,
        NotDeciderError,
        NotReplicatedError,
    )
}


def failure(number: int, error: Exception) -> Failed:
    """An error on its way to another process, or node."""
    kind = type(error).__name__
    if kind in _KINDS:
        return Failed(number, kind, str(error))
    return Failed(number, "OriginDownError", "the fetch failed; the node's log says why")


def raised(failed: Failed) -> MeshdError:
    """The error that another process met, or node."""
    return _KINDS.get(failed.kind, errors.OriginDownError)(failed.message)
