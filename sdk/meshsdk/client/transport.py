"""Signed requests over pooled connections, with retries and failover, one by one or several in flight.

Law: requests are idempotent (reads, whole-object writes, content-addressed POSTs), so a retry is safe; a
request that is not idempotent says so with `idempotent=False` and is not retried.
Invariant: a connection is used again only after its response was read to the end.
"""

from __future__ import annotations

import json
import select
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

from meshsdk.client.connection_pool import Pool
from meshsdk.client.error_responses import read_error
from meshsdk.client.local_handover import LocalHandover
from meshsdk.client.request import Request
from meshsdk.client.retry import (
    PRESENCE,
    QUIET,
    BackOff,
    Patience,
    await_answer,
    progress_of,
    shards_of,
    silence,
)
from meshsdk.client.routing import MAP_HEADER, ClusterDirectory, Router, mark_failed
from meshsdk.client.settings import replacement_keys
from meshsdk.client.signer import Signer, keys_of
from meshsdk.client.tracing import traced_request
from meshsdk.earlier_paths import earlier_names
from meshsdk.errors import ConnectError, MeshError, ServerError, is_clock_skewed
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.arena import Waker
    from meshsdk.client.http_connection import Connection, Response
    from meshsdk.client.settings import Endpoint, RenewableKeys, Settings
    from meshwire.sigv4 import Credential

T = TypeVar("T")
Tag = TypeVar("Tag")
_SMALL = 16 << 10
_FIRST_CONNECT = 1.5  # seconds: long enough for a second SYN, which the kernel sends after one


class EndpointClient:
    """The connection pool and signer for one endpoint."""

    def __init__(self, settings: Settings, endpoint: Endpoint, keys: RenewableKeys) -> None:
        self.endpoint = endpoint
        self.pool = Pool(endpoint, settings.timeout)
        self.signer = Signer(settings, endpoint=endpoint, keys=keys)

    def send(self, connection: Connection, request: Request) -> None:
        """Sign and send a request."""
        head = self.signer.head(traced_request(request))
        # A small body shares the TCP segment of its head.
        connection.send([head + bytes(request.body)] if len(request.body) <= _SMALL else [head, request.body])

    def hand_back(self, connection: Connection, response: Response | None) -> None:
        """Return a connection to the pool if its response was read to the end; else close it."""
        if response is not None and response.reusable:
            self.pool.release(connection)
        else:
            connection.close()


def _map_request(of: ref[Transport]) -> Callable[[Endpoint], bytes]:
    """Return what requests the map for a transport, without a reference cycle: the sockets of a client that
    nobody closed are closed as soon as it is dropped."""

    def ask(endpoint: Endpoint) -> bytes:
        transport = of()
        if transport is None:
            raise ConnectError("this client was dropped")
        return transport._ask_map(endpoint)

    return ask


