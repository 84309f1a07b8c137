"""One computation for all who ask for the same thing at the same time.

Law: the work runs as a task of its own: a caller that is cancelled leaves the others' work alone; the work
is cancelled when its last caller left. Invariant: at most one flight per key.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: asyncio.Future[V]
    callers: int = 0


class SingleFlight(Generic[K, V]):
    """Shares results of running computations by key; keeps nothing once they are done."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __repr__(self) -> str:
        return f"<SingleFlight {len(self._flights)} in flight>"

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, compute: Callable[[], Awaitable[V]]) -> tuple[V, bool]:
        """(result, joined): the result of `compute()`, or of the flight that was under way (joined is True).

        Every caller gets the same result object or the same exception.
        """
        flight = self._flights.get(key)
        joined = flight is not None and not flight.task.done()
        if flight is None or not joined:  # one that ended in this very turn of the loop is not under way
            flight = self._start(key, compute)
        flight.callers += 1
        try:
            return await asyncio.shield(flight.task), joined
        finally:
            flight.callers -= 1
            if not flight.callers and not flight.task.done():
                self._forget(key, flight)  # a newcomer must not join what is being cancelled
                flight.task.cancel()

    def _start(self, key: K, compute: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.ensure_future(compute()))
        self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._landed(key, flight, task))
        return flight

    def _landed(self, key: K, flight: _Flight[V], task: asyncio.Future[V]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            task.exception()  # seen, even when every caller has left

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
