"""A piece of an object on its way from the origin: bytes that grow in a file, for any number of readers.

Law: whoever reads holds the flight, and lets go of it; what is not kept goes with the last: memory, or a
draft of the cache's. Other processes of the node read the same file through the descriptor. Invariant: `have`
only grows, until `ended` or `failed`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from meshd.origin.errors import OriginDownError

if TYPE_CHECKING:
    from meshd.origin.interface import Facts


class Flight:
    """`fd` holds `have` of `length` bytes, from `base` on; -1 until the origin has answered."""

    __slots__ = ("_holders", "_waiters", "base", "done", "error", "facts", "fd", "have", "length")

    def __init__(self) -> None:
        self.fd, self.base = -1, 0
        self.facts: Facts | None = None
        self.length, self.have = -1, 0
        self.done = False
        self.error: Exception | None = None
        self._holders = 1
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Flight {self.have} of {self.length}{' done' if self.done else ''} {self.error or ''}>"

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    # --- whoever fetches

    def began(self, facts: Facts, length: int, place: tuple[int, int] | None = None) -> None:
        """`place`: a file, the flight's from now on, and where the bytes go in it; None: memory."""
        self.fd, self.base = place or (os.memfd_create("flight", os.MFD_CLOEXEC), 0)
        self.facts, self.length = facts, length
        self._wake()

    def take(self, data: bytes) -> None:
        """More bytes of a flight in memory: nothing here waits for a disk."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, self.have)
            self.have += written
            view = view[written:]
        self._wake()

    def grew(self, have: int) -> None:
        """So many are there: another process, or a thread, wrote them."""
        self.have = have
        self._wake()

    def check(self) -> None:
        """Raises OriginDownError when not all has come."""
        if self.have != self.length:
            raise OriginDownError("the origin sent less than it said")

    def ended(self) -> None:
        self.done = True
        self._wake()

    def failed(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error
        self._wake()

    # --- whoever reads

    def hold(self) -> Flight:
        self._holders += 1
        return self

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def started(self) -> Facts:
        """What the origin said of the object. Raises OriginError."""
        while self.facts is None and not self.done:
            await self._change()
        if self.facts is None:
            raise self.error or OriginDownError("the origin did not answer")
        return self.facts

    async def reaches(self, wanted: int) -> int:
        """Bytes that are there, `wanted` at least. Raises OriginError."""
        while self.have < wanted and not self.done:
            await self._change()
        if self.have < wanted:
            raise self.error or OriginDownError("the origin sent less than it said")
        return self.have

    async def over(self) -> None:
        """When all is there. Raises OriginError."""
        while not self.done:
            await self._change()
        if self.error is not None:
            raise self.error

    async def moved(self, seen: int) -> None:
        """When there is more than `seen`, or no more to come."""
        while self.have == seen and not self.done:
            await self._change()

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
