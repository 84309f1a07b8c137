"""What documents there are on the nodes of a mesh, how large, and when each was used last.

Law: looks and adds up, and changes nothing. A node that does not answer is named: what it knows of uses is a
doubt for whoever would remove something.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.assembly.catalog import RESERVED_BUCKET, SHARED
from meshd.service.documents.retention import Held, merged
from meshd.service.documents.uses import MINUTE_MS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.service.documents.uses import Uses
    from meshd.store.interface import ObjectStore

_PAGE: Final = 1000
FarTables = tuple[list[dict[str, Held]], list[str]]


@dataclass(frozen=True, slots=True)
class Everywhere:
    """`held` by name; `silent`: nodes of the mesh that could not be asked."""

    held: dict[str, Held]
    silent: tuple[str, ...]


async def nobody_else(prefix: str) -> FarTables:
    """What other nodes have, where there are none."""
    return [], []


class Census:
    """One a process. `others`: what each other node has under a prefix, and which could not be asked."""

    def __init__(
        self,
        store: ObjectStore,
        uses: Uses,
        others: Callable[[str], Awaitable[FarTables]] = nobody_else,
    ) -> None:
        self._store, self._uses, self._others = store, uses, others

    def __repr__(self) -> str:
        return "<Census>"

    def here(self, prefix: str) -> dict[str, Held]:
        """This node's own (blocking)."""
        found: dict[str, Held] = {}
        after, more = "", True
        while more:
            some, after = self.page(prefix, after, _PAGE)
            found |= some
            more = bool(after)
        return found

    def page(self, prefix: str, after: str, limit: int) -> tuple[dict[str, Held], str]:
        """Some of them, and after which the next page begins: "" at the end (blocking)."""
        uses = self._uses.table()
        page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=limit)
        rows = {
            key: Held(record.size, record.modified // MINUTE_MS, uses.minute(key))
            for key, record in page.entries
        }
        return rows, page.next_after if page.truncated else ""

    def sizes(self) -> dict[str, tuple[int, int]]:
        """How many this node has of each kind, and their bytes (blocking)."""
        found = {}
        for prefix in SHARED:
            held = self.here(prefix).values()
            found[prefix.rstrip("/")] = len(held), sum(each.size for each in held)
        return found

    async def everywhere(self, prefixes: Sequence[str]) -> Everywhere:
        """All nodes', as one."""
        tables, silent = list[dict[str, Held]](), set[str]()
        for prefix in prefixes:
            tables.append(await asyncio.to_thread(self.here, prefix))
            far, lost = await self._others(prefix)
            tables += far
            silent |= set(lost)
        return Everywhere(merged(tables), tuple(sorted(silent)))
