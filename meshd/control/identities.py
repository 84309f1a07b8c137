"""The table of identities: access key → user and secret. One read a request.

Law: secrets never leave through `repr`, logs or errors. Users come from the root credentials and the users
file (`origin` says which), and a reload replaces exactly what came from the file before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.documents import Documents

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.control.interface import ControlStore


class User(msgspec.Struct, frozen=True):
    """Who signs with `access_key`. `root` may do everything."""

    user_id: str
    display_name: str
    email: str
    access_key: str
    secret_key: str
    root: bool = False
    origin: str = "file"

    def __repr__(self) -> str:
        return f"User(user_id={self.user_id!r}, access_key={self.access_key!r}, root={self.root})"


class IdentityTable:
    """Users by access key. `find` is a dictionary read."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = Documents(control, "identities", User)

    def find(self, access_key: str) -> User | None:
        """The user of an access key, or None. About a microsecond."""
        return self._documents.current().get(access_key)

    def by_id(self, user_id: str) -> User | None:
        """The user of an id (an owner of a bucket, say), or None."""
        return next((user for user in self._documents.current().values() if user.user_id == user_id), None)

    def list_all(self) -> tuple[User, ...]:
        """Every user, in order of the access keys."""
        every = self._documents.current()
        return tuple(every[key] for key in sorted(every))

    async def replace(self, origins: frozenset[str], users: Iterable[User]) -> int:
        """Make `users` the users of these origins: add, change, remove. Returns how many changed."""
        wanted = {user.access_key: user for user in users}
        present = dict(self._documents.current())
        changed = 0
        for key, user in wanted.items():
            if present.get(key) != user:
                await self._documents.put(key, user)
                changed += 1
        for key, user in present.items():
            if user.origin in origins and key not in wanted:
                changed += await self._documents.delete(key)
        return changed