class Transport:
    """Sends a client's requests to its endpoints and the nodes behind them: pools, signing, retries.

    Thread-safe; pickles without its sockets. `on_progress`, if set, is called with the progress (0…1) of a
    long operation each time a node reports it, and with how many of how many shards are done, if it counts
    them.
    """

    def __init__(self, settings: Settings, sleep: Callable[[float], None] = time.sleep) -> None:
        self.settings = settings
        self.keys = keys_of(settings)
        self._lines: dict[Endpoint, EndpointClient] = {}
        first = self.endpoint_client(settings.endpoint)
        self.pool, self.signer = first.pool, first.signer
        self.router = Router(ClusterDirectory(settings.endpoints, _map_request(ref(self))))
        self.local_handover = LocalHandover()
        self.retries = 0
        self.on_progress: Callable[[float, tuple[int, int] | None], None] | None = None
        self._sleep = sleep

    def endpoint_client(self, endpoint: Endpoint) -> EndpointClient:
        """Return the client of an endpoint, created on first use."""
        found = self._lines.get(endpoint)
        if found is None:
            found = self._lines.setdefault(endpoint, EndpointClient(self.settings, endpoint, self.keys))
        return found

    def connect(self, line: EndpointClient) -> Connection:
        """Return an idle connection to an endpoint, else a new one. Raises ConnectError."""
        return line.pool.acquire(self.connect_timeout(line.endpoint))

    def connect_timeout(self, endpoint: Endpoint) -> float:
        """Return the seconds to wait for a connection: few if other nodes can answer and this one has not
        failed a moment ago, because the address of a node that is gone often drops packets."""
        directory, whole = self.router.directory, self.settings.connect_timeout
        if directory.has_several and not directory.is_shunned(endpoint):
            return min(_FIRST_CONNECT, whole)
        return whole

    def _ask_map(self, endpoint: Endpoint) -> bytes:
        """Request the map with a short timeout and no retry: other nodes know it as well."""
        settings = replace(self.settings, timeout=min(self.settings.timeout, PRESENCE))
        line = EndpointClient(settings, endpoint, self.keys)
        try:
            return self._exchange(line, Request("GET", "/-/map"), lambda response: response.read())
        finally:
            line.pool.clear()

    def answers(self, endpoint: Endpoint) -> bool:
        """Return whether a node is alive; a refusal counts as an answer."""
        try:
            self._ask_map(endpoint)
        except ConnectError:
            return False
        except MeshError:
            return True
        return True

    def call(
        self,
        request: Request,
        consume: Callable[[Response], T],
        deadline: float | None = None,
        begun: Connection | None = None,
    ) -> T:
        """Send a request, with retries, and return `consume(response)` of a successful response.

        `consume` must read the body, and may run again if the response breaks off. `begun`: the connection on
        which the request was already sent (see `begin`).

        Raises ServerError if the server refuses, DeadlineError if it is unavailable for too long, and
        ConnectError only for a request that is not idempotent.
        """
        asking = RequestAttempts(self, request, deadline)
        while True:
            line, connection = asking.next_endpoint(None if begun is None else begun.endpoint), begun
            begun = None
            try:
                return self._exchange(line, request, consume, connection, asking)
            except MeshError as error:
                asking.handle_failure(error)

    def begin(self, request: Request) -> Connection | None:
        """Send a request now; `call` or `open` receives the response later on the returned connection.

        Returns None if sending failed; `call` and `open` then send it themselves.
        """
        line, connection = self.endpoint_client(self.router.choose_endpoint(request, set())), None
        try:
            connection = self.connect(line)
            line.send(connection, request)
        except ConnectError:
            self.router.directory.mark_failed(line.endpoint)
            if connection is not None:
                connection.close()
            return None
        return connection

    def open(
        self, request: Request, deadline: float | None = None, begun: Connection | None = None
    ) -> tuple[Response, Callable[[], None]]:
        """Send a request and return a successful response with its body unread, and a function to release it.

        Call the function when done with the response. Only the head is retried. `begun`: the connection on
        which the request was already sent. Raises the errors of `call`.
        """
        asking = RequestAttempts(self, request, deadline)
        while True:
            line = asking.next_endpoint(None if begun is None else begun.endpoint)
            connection = None
            response = None
            try:
                if begun is not None:
                    connection, begun = begun, None
                else:
                    connection = self.connect(line)
                    line.send(connection, request)
                asking.wait_for_answer(connection)
                response = self.receive(connection, request)
                if response.status >= 300:
                    raise read_error(response, request)
            except MeshError as error:
                if connection is not None:
                    line.hand_back(connection, response)
                asking.handle_failure(error)
            else:
                return response, partial(line.hand_back, connection, response)

    def _exchange(
        self,
        line: EndpointClient,
        request: Request,
        consume: Callable[[Response], T],
        begun: Connection | None = None,
        asking: RequestAttempts | None = None,
    ) -> T:
        connection = self.connect(line) if begun is None else begun
        response = None
        try:
            if begun is None:
                line.send(connection, request)
            if asking is not None:
                asking.wait_for_answer(connection)
            response = self.receive(connection, request)
            if response.status >= 300:
                raise read_error(response, request)
            return consume(response)
        finally:
            line.hand_back(connection, response)

    def receive(self, connection: Connection, request: Request) -> Response:
        """Receive the head of a response, and record what it says about the node and the mesh."""
        response = connection.receive(bodiless=request.method == "HEAD")
        directory = self.router.directory
        directory.mark_working(connection.endpoint)
        directory.record_version(response.headers.get(MAP_HEADER, ""))
        self.local_handover.record_directory(connection.endpoint, response.headers.get(LOCAL, ""))
        return response

    def wait(self, seconds: float) -> None:
        """Sleep; tests replace the sleep function."""
        self._sleep(seconds)

    def text(self, request: Request) -> bytes:
        """Return the whole body of a successful response."""
        return self.call(request, lambda response: response.read())

    def json(self, request: Request, deadline: float | None = None, begun: Connection | None = None) -> Any:
        """Return the parsed JSON body of a successful response. Raises MeshError if it is not JSON."""
        body = self.call(request, lambda response: response.read(), deadline, begun)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise MeshError(
                f"the response to {request.method} {request.path} is not JSON: "
                f"check that {self.settings.endpoint} is a meshd"
            ) from error

    def close(self) -> None:
        """Close the idle connections; the transport stays usable."""
        for line in list(self._lines.values()):
            line.pool.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)


