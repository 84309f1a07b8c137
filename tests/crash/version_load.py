"""The part of the load that works on versions: each task owns keys and notes what a key's history will be.

A history is a list, the newest first, of [etag or None for a delete marker, is it the null version?, tag].
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from meshd.store.records import NULL, Meta

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.s3.bucket_settings import Versioning

BUCKET = "versions"
_KEPT = 6  # versions a key has at most, so that they are also removed


def versions(store: ObjectStore, key: str) -> list[Record]:
    """All versions of a key, the newest first."""
    page = store.list_versions(BUCKET, prefix=key)
    return [record for name, record in page.entries if name == key]


def history(records: list[Record]) -> str:
    """A key's versions as text that can be compared."""
    return json.dumps([_entry(record) for record in records])


def _entry(record: Record) -> list[Any]:
    return [None if record.marker else record.etag, not record.version, record.tags.get("t", "")]


class VersionLoad:
    """Changes the history of one key at a time; `note` writes down what begins and what is done."""

    def __init__(
        self, store: ObjectStore, note: Callable[..., None], content: Callable[[str], bytes]
    ) -> None:
        self.store, self.note, self.content = store, note, content

    async def act(self, chance: random.Random, key: str, version: str) -> None:
        found = versions(self.store, key)
        if len(found) >= _KEPT or (found and chance.random() < 0.3):
            await self.remove(found, chance.randrange(len(found)), key)
            return
        act = chance.choice([self.put, self.put, self.mark, self.amend, self.copy])
        await act(chance, found, key, version)

    async def put(self, chance: random.Random, found: list[Record], key: str, version: str) -> None:
        versioning = _setting(chance)
        data = self.content(version)
        self._begin(key, [[version, versioning != "Enabled", ""], *_left(found, versioning)])
        writer = self.store.writer(BUCKET, key, size=len(data))
        await writer.write(data)
        await writer.commit(Meta(version), versioning=versioning)
        self._done(key)

    async def mark(self, chance: random.Random, found: list[Record], key: str, version: str) -> None:
        versioning = _setting(chance)
        self._begin(key, [[None, versioning != "Enabled", ""], *_left(found, versioning)])
        await self.store.delete(BUCKET, key, versioning=versioning)
        self._done(key)

    async def copy(self, chance: random.Random, found: list[Record], key: str, version: str) -> None:
        source = next((record for record in found if not record.marker), None)
        if source is None:
            return
        versioning = _setting(chance)
        self._begin(key, [[source.etag, versioning != "Enabled", ""], *_left(found, versioning)])
        await self.store.link(BUCKET, key, source, Meta(source.etag), versioning=versioning)
        self._done(key)

    async def amend(self, chance: random.Random, found: list[Record], key: str, version: str) -> None:
        readable = [number for number, record in enumerate(found) if not record.marker]
        if not readable:
            return
        number = chance.choice(readable)
        will = [_entry(record) for record in found]
        will[number][2] = version
        self._begin(key, will)
        await self.store.amend(BUCKET, key, found[number].version or NULL, tags={"t": version})
        self._done(key)

    async def remove(self, found: list[Record], number: int, key: str) -> None:
        self._begin(key, [_entry(record) for record in found[:number] + found[number + 1 :]])
        await self.store.delete_version(BUCKET, key, found[number].version or NULL)
        self._done(key)

    def _begin(self, key: str, will: list[list[Any]]) -> None:
        self._will = json.dumps(will)
        self.note("begin", key, self._will)

    def _done(self, key: str) -> None:
        assert history(versions(self.store, key)) == self._will
        self.note("done", key, self._will)


def _setting(chance: random.Random) -> Versioning:
    return chance.choice(["Enabled", "Enabled", "Suspended"])


def _left(found: list[Record], versioning: Versioning) -> list[list[Any]]:
    return [_entry(record) for record in found if versioning == "Enabled" or record.version]
