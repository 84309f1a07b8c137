"""Access keys: format and generation of key pairs, and the hour in which each key was last used.

Law: a generated secret begins with `mss-`, so that logs can mask it. Recording a use adds to a set in
memory; the control store is written at most once per key and hour.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import TYPE_CHECKING

import msgspec

from meshd.control.cached_topic import CachedTopic

if TYPE_CHECKING:
    from collections.abc import Container

    from meshd.control.control_api import ControlStore


_LETTERS = string.ascii_uppercase + string.digits
_ACCESS = re.compile(r"[\w.@=+-]{3,128}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]{8,128}")


def check_keys(access_key: str, secret_key: str) -> None:
    """Raise ValueError, which does not show the secret, unless the pair can sign requests."""
    if not _ACCESS.fullmatch(access_key):
        raise ValueError("an access key has 3 to 128 letters, digits or _.@=+-")
    if not _SECRET.fullmatch(secret_key):
        raise ValueError("a secret key has 8 to 128 printable characters without spaces")


def new_access_key(prefix: str = "MESH") -> str:
    """`prefix` and 16 letters and digits that nobody had before."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(16))


def new_secret_key() -> str:
    """44 characters, 240 random bits."""
    return "mss-" + secrets.token_urlsafe(30)


_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000


class _Use(msgspec.Struct, frozen=True):
    used_ms: int


class KeyLastUsed:
    """Notes uses in this process, and knows those that any process has saved."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, "keyuse", _Use)
        self._noted: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeyUse, {len(self._noted)} to save>"

    def record_use(self, access_key: str) -> None:
        """A request was signed with this key."""
        self._noted.add(access_key)

    def last_used_ms(self, access_key: str) -> int:
        """Milliseconds since 1970; 0 if no use was saved."""
        found = self._documents.current().get(access_key)
        return 0 if found is None else found.used_ms

    async def save(self, now_ms: int, known: Container[str]) -> None:
        """Write what was noted since the last time, where it is news. Of keys that are not `known`, and were
        not used for a day, nothing is kept."""
        noted, self._noted = self._noted, set()
        for access_key in noted:
            if now_ms - self.last_used_ms(access_key) >= _HOUR_MS:
                await self._documents.put(access_key, _Use(now_ms))
        for access_key, use in list(self._documents.current().items()):
            if access_key not in known and now_ms - use.used_ms > _DAY_MS:
                await self._documents.delete(access_key)

    async def forget(self, access_key: str) -> None:
        """The key is gone; so is what was known of it."""
        await self._documents.delete(access_key)
