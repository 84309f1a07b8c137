"""What the processes of a node say to each other about fetches, over Unix sockets.

Law: frozen structs, told apart by their tag. A descriptor rides on `Began` alone.
"""

from __future__ import annotations

import msgspec

from meshd.origin import errors
from meshd.origin.interface import Facts  # noqa: TC001  msgspec reads the annotations


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`what`: fetch (a piece), check, forget, push, remove. `number` is the asker's, for the answers."""

    number: int
    what: str
    bucket: str
    key: str
    chunk: int = 0
    etag: str = ""


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


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An error, by the name of its class."""

    number: int
    kind: str
    message: str


Answer = Began | Grew | Told | Failed

_KINDS = {
    kind.__name__: kind
    for kind in (
        errors.OriginMissingError,
        errors.OriginChangedError,
        errors.OriginRangeError,
        errors.OriginRefusedError,
        errors.OriginDownError,
        errors.OriginKeyError,
    )
}


def failure(number: int, error: Exception) -> Failed:
    """An error on its way to another process."""
    kind = type(error).__name__
    if kind in _KINDS:
        return Failed(number, kind, str(error))
    return Failed(number, "OriginDownError", "the fetch failed; the node's log says why")


def raised(failed: Failed) -> errors.OriginError:
    """The error that another process met."""
    return _KINDS.get(failed.kind, errors.OriginDownError)(failed.message)
