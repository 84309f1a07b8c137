"""Cached topic: the documents of one control store topic, decoded and cached in this process.

Law: a lookup is a dictionary read after one cheap revision check; writes go through to the store.
Invariant: a lookup returns a state that the store had at or after the time of the call.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from meshd.control.control_api import ABSENT, ControlError, VersionConflictError, Write
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import ControlStore

D = TypeVar("D", bound=msgspec.Struct)
_PATIENCE: Final = 1.0
"""Seconds that `get_fresh` and `get_latest` wait."""


class CachedTopic(Generic[D]):
    """The documents under `topic/` by name. `decode`: of a decoder for JSON that its module makes, so that
    the processes of a node share what it knows of the types."""

    def __init__(self, control: ControlStore, topic: str, decode: Callable[[bytes], D]) -> None:
        self._control, self._topic, self._decode = control, topic, decode
        self._restores = self._revision = -1
        self._known: object | None = None  # the pinned state in which the cache was last compared
        self._values: dict[str, D] = {}
        self._versions: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CachedTopic {self._topic} of {len(self._values)} at {self._revision}>"

    def current(self) -> Mapping[str, D]:
        """Returns every document by name, as of now."""
        pin = self._control.pin
        known = pin.known
        if known is not None:
            if pin.thread != get_ident():
                known = None
            elif known is self._known:
                return self._values
        restores, revision = self._control.restores, self._control.revision(self._topic)
        if revision != self._revision or restores != self._restores:
            self._known = None  # also for another thread, whose pinned state may be a later one
            self._reload({} if restores != self._restores else self._versions)
            self._restores, self._revision = restores, revision
        self._known = known
        return self._values

    def version(self, name: str) -> int:
        """Returns the version of a document that `current` shows; 0 if there is none."""
        self.current()
        return self._versions.get(name, 0)

    async def get_fresh(self, name: str) -> D | None:
        """Returns a document that another process may have just written. If it is not cached, asks the
        engine, and waits up to a second until the cache has it."""
        if name not in self.current():
            key = self._key(name)
            if await self._control.get(key) is not None:
                with suppress(TimeoutError):
                    async with (
                        timeout(_PATIENCE),
                        aclosing(self._control.watch(self._topic)) as changes,
                    ):
                        async for change in changes:
                            if change.key == key:
                                break
        return self.current().get(name)

    async def get_latest(self, name: str) -> D | None:
        """Returns a document as the engine had it when it was asked, or later, whatever other processes have
        written before. Raises ControlError if the engine does not answer within a second, or if the cache
        is as far behind."""
        wanted: int | None = None
        try:
            async with timeout(_PATIENCE):
                wanted = await self._control.get_version(self._key(name))
                if not self._has_reached(name, wanted):
                    async with aclosing(self._control.watch(self._topic)) as changes:
                        async for _ in changes:
                            if self._has_reached(name, wanted):
                                break
        except TimeoutError:
            if wanted is None or not self._has_reached(name, wanted):
                raise ControlError(f"the control store did not tell of {self._key(name)} in time") from None
        return self.current().get(name)

    async def is_latest(self, name: str, version: int) -> bool:
        """Returns whether this version (0: none) of a document is the engine's; if not, waits for a later one
        as `get_latest` does. For decisions to change nothing, which cause no conflict."""
        if await self._control.get_version(self._key(name)) == version:
            return True
        await self.get_latest(name)
        return False

    def _has_reached(self, name: str, version: int) -> bool:
        """Returns whether the cache has this version of a document or a later one; ABSENT: it was removed."""
        known = self.version(name)
        return known >= version if version != ABSENT else known == ABSENT

    async def put(self, name: str, document: D, *, expect: int | None = None) -> int:
        """Writes a document. Raises VersionConflictError."""
        return await self._control.put(self._key(name), msgspec.json.encode(document), expect=expect)

    async def update(self, name: str, decide: Callable[[D | None], D | None]) -> bool:
        """Replaces a document by what `decide` returns for the current one (None: there is none; or remove
        it), durably and atomically; returns True if anything changed. Raises what `decide` raises; `decide`
        may be called again, after a conflict or if what it left as it is was not the latest."""
        while True:
            version = self.version(name)  # before the value: an outdated version only causes a conflict
            present = self.current().get(name)
            wanted = decide(present)
            if wanted == present:
                if await self.is_latest(name, version):
                    return False
                continue
            try:
                if wanted is None:
                    return await self.delete(name, expect=version)
                await self.put(name, wanted, expect=version)
            except VersionConflictError:
                continue
            return True

    async def write_many(self, wanted: Mapping[str, D | None]) -> None:
        """Writes (None: removes) these documents if they are unchanged since `current` was last called; see
        `ControlStore.write_many`. Raises VersionConflictError."""
        writes = [
            Write(
                self._key(name),
                None if document is None else msgspec.json.encode(document),
                self._versions.get(name, ABSENT),
            )
            for name, document in wanted.items()
        ]
        if writes:
            await self._control.write_many(writes)

    async def delete(self, name: str, *, expect: int | None = None) -> bool:
        """Removes a document; returns False if it did not exist."""
        return await self._control.delete(self._key(name), expect=expect)

    def _key(self, name: str) -> str:
        return f"{self._topic}/{name}"

    def _reload(self, known: Mapping[str, int]) -> None:
        """Rebuilds the cache. `known`: versions whose values are already decoded."""
        cut = len(self._topic) + 1
        entries = {key[cut:]: entry for key, entry in self._control.cached_entries(self._topic).items()}
        self._values = {
            name: self._values[name] if known.get(name) == entry.version else self._decode(entry.value)
            for name, entry in entries.items()
        }
        self._versions = {name: entry.version for name, entry in entries.items()}
