"""Admission control: the tenant that work is charged to, a limit by tenant, and a FIFO semaphore.

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
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


NO_TENANT = ""
"""Unsigned requests, and the node itself."""

_tenant: ContextVar[str] = ContextVar("account", default=NO_TENANT)


def current_tenant() -> str:
    """The account of the work under way."""
    return _tenant.get()


def set_tenant(name: str) -> None:
    """From here on, in this task and those it starts, the work is `name`'s."""
    _tenant.set(name)


@contextmanager
def tenant_scope(name: str) -> Iterator[None]:
    """Work within the block is `name`'s."""
    token = _tenant.set(name)
    try:
        yield
    finally:
        _tenant.reset(token)


class AdmissionRejectedError(Exception):
    """There is no room now. `held`: how much is under way, of `limit`."""

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(f"{held} of {limit}")
        self.held, self.limit = held, limit


class Admission:
    """At most `limit` units at a time. Use on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("an admission needs at least one unit")
        self.limit = limit
        self.held = 0
        self._by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Admission {self.held} of {self.limit} held, by {len(self._by_account)}>"

    def held_by(self, account: str) -> int:
        """What one account holds."""
        return self._by_account[account]

    def has_room(self, account: str, units: int) -> bool:
        """Whether `enter` would let it in."""
        if not self.held or self.held + units <= self.limit:
            return True
        if self.held + units > 2 * self.limit:
            return False
        holders = len(self._by_account) + (account not in self._by_account)
        return self._by_account[account] + units <= self.limit // holders

    def admit(self, account: str, units: int) -> None:
        """Hold units from here on. Raises FullError."""
        if not self.has_room(account, units):
            raise AdmissionRejectedError(self.held, self.limit)
        self.held += units
        self._by_account[account] += units

    def release(self, account: str, units: int) -> None:
        """Give back what `enter` gave."""
        self.held -= units
        self._by_account[account] -= units
        if self._by_account[account] <= 0:
            del self._by_account[account]

    @contextmanager
    def hold(self, account: str, units: int) -> Iterator[None]:
        """Units for the length of a block. Raises FullError."""
        self.admit(account, units)
        try:
            yield
        finally:
            self.release(account, units)


class ByteSemaphore:
    """At most `limit` units out at a time. Use on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("a budget needs at least one unit")
        self.limit = limit
        self.in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<Budget {self.in_use} of {self.limit} taken, {len(self._waiting)} waiting>"

    @property
    def waiter_count(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def try_acquire(self, units: int) -> bool:
        """Take without waiting, if nobody waits and it fits."""
        if self._waiting or not self._fits(units):
            return False
        self.in_use += units
        return True

    async def acquire(self, units: int) -> None:
        """Wait for the turn, then take. Cancelling takes nothing."""
        if self.try_acquire(units):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._cancel_waiter(units, turn)
            raise

    def release(self, units: int) -> None:
        """Give back what was taken."""
        if units > self.in_use:
            raise ValueError(f"{units} given back, only {self.in_use} are out")
        self.in_use -= units
        self._grant()

    @asynccontextmanager
    async def hold(self, units: int) -> AsyncIterator[None]:
        """Take for the length of a block."""
        await self.acquire(units)
        try:
            yield
        finally:
            self.release(units)

    def _fits(self, units: int) -> bool:
        return self.in_use + units <= self.limit or not self.in_use

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            units, turn = self._waiting.popleft()
            self.in_use += units
            turn.set_result(None)

    def _cancel_waiter(self, units: int, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.release(units)  # granted in the same moment
        else:
            self._waiting.remove((units, turn))
            self._grant()
