"""Garbage-collection policy: which shared documents are removed and which are kept. Pure.

Documents that a view, a job or a pushed module refers to are kept, and so is what they refer to in turn;
of the rest, those created or used since `first` on any node. A document refers to another by containing
its hash. A document is kept whenever there is doubt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DEFAULT_UNUSED_DAYS: Final = 90
"""For which a document is kept after its last use: longer than anybody lets a training rest unawares."""
REFERRING_PREFIXES: Final = ("plans/", "packs/")
"""Documents that name others; the rest is only named."""
ATTACHED_PREFIXES: Final = ("births/",)
"""Documents that are about others, and go with them."""
_HASH: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class DocumentUsage:
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


def hashes_in(text: str | bytes) -> set[str]:
    """The hashes a text holds."""
    data = text.encode() if isinstance(text, str) else text
    return {found.decode() for found in _HASH.findall(data)}


def merge_usage(tables: Iterable[Mapping[str, DocumentUsage]]) -> dict[str, DocumentUsage]:
    """What several nodes have, as one: used last where it was used last."""
    found: dict[str, DocumentUsage] = {}
    for table in tables:
        for key, held in table.items():
            known = found.get(key)
            found[key] = held if known is None else _merge_two(known, held)
    return found


def _merge_two(one: DocumentUsage, other: DocumentUsage) -> DocumentUsage:
    return replace(
        one, made=max(one.made, other.made), used=max(one.used, other.used), nodes=one.nodes + other.nodes
    )


def unused_documents(
    held: Mapping[str, DocumentUsage], named: Iterable[str], names_of: Callable[[str], set[str]], first: int
) -> list[str]:
    """The documents that go, in order. `named`: hashes that something outside names; `names_of`: those that
    a document holds; `first`: the minute since which a use counts."""
    live = {digest_of(key) for key, each in held.items() if each.minute >= first} | set(named)
    naming = {key for key in held if key.startswith(REFERRING_PREFIXES)}
    while found := {key for key in naming if digest_of(key) in live}:
        naming -= found
        for key in found:
            live |= names_of(key)
    live |= {digest_of(key) for key in held if key.startswith(ATTACHED_PREFIXES) and names_of(key) & live}
    return sorted(key for key in held if digest_of(key) not in live)
