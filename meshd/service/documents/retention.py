"""Which of the documents that nodes share go, and which stay. Pure.

Law: what a view, a job or a pushed module names stays, and what that names in turn; of the rest what was
made or used since `first`, on whichever node. Names are hashes, and whatever holds one names it. Invariant: a
doubt keeps a document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DAYS: Final = 90
"""For which a document is kept after its last use: longer than anybody lets a training rest unawares."""
NAMING: Final = ("plans/", "packs/")
"""Documents that name others; the rest is only named."""
BESIDE: Final = ("births/",)
"""Documents that are about others, and go with them."""
_HASH: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Held:
    """A document as one node has it, or `nodes` of them: bytes, and the minutes since 1970 in which it came
    there and was used last (0: never noted)."""

    size: int
    made: int
    used: int
    nodes: int = 1

    @property
    def minute(self) -> int:
        """When somebody last had to do with it."""
        return max(self.made, self.used)


def digest_of(key: str) -> str:
    """The hash that is a document's name."""
    return key.rpartition("/")[2]


def named_in(text: str | bytes) -> set[str]:
    """The hashes a text holds."""
    data = text.encode() if isinstance(text, str) else text
    return {found.decode() for found in _HASH.findall(data)}


def merged(tables: Iterable[Mapping[str, Held]]) -> dict[str, Held]:
    """What several nodes have, as one: used last where it was used last."""
    found: dict[str, Held] = {}
    for table in tables:
        for key, held in table.items():
            known = found.get(key)
            found[key] = held if known is None else _both(known, held)
    return found


def _both(one: Held, other: Held) -> Held:
    return replace(
        one, made=max(one.made, other.made), used=max(one.used, other.used), nodes=one.nodes + other.nodes
    )


def unused(
    held: Mapping[str, Held], named: Iterable[str], names_of: Callable[[str], set[str]], first: int
) -> list[str]:
    """The documents that go, in order. `named`: hashes that something outside names; `names_of`: those that
    a document holds; `first`: the minute since which a use counts."""
    live = {digest_of(key) for key, each in held.items() if each.minute >= first} | set(named)
    naming = {key for key in held if key.startswith(NAMING)}
    while found := {key for key in naming if digest_of(key) in live}:
        naming -= found
        for key in found:
            live |= names_of(key)
    live |= {digest_of(key) for key in held if key.startswith(BESIDE) and names_of(key) & live}
    return sorted(key for key in held if digest_of(key) not in live)
