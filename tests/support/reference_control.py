"""Reference implementation of ControlStore in memory: the oracle of the control suite.

Law: the same answers as every engine, in one process and without durability.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING

from meshd.control.control_api import UNPINNED, ControlError, Versioned, check_key, check_version
from meshd.control.embedded import ClockLeases
from meshd.control.watchers import differences

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.control.control_api import Change, Lease, Write
    from meshd.util.clock import Clock


class MemoryControl:
    """A ControlStore of one process."""

    restores = 0

    def __init__(self, clock: Clock) -> None:
        self._entries: dict[str, Versioned] = {}
        self._revisions: dict[str, int] = {}
        self._version, self.pin = 0, UNPINNED
        self._changed = asyncio.Event()
        self._closed = False
        self._leases = ClockLeases(self, clock)

    def __repr__(self) -> str:
        return f"<MemoryControl keys={len(self._entries)} version={self._version}>"

    def revision(self, topic: str) -> int:
        return self._revisions.get(topic, 0)

    def complete_revision(self, topic: str) -> int:
        return self._version

    def pin_revisions(self) -> AbstractContextManager[object]:
        return nullcontext()  # in one thread nothing changes while nothing waits

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        return self._scan(f"{topic}/")

    async def get(self, key: str) -> Versioned | None:
        self._check_open()
        return self._entries.get(check_key(key))

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        self._check_open()
        check_version(check_key(key), expect, self._found(key))
        version = self._touch(key)
        self._entries[key] = Versioned(bytes(value), version)
        return version

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        self._check_open()
        check_version(check_key(key), expect, self._found(key))
        if key not in self._entries:
            return False
        self._touch(key)
        del self._entries[key]
        return True

    async def write_many(self, writes: Sequence[Write]) -> None:
        self._check_open()
        for write in writes:
            check_version(check_key(write.key), write.expect, self._found(write.key))
        for write in writes:
            if write.value is None:
                await self.delete(write.key)
            else:
                await self.put(write.key, write.value)

    async def get_version(self, key: str) -> int:
        found = await self.get(key)
        return 0 if found is None else found.version

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        self._check_open()
        return self._scan(prefix)

    async def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        seen: Mapping[str, Versioned] = {}
        while not self._closed:
            changed = self._changed
            now = self.cached_entries(topic)
            for change in differences(seen, now):
                yield change
            seen = now
            await changed.wait()

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        return await self._leases.acquire_lease(name, holder, ttl)

    async def renew_lease(self, lease: Lease) -> Lease:
        return await self._leases.renew_lease(lease)

    async def renew_lease_and_get_version(self, lease: Lease, key: str) -> tuple[Lease, int]:
        version = await self.get_version(key)
        return await self.renew_lease(lease), version

    async def release_lease(self, lease: Lease) -> None:
        await self._leases.release_lease(lease)

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        return await self._leases.lease_holders(prefix)

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ControlError("the control store is closed")

    def _found(self, key: str) -> int:
        return self._entries[key].version if key in self._entries else 0

    def _touch(self, key: str) -> int:
        self._version += 1
        self._revisions[key.partition("/")[0]] = self._version
        self._changed.set()
        self._changed = asyncio.Event()
        return self._version

    def _scan(self, prefix: str) -> Mapping[str, Versioned]:
        return {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}
