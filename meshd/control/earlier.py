"""Control state as earlier versions wrote it, brought into the present form.

Law: run once a start, before anything else looks; nothing is removed before its successor is durable, so that
a start that was interrupted is simply repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.documents import Documents
from meshd.control.identities import IdentityTable, Key, User

if TYPE_CHECKING:
    from meshd.control.identities import Origin
    from meshd.control.interface import ControlStore


class _Identity(msgspec.Struct, frozen=True):
    """Version 0.1: one document a key, with its user in it, under `identities/ACCESS_KEY`."""

    user_id: str
    display_name: str
    email: str
    access_key: str
    secret_key: str
    root: bool = False
    origin: str = "file"


async def bring_forward(control: ControlStore, now_ms: int) -> int:
    """Rewrite what has an old form; how many documents that were."""
    old, table = Documents(control, "identities", _Identity), IdentityTable(control)
    found = dict(old.current())
    for name, identity in found.items():
        user, key = _split(identity, now_ms)
        await table.change(User, user.user_id, lambda present, new=user: present or new)  # type: ignore[misc]
        await table.change(Key, key.access_key, lambda present, new=key: present or new)  # type: ignore[misc]
        await old.delete(name)
    return len(found)


def _split(identity: _Identity, now_ms: int) -> tuple[User, Key]:
    origin: Origin = "root" if identity.root else "file"
    user = User(
        user_id=identity.user_id,
        display_name=identity.display_name,
        email=identity.email,
        root=identity.root,
        origin=origin,
        created_ms=now_ms,
    )
    key = Key(
        access_key=identity.access_key,
        user_id=identity.user_id,
        secret_key=identity.secret_key,
        origin=origin,
        created_ms=now_ms,
    )
    return user, key
