"""Deleted documents: plans, snapshots and assets that were removed from every node, and why.

Law: no node serves, accepts or restores a document listed here, even if it still has the bytes. A name
is a content hash: recreating the same document first removes its name from this table. Entries live as
long as a node may be away; a lookup is one dictionary read.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshd.control.control_api import ControlStore

TOPIC: Final = "removals"
MAX_NAMES: Final = 2000
"""Names per entry: about 150 KB, which every engine accepts."""


class Deletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names that were deleted together. `days`: for how long they were unused; `by`: who removed them."""

    removed_ms: int
    keys: tuple[str, ...]
    why: Literal["unused", "asked"] = "unused"
    days: int = 0
    by: str = ""

    def describe(self) -> str:
        """Returns what happened to them, as the end of a sentence."""
        when = datetime.fromtimestamp(self.removed_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        if self.why == "asked":
            return f"was removed by {self.by} on {when}"
        return f"was removed on {when} after {self.days} days without use"


_decode = msgspec.json.Decoder(Deletion).decode


class DeletedDocumentTable:
    """The table of deleted documents. One per process."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode)
        self._seen: Mapping[str, Deletion] | None = None
        self._entry_names: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<DeletedDocumentTable of {len(self._entry_names)} names>"

    def _current_entries(self) -> Mapping[str, Deletion]:
        entries = self._documents.current()
        if entries is not self._seen:
            self._entry_names = {key: name for name, removal in entries.items() for key in removal.keys}
            self._seen = entries
        return entries

    def find(self, key: str) -> Deletion | None:
        """Returns the deletion of a document; None if it was not deleted."""
        entries = self._current_entries()
        name = self._entry_names.get(key)
        return None if name is None else entries[name]

    def deletion_notice(self, key: str) -> str:
        """Returns what happened to a document, in words; "" if it was not deleted."""
        found = self.find(key)
        return "" if found is None else found.describe()

    def names(self) -> Sequence[str]:
        """Returns every name in the table."""
        self._current_entries()
        return tuple(self._entry_names)

    async def add(
        self,
        keys: Iterable[str],
        removed_ms: int,
        why: Literal["unused", "asked"],
        days: int = 0,
        by: str = "",
    ) -> None:
        """Records documents as deleted on every node, durably. Raises ControlError."""
        fresh = [key for key in keys if self.find(key) is None]
        for start in range(0, len(fresh), MAX_NAMES):
            name = f"{removed_ms:015d}-{secrets.token_hex(4)}"
            some = tuple(fresh[start : start + MAX_NAMES])
            await self._documents.put(name, Deletion(removed_ms, some, why, days, by), expect=ABSENT)

    async def restore(self, key: str) -> bool:
        """Removes a document from the table because it is being created again; returns True if it was there.
        Raises ControlError."""
        places = [name for name, removal in self._current_entries().items() if key in removal.keys]
        for name in places:
            await self._remove_name(name, key)
        return bool(places)

    async def _remove_name(self, name: str, key: str) -> None:
        def without(removal: Deletion | None) -> Deletion | None:
            left = () if removal is None else tuple(other for other in removal.keys if other != key)
            return msgspec.structs.replace(removal, keys=left) if removal is not None and left else None

        await self._documents.update(name, without)

    async def prune(self, before_ms: int) -> int:
        """Drops entries made before `before_ms`; returns how many names."""
        old = {name: entry for name, entry in self._current_entries().items() if entry.removed_ms < before_ms}
        for name in old:
            await self._documents.delete(name)
        return sum(len(entry.keys) for entry in old.values())
