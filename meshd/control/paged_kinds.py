"""Table of the kinds of source whose snapshots have pages in this mesh: those that all nodes once read.

Law: a kind that is recorded stays, so that the same source has the same snapshot while a node is away.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT, ControlError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.control.control_api import ControlStore

TOPIC: Final = "paged"


class PagedKind(msgspec.Struct, frozen=True):
    """`version`: the map under which every node said that it reads such pages."""

    version: int


_decode = msgspec.json.Decoder(PagedKind).decode


class PagedKindTable:
    """The kinds. One per process."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)

    def __repr__(self) -> str:
        return f"<PagedKindTable {self._documents!r}>"

    def has(self, kind: str) -> bool:
        """Returns True if all nodes of the mesh once read pages of this kind. Takes a microsecond."""
        return kind in self._documents.current()

    async def record(self, kinds: Iterable[str], version: int) -> None:
        """Records kinds that all nodes read under map `version`. What cannot be recorded now is recorded the
        next time."""
        for kind in kinds:
            if not self.has(kind):
                with suppress(ControlError):  # among them: another node has just recorded it
                    await self._documents.put(kind, PagedKind(version), expect=ABSENT)
