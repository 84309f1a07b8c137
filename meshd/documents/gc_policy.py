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
"""Days for which a document is kept after its last use: longer than a training is likely to pause."""
REFERRING_PREFIXES: Final = ("plans/", "packs/")
"""Prefixes of documents that name others; all other documents are only named."""
ATTACHED_PREFIXES: Final = ("births/",)
"""Prefixes of documents that describe others and are removed with them."""
_HASH: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class DocumentUsage:
    """Usage of a document on one node, or summed over `nodes` nodes: bytes, and the minutes since 1970 in
    which it arrived and was last used (0: no use recorded)."""

    size: int
    made: int
    used: int
    nodes: int = 1

    @property
    def minute(self) -> int:
        """The minute of the last activity."""
        return max(self.made, self.used)


def digest_of(key: str) -> str:
    """Returns the hash that names a document."""
    return key.rpartition("/")[2]


def hashes_in(text: str | bytes) -> set[str]:
    """Returns the hashes contained in a text."""
    data = text.encode() if isinstance(text, str) else text
    return {found.decode() for found in _HASH.findall(data)}


def merge_usage(tables: Iterable[Mapping[str, DocumentUsage]]) -> dict[str, DocumentUsage]:
    """Merges the tables of several nodes; the latest use counts."""
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
    """Returns the documents to remove, in order. `named`: hashes that anything outside names; `names_of`: the
    hashes in a document; `first`: the minute from which on a use counts."""
    live = {digest_of(key) for key, each in held.items() if each.minute >= first} | set(named)
    naming = {key for key in held if key.startswith(REFERRING_PREFIXES)}
    while found := {key for key in naming if digest_of(key) in live}:
        naming -= found
        for key in found:
            live |= names_of(key)
    live |= {digest_of(key) for key in held if key.startswith(ATTACHED_PREFIXES) and names_of(key) & live}
    return sorted(key for key in held if digest_of(key) not in live)
