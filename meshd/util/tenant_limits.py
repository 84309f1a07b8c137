"""Tenant limits: the tenant that work is charged to, a limit shared by tenants, and a FIFO semaphore.

Law: the tenant is the access key that signed the request, set where its signature is verified and by a
job that continues a user's work; tasks inherit it. It is never a secret and never shown to clients.
`Admission` rejects instead of queueing. Above the limit it admits only tenants that hold less than an
even share, so one tenant cannot lock out the others; the total stays below twice the limit.
`ByteSemaphore` is first come, first served, so small requests never starve a large one. Both grant a
request above the whole limit alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


NO_TENANT = ""
"""The tenant of unsigned requests and of the node itself."""

# Decides whose work waits or is rejected, never what is read or written (decision 46).
_tenant: ContextVar[str] = ContextVar("account", default=NO_TENANT)


def current_tenant() -> str:
    """Returns the tenant of the current task."""
    return _tenant.get()


def set_tenant(name: str) -> None:
    """Charges the work of this task, and of the tasks that it starts, to `name`."""
    _tenant.set(name)


@contextmanager
def tenant_scope(name: str) -> Iterator[None]:
    """Charges the work inside the block to `name`."""
    token = _tenant.set(name)
    try:
        yield
    finally:
        _tenant.reset(token)


class AdmissionRejectedError(Exception):
    """The limit is reached. `held`: units in use, of `limit`."""

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(f"{held} of {limit}")
        self.held, self.limit = held, limit


class Admission:
    """Admits at most `limit` units at a time. Use it on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the limit of an Admission must be at least 1, not {limit}")
        self.limit = limit
        self.held = 0
        self._by_tenant: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Admission {self.held} of {self.limit} held, by {len(self._by_tenant)}>"

    def held_by(self, tenant: str) -> int:
        """Returns the units that one account holds."""
        return self._by_tenant[tenant]

    def has_room(self, tenant: str, units: int) -> bool:
        """Returns True if `admit` would succeed."""
        if not self.held or self.held + units <= self.limit:
            return True
        if self.held + units > 2 * self.limit:
            return False
        holders = len(self._by_tenant) + (tenant not in self._by_tenant)
        return self._by_tenant[tenant] + units <= self.limit // holders

    def admit(self, tenant: str, units: int) -> None:
        """Takes units until `release`. Raises AdmissionRejectedError."""
        if not self.has_room(tenant, units):
            raise AdmissionRejectedError(self.held, self.limit)
        self.held += units
        self._by_tenant[tenant] += units

    def release(self, tenant: str, units: int) -> None:
        """Releases units taken by `admit`."""
        self.held -= units
        self._by_tenant[tenant] -= units
        if self._by_tenant[tenant] <= 0:
            del self._by_tenant[tenant]

    @contextmanager
    def hold(self, tenant: str, units: int) -> Iterator[None]:
        """Holds units for the block. Raises AdmissionRejectedError."""
        self.admit(tenant, units)
        try:
            yield
        finally:
            self.release(tenant, units)


class ByteSemaphore:
    """Hands out at most `limit` units at a time, first come, first served. Use it on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the limit of a ByteSemaphore must be at least 1, not {limit}")
        self.limit = limit
        self.in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<ByteSemaphore {self.in_use} of {self.limit} in use, {len(self._waiting)} waiting>"

    def try_acquire(self, units: int) -> bool:
        """Takes units if nobody waits and they fit; never waits."""
        if self._waiting or not self._fits(units):
            return False
        self.in_use += units
        return True

    async def acquire(self, units: int) -> None:
        """Waits in turn, then takes units. A cancelled call takes nothing."""
        if self.try_acquire(units):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, granted))
        try:
            await granted
        except asyncio.CancelledError:
            self._cancel_waiter(units, granted)
            raise

    def release(self, units: int) -> None:
        """Releases units."""
        if units > self.in_use:
            raise ValueError(f"cannot release {units} units: only {self.in_use} are in use")
        self.in_use -= units
        self._grant()

    @asynccontextmanager
    async def hold(self, units: int) -> AsyncIterator[None]:
        """Holds units for the block."""
        await self.acquire(units)
        try:
            yield
        finally:
            self.release(units)

    def _fits(self, units: int) -> bool:
        return self.in_use + units <= self.limit or not self.in_use

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            units, granted = self._waiting.popleft()
            if not granted.done():  # else the call was cancelled, and takes nothing
                self.in_use += units
                granted.set_result(None)

    def _cancel_waiter(self, units: int, granted: asyncio.Future[None]) -> None:
        if not granted.cancelled():
            self.release(units)  # granted at the moment of cancellation
            return
        with suppress(ValueError):  # it had its turn between the cancellation and now
            self._waiting.remove((units, granted))
        self._grant()
