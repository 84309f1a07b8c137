"""Requests in flight, one per connection, and the queue of failed steps that wait for a retry.

Law: one thread owns them; any thread may call `abort`. A failed step goes to another node at once, and waits
only after every node failed. A connection whose response was not read to the end is closed, never reused.
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
    """A request for the frame of a step, or for a part of one (`joint`); `sent`: monotonic seconds."""

    step: int
    connection: Connection
    sent: float
    request: Request
    joint: SplitFrame | None = None


class InFlightRequests:
    """The requests in flight of one prefetcher, and its idle connections.

    `waker` interrupts the wait for responses; `timeout` is the longest silence within a response, in seconds.
    """

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
        return f"InFlightRequests({len(self._flying)})"

    def send_request(
        self, step: int, request: Request, endpoint: Endpoint, joint: SplitFrame | None = None
    ) -> None:
        """Send a request. Raises MeshError if that fails; the request is then not in flight."""
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
        """Wait for responses to begin, and return their requests in step order.

        Returns early, perhaps with an empty list, if the waker was woken; returns None after `seconds`.
        """
        events = self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1000 + 1)
        self._waker.drain()
        if not events:
            return None
        readable = [self._flying[descriptor] for descriptor, _ in events if descriptor in self._flying]
        begun = [flight for flight in readable if flight.connection.began()]
        return sorted(begun, key=lambda flight: flight.step)

    def finish_request(self, flight: InFlightRequest, *, keep: bool = False) -> None:
        """Remove a request; `keep` its connection for another request, or close it."""
        descriptor = next((each for each, other in self._flying.items() if other is flight), -1)
        self._poll.unregister(descriptor)
        del self._flying[descriptor]
        if keep:
            self._idle.setdefault(flight.connection.endpoint, []).append(flight.connection)
        else:
            flight.connection.close()

    def abort(self) -> None:
        """Abort all requests; a blocked reader gets an error at once. Any thread may call this."""
        for flight in self:
            flight.connection.abort()

    def close(self) -> None:
        """Close all connections."""
        idle = [connection for kept in self._idle.values() for connection in kept]
        for connection in [*idle, *(flight.connection for flight in self)]:
            connection.close()
        self._idle.clear()
        self._flying.clear()


class RetryQueue:
    """The failed steps of one prefetcher, by when to retry them; `deadline` is in seconds per step."""

    def __init__(self, router: Router, keys: RenewableKeys, deadline: float) -> None:
        self._router, self._keys, self._policy = router, keys, BackOff(deadline)
        self._due: list[tuple[float, int]] = []
        self._tried: dict[int, set[Endpoint]] = {}
        self._patience: dict[int, Patience] = {}
        self._refused: dict[int, Credential] = {}

    def __len__(self) -> int:
        """The number of steps that wait for a retry."""
        return len(self._due)

    def __repr__(self) -> str:
        return f"RetryQueue({len(self._due)} steps)"

    @property
    def next_due(self) -> float | None:
        """The monotonic time of the first retry; None if no step waits."""
        return self._due[0][0] if self._due else None

    def pop(self) -> int:
        """Remove and return the step to retry first."""
        return heapq.heappop(self._due)[1]

    def schedule_retry(self, step: int, when: float) -> None:
        """Schedule a retry of a step at a monotonic time."""
        heapq.heappush(self._due, (when, step))

    def tried_endpoints(self, step: int) -> set[Endpoint]:
        """Return the endpoints that failed for a step."""
        return self._tried.get(step, set())

    def silence_limit(self, step: int, sent: float, timeout: float) -> float:
        """Return the seconds of silence after `sent` before checking that the node of a step is alive."""
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
        """Schedule a retry of a step: at once if another node is untried, else after a wait.

        `since`: when the node became unavailable, if that was noticed later. Raises the error, or
        DeadlineError, if a retry cannot help or the deadline has passed.
        """
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
        """Retry at once with renewed keys. Expired keys from a file are waited for, since their renewal may
        be late. Raises the error otherwise."""
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
        """Forget the failures of a step that has arrived."""
        self._patience.pop(step, None)
        self._tried.pop(step, None)
        self._refused.pop(step, None)