class RequestAttempts:
    """The attempts of one request: which endpoints were tried, and when to try the next.

    After a failure the next untried node is tried at once; when none is left, all are tried again after a
    wait.
    """

    def __init__(self, transport: Transport, request: Request, deadline: float | None) -> None:
        self._transport, self._request = transport, request
        self._patience = Patience(BackOff(transport.settings.deadline if deadline is None else deadline))
        self._tried: set[Endpoint] = set()
        self._refused: Credential | None = None
        self._last: Endpoint | None = None

    def next_endpoint(self, endpoint: Endpoint | None = None) -> EndpointClient:
        """Return the client of the endpoint to try now: `endpoint` if given, else the router's choice."""
        self._last = endpoint or self._transport.router.choose_endpoint(self._request, self._tried)
        return self._transport.endpoint_client(self._last)

    def wait_for_answer(self, connection: Connection) -> None:
        """Wait until a response begins. Raises ConnectError if the node is dead or the timeout passes."""
        timeout = self._transport.settings.timeout
        left = self._patience.ends - time.monotonic()
        limit = silence(timeout, self._patience.policy.deadline, left)
        if self._transport.router.directory.has_several:
            limit = min(limit, QUIET)  # another node may answer meanwhile
        if limit < timeout and self._request.idempotent:
            there = partial(self._is_there, connection.endpoint)
            await_answer(connection, limit, timeout, there)

    def _is_there(self, endpoint: Endpoint) -> bool:
        """Return whether a node is alive; one that answered another request a moment ago is not asked."""
        heard = self._transport.router.directory.heard_within(endpoint, QUIET)
        return heard or self._transport.answers(endpoint)

    def handle_failure(self, error: MeshError) -> None:
        """Wait until the next attempt is due; raise the error, or DeadlineError, if there must be none."""
        if isinstance(error, ServerError) and error.blames_keys:
            self._refused = replacement_keys(self._transport.keys, error, self._refused)
            self._transport.retries += 1
            return
        if not (self._request.idempotent or is_clock_skewed(error)):
            raise error
        again = mark_failed(self._transport.router, self._request, self._tried, self._last, error)
        wait = 0.0 if again else self._patience.delay(error, time.monotonic())
        self._transport.retries += 1
        done = progress_of(error)
        if done is not None and self._transport.on_progress is not None:
            self._transport.on_progress(done, shards_of(error))
        if not again:
            self._tried.clear()
            self._transport.wait(wait)


@dataclass(slots=True, eq=False)
class InFlightRequest(Generic[Tag]):
    """A request on its connection. `tag` is the sender's own; `sent`: monotonic seconds."""

    tag: Tag
    connection: Connection
    sent: float
    request: Request


class InFlightRequests(Generic[Tag]):
    """The requests that one thread has in flight, one per connection, and its idle connections.

    `waker` interrupts the wait for responses; `timeout` is the longest silence within a response, in seconds.
    Not thread-safe, except that any thread may call `abort`.
    """

    def __init__(self, transport: Transport, waker: Waker, timeout: float) -> None:
        self._transport, self._waker, self._timeout = transport, waker, timeout
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._flying: dict[int, InFlightRequest[Tag]] = {}  # by descriptor
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[InFlightRequest[Tag]]:
        return iter(list(self._flying.values()))

    def __contains__(self, flight: InFlightRequest[Tag]) -> bool:
        return any(other is flight for other in self._flying.values())

    def __repr__(self) -> str:
        return f"InFlightRequests({len(self._flying)})"

    def send_request(self, tag: Tag, request: Request, endpoint: Endpoint) -> None:
        """Send a request. Raises MeshError if that fails; the request is then not in flight."""
        line = self._transport.endpoint_client(endpoint)
        connection = self._idle_connection(endpoint)
        if connection is None:
            connection = line.pool.dial(self._transport.connect_timeout(endpoint), self._timeout)
        flight = InFlightRequest(tag, connection, time.monotonic(), request)
        self._flying[connection.fileno()] = flight
        self._poll.register(connection, select.POLLIN)
        try:
            connection.send([line.signer.head(traced_request(request)), request.body])
        except MeshError:
            self.finish_request(flight)
            raise

    def _idle_connection(self, endpoint: Endpoint) -> Connection | None:
        """Return one that is still open: a node closes those that are idle while a job validates, say."""
        kept = self._idle.get(endpoint, [])
        while kept:
            connection = kept.pop()
            if connection.idle():
                return connection
            connection.close()
        return None

    def answered(self, seconds: float | None) -> list[InFlightRequest[Tag]] | None:
        """Wait for responses to begin, and return their requests in any order.

        Returns early, perhaps with an empty list, if the waker was woken; returns None after `seconds`.
        """
        events = self._poll.poll(None if seconds is None else max(seconds, 0.0) * 1000 + 1)
        self._waker.drain()
        if not events:
            return None
        readable = [self._flying[descriptor] for descriptor, _ in events if descriptor in self._flying]
        return [flight for flight in readable if flight.connection.began()]

    def finish_request(self, flight: InFlightRequest[Tag], *, keep: bool = False) -> None:
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


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = earlier_names(__name__)
