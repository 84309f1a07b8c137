"""Leases for engines that have none of their own: a document under `leases/` and the machine's clock.

Law: who writes the document at the version it read holds the lease; the clock only decides when it may
be taken. Right for one machine (one clock); etcd and kubernetes bring leases of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.interface import ABSENT, Lease, LeaseLostError, VersionConflictError

if TYPE_CHECKING:
    from meshd.control.interface import ControlStore
    from meshd.kit.clock import Clock


class _Holding(msgspec.Struct, frozen=True):
    holder: str
    expires_ms: int


_decode = msgspec.json.Decoder(_Holding).decode


class ClockLeases:
    """The lease half of a ControlStore, made of its other half."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store, self._clock = store, clock

    async def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire."""
        current = await self._store.get(_key(name))
        if current is not None:
            held = _decode(current.value)
            if held.holder != holder and held.expires_ms > self._clock.now_ms():
                return None
        try:
            return await self._write(name, holder, ttl, current.version if current else ABSENT)
        except VersionConflictError:
            return None  # someone else was faster

    async def renew(self, lease: Lease) -> Lease:
        """See ControlStore.renew. A lease that ran out but that nobody took is still renewed."""
        try:
            return await self._write(lease.name, lease.holder, lease.ttl, lease.version)
        except VersionConflictError:
            raise LeaseLostError(f"the lease {lease.name} is no longer {lease.holder}'s") from None

    async def release(self, lease: Lease) -> None:
        """See ControlStore.release."""
        try:
            await self._store.delete(_key(lease.name), expect=lease.version)
        except VersionConflictError:
            return

    async def leases(self, prefix: str) -> dict[str, str]:
        """See ControlStore.leases."""
        now, cut = self._clock.now_ms(), len(_key(""))
        held = {
            key[cut:]: _decode(entry.value)
            for key, entry in (await self._store.list_all(_key(prefix))).items()
        }
        return {name: holding.holder for name, holding in held.items() if holding.expires_ms > now}

    async def _write(self, name: str, holder: str, ttl: float, expect: int) -> Lease:
        expires = self._clock.now_ms() + int(ttl * 1000)
        value = msgspec.json.encode(_Holding(holder, expires))
        version = await self._store.put(_key(name), value, expect=expect)
        return Lease(name, holder, ttl, expires, version)


def _key(name: str) -> str:
    return f"leases/{name}"
