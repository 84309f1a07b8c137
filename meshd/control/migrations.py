"""Migrations of control state that earlier versions wrote.

Law: runs once per start, before any other reader. Nothing is removed before its successor is durable,
so an interrupted start is simply repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT, Write
from meshd.control.identities import TOPIC, Key, User

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.control.control_api import ControlStore
    from meshd.control.identities import Entry, Origin


class _Identity(msgspec.Struct, frozen=True):
    """Format of version 0.1: one document per key, containing its user, under `identities/ACCESS_KEY`."""

    user_id: str
    display_name: str
    email: str
    access_key: str
    secret_key: str
    root: bool = False
    origin: str = "file"


async def migrate_control_state(control: ControlStore, now_ms: int) -> int:
    """Rewrites documents of an old format; returns how many."""
    old, present = (
        CachedTopic(control, "identities", msgspec.json.Decoder(_Identity).decode),
        control.cached_entries(TOPIC),
    )
    found = dict(old.current())
    new: dict[str, Entry] = {}
    for identity in found.values():
        for place, entry in _split(identity, now_ms):
            new.setdefault(f"{TOPIC}/{place}", entry)
    writes = [
        Write(key, msgspec.json.encode(entry), ABSENT) for key, entry in new.items() if key not in present
    ]
    if found:  # no other writer runs now; a conflict would fail the start, which is then repeated
        await control.write_many(writes)
        await old.write_many(dict.fromkeys(found))
    return len(found)


def _split(identity: _Identity, now_ms: int) -> Iterator[tuple[str, Entry]]:
    origin: Origin = "root" if identity.root else "file"
    yield (
        f"user/{identity.user_id}",
        User(
            user_id=identity.user_id,
            display_name=identity.display_name,
            email=identity.email,
            root=identity.root,
            origin=origin,
            created_ms=now_ms,
        ),
    )
    yield (
        f"key/{identity.access_key}",
        Key(
            access_key=identity.access_key,
            user_id=identity.user_id,
            secret_key=identity.secret_key,
            origin=origin,
            created_ms=now_ms,
        ),
    )
