"""Requests under way, each alone on its connection, and the connections that wait for the next one.

Law: for one thread, but for `abort`, which any may call. A connection whose answer was not read to its end is
closed, never kept.
"""

from __future__ import annotations

import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.arenas import Waker
    from meshsdk.connections import Connection
    from meshsdk.parts import Joint
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request, Transport


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent at `sent`: for the frame of a step, or for a part of one (`joint`)."""

    step: int
    connection: Connection
    sent: float
    request: Request
    joint: Joint | None = None


class Flights:
    """What is under way. `waker`: wakes who waits for answers; `timeout`: seconds for which an answer may
    stand still."""

    def __init__(self, transport: Transport, waker: Waker, timeout: float) -> None:
        self._transport, self._waker, self._timeout = transport, waker, timeout
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._flying: dict[int, Flight] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flying.values()))

    def __contains__(self, flight: Flight) -> bool:
        return any(other is flight for other in self._flying.values())

    def __repr__(self) -> str:
        return f"Flights({len(self._flying)} under way)"

    def begin(self, step: int, request: Request, endpoint: Endpoint, joint: Joint | None = None) -> None:
        """Sends a request. Raises MeshError where that cannot be; nothing is left of it then."""
        line, idle = self._transport.line(endpoint), self._idle.get(endpoint)
        connection = idle.pop() if idle else line.pool.dial(self._timeout)
        flight = Flight(step, connection, time.monotonic(), request, joint)
        self._flying[connection.fileno()] = flight
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send([line.signer.head(request), request.body])
        except MeshError:
            self.end(flight)
            raise

    def answered(self, seconds: float | None) -> list[Flight] | None:
        """Those whose answers have begun, in step order, once there is one or the waker was woken; None when
        nothing happened for so long."""
        events = self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1000 + 1)
        self._waker.drain()
        if not events:
            return None
        readable = [self._flying[descriptor] for descriptor, _ in events if descriptor in self._flying]
        begun = [flight for flight in readable if flight.connection.began()]
        return sorted(begun, key=lambda flight: flight.step)

    def end(self, flight: Flight, *, keep: bool = False) -> None:
        """It is over; `keep` its connection for another request."""
        descriptor = next((each for each, other in self._flying.items() if other is flight), -1)
        self._poll.unregister(descriptor)
        del self._flying[descriptor]
        if keep:
            self._idle.setdefault(flight.connection.endpoint, []).append(flight.connection)
        else:
            flight.connection.close()

    def abort(self) -> None:
        """Breaks what is under way off: who reads of it is told at once. From any thread."""
        for flight in self:
            flight.connection.abort()

    def close(self) -> None:
        """Closes all connections."""
        idle = [connection for kept in self._idle.values() for connection in kept]
        for connection in [*idle, *(flight.connection for flight in self)]:
            connection.close()
        self._idle.clear()
        self._flying.clear()
