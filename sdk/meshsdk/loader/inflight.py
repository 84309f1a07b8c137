"""Requests in flight, one per connection, and the queue of failed steps waiting for a retry.

Law: one thread owns them; any thread may call `abort`. A failed step goes to another node at once, and
waits only after every node failed. A connection whose answer was not read to the end is closed, never
kept.
"""

from __future__ import annotations

import heapq
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshsdk.client.retry import BackOff, Patience, silence
from meshsdk.client.transport import mark_failed, replacement_keys
from meshsdk.errors import MeshError, ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.arena import Waker
    from meshsdk.client.http_connection import Connection
    from meshsdk.client.routing import Router
    from meshsdk.client.settings import Endpoint, RenewableKeys
    from meshsdk.client.transport import Request, Transport
    from meshsdk.loader.frame_requests import SplitFrame
    from meshwire.sigv4 import Credential


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request that was sent at `sent`: for the frame of a step, or for a part of one (`joint`)."""

    step: int
    connection: Connection
    sent: float
    request: Request
    joint: SplitFrame | None = None


class InFlightRequests:
    """What is under way. `waker`: wakes who waits for answers; `timeout`: seconds for which an answer may
    stand still."""

    def __init__(self, transport: Transport, waker: Waker, timeout: float) -> None:
        self._transport, self._waker, self._timeout = transport, waker, timeout
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._flying: dict[int, InFlightRequest] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(list(self._flying.values()))

    def __contains__(self, flight: InFlightRequest) -> bool:
        return any(other is flight for other in self._flying.values())

    def __repr__(self) -> str:
        return f"Flights({len(self._flying)} under way)"

    def send_request(
        self, step: int, request: Request, endpoint: Endpoint, joint: SplitFrame | None = None
    ) -> None:
        """Sends a request. Raises MeshError where that cannot be; nothing is left of it then."""
        line, idle = self._transport.endpoint_client(endpoint), self._idle.get(endpoint)
        connection = idle.pop() if idle else line.pool.dial(self._timeout)
        flight = InFlightRequest(step, connection, time.monotonic(), request, joint)
        self._flying[connection.fileno()] = flight
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send([line.signer.head(request), request.body])
        except MeshError:
            self.finish_request(flight)
            raise

    def answered(self, seconds: float | None) -> list[InFlightRequest] | None:
        """Those whose answers have begun, in step order, once there is one or the waker was woken; None when
        nothing happened for so long."""
        events = self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1000 + 1)
        self._waker.drain()
        if not events:
            return None
        readable = [self._flying[descriptor] for descriptor, _ in events if descriptor in self._flying]
        begun = [flight for flight in readable if flight.connection.began()]
        return sorted(begun, key=lambda flight: flight.step)

    def finish_request(self, flight: InFlightRequest, *, keep: bool = False) -> None:
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


class RetryQueue:
    """Of one pass. `deadline`: seconds a step is tried for."""

    def __init__(self, router: Router, keys: RenewableKeys, deadline: float) -> None:
        self._router, self._keys, self._policy = router, keys, BackOff(deadline)
        self._due: list[tuple[float, int]] = []
        self._tried: dict[int, set[Endpoint]] = {}
        self._patience: dict[int, Patience] = {}
        self._refused: dict[int, Credential] = {}

    def __len__(self) -> int:
        """Steps that wait for their time."""
        return len(self._due)

    def __repr__(self) -> str:
        return f"Attempts({len(self._due)} steps to be asked for again)"

    @property
    def next_due(self) -> float | None:
        """When the first of them is to be asked for."""
        return self._due[0][0] if self._due else None

    def pop(self) -> int:
        """The first of them."""
        return heapq.heappop(self._due)[1]

    def schedule_retry(self, step: int, when: float) -> None:
        """A step is to be asked for at a time."""
        heapq.heappush(self._due, (when, step))

    def tried_endpoints(self, step: int) -> set[Endpoint]:
        """Who was asked for it in vain."""
        return self._tried.get(step, set())

    def silence_limit(self, step: int, sent: float, timeout: float) -> float:
        """Seconds after which a node that was asked for it at `sent`, and says nothing, is asked whether it
        is there."""
        patience, deadline = self._patience.get(step), self._policy.deadline
        return silence(timeout, deadline, deadline if patience is None else patience.ends - sent)

    def record_failure(
        self,
        step: int,
        error: MeshError,
        request: Request,
        endpoint: Endpoint,
        now: float,
        since: float | None = None,
    ) -> None:
        """Another node is asked now, or this one later. `since`: when it began to be away, if that was
        noticed later. Raises what it ends with where that is no use, or too late."""
        if since is not None:
            self._patience_with(step, since)
        if isinstance(error, ServerError) and error.blames_keys:
            self._keys_failed(step, error, now)
            return
        tried = self._tried.setdefault(step, set())
        if mark_failed(self._router, request, tried, endpoint, error):
            self.schedule_retry(step, now)
            return
        tried.clear()
        self.schedule_retry(step, now + self._patience_with(step, now).delay(error, now))

    def _keys_failed(self, step: int, error: ServerError, now: float) -> None:
        """Asked again at once with keys that were renewed. Where they come from a file and their time is
        over, they are waited for: whoever renews it is late."""
        try:
            self._refused[step] = replacement_keys(self._keys, error, self._refused.get(step))
        except ServerError as final:
            if final.code != "ExpiredToken" or not self._keys.path:
                raise
            self.schedule_retry(step, now + self._patience_with(step, now).wait(final, now))
        else:
            self.schedule_retry(step, now)

    def _patience_with(self, step: int, now: float) -> Patience:
        return self._patience.setdefault(step, Patience(self._policy, started=now))

    def record_success(self, step: int) -> None:
        """It is here."""
        self._patience.pop(step, None)
        self._tried.pop(step, None)
        self._refused.pop(step, None)
