"""When a key was last used: good to the hour, for finding the ones nobody needs any more.

Law: a request costs one entry of a set; the store is written at most once an hour for a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.documents import Documents

if TYPE_CHECKING:
    from collections.abc import Container

    from meshd.control.interface import ControlStore

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000


class _Use(msgspec.Struct, frozen=True):
    used_ms: int


class KeyUse:
    """Notes uses in this process, and knows those that any process has saved."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = Documents(control, "keyuse", _Use)
        self._noted: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeyUse, {len(self._noted)} to save>"

    def note(self, access_key: str) -> None:
        """A request was signed with this key."""
        self._noted.add(access_key)

    def last(self, access_key: str) -> int:
        """Milliseconds since 1970; 0 if no use was saved."""
        found = self._documents.current().get(access_key)
        return 0 if found is None else found.used_ms

    async def save(self, now_ms: int, known: Container[str]) -> None:
        """Write what was noted since the last time, where it is news. Of keys that are not `known`, and were
        not used for a day, nothing is kept."""
        noted, self._noted = self._noted, set()
        for access_key in noted:
            if now_ms - self.last(access_key) >= _HOUR_MS:
                await self._documents.put(access_key, _Use(now_ms))
        for access_key, use in list(self._documents.current().items()):
            if access_key not in known and now_ms - use.used_ms > _DAY_MS:
                await self._documents.delete(access_key)

    async def forget(self, access_key: str) -> None:
        """The key is gone; so is what was known of it."""
        await self._documents.delete(access_key)
