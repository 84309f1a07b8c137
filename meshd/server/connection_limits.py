"""Protection against misbehaving clients: limits, idle timeout, lingering close, malformed requests.

The limiter scans all connections periodically and checks each new one at once; it never touches a request
that makes progress. The number of open connections and the bytes buffered for clients that do not read stay
below their limits. Lingering close (RFC 9112 §9.6): closing a socket with unread input resets it, and the
reset destroys the response. Input after an early response is therefore read and dropped, bounded in time and
in silence. The parser's own messages quote the input, so they are never sent to the client.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from meshd.server.body_stream import MalformedBodyError
from meshd.server.http_parser import MalformedRequestError
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout_at
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.config import HttpSettings
    from meshd.server.body_stream import BodyStream


_TOO_LARGE: Final = 431  # RFC 6585 §5; S3's own table has 400 for the code


def malformed_request_error(error: Exception) -> tuple[S3Error, int]:
    """Return (error, status) for a request that could not be parsed, or a handler's failure."""
    if not isinstance(error, MalformedRequestError):
        return S3Error("InternalError"), 500
    if error.too_large:
        return S3Error("RequestHeaderSectionTooLarge"), _TOO_LARGE
    return S3Error("BadRequest", f"An error occurred when parsing the HTTP request: {error}."), 400


_SILENCE: Final = 5.0  # seconds without a byte, after which a client counts as gone
_HURRIED: Final = 1.0  # seconds for clients that still send when the node stops


class LingeringClose:
    """Drops the rest of one body for at most `seconds`. Without a `body`, or if it turns out to be malformed,
    its end is unknown: then until the client closes, which `data_arrived` and `client_closed` report."""

    def __init__(self, body: BodyStream | None, seconds: float) -> None:
        self._body, self._loop = body, asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._end = self._loop.time() + seconds
        self._limit = timeout_at(self._next())

    def __repr__(self) -> str:
        return f"<LingeringClose for {self._end - self._loop.time():.1f} s at most, {self._body!r}>"

    async def drain_input(self) -> None:
        """Return when the body has ended, or waiting is not worthwhile any more. Call it once."""
        try:
            async with self._limit:
                if self._body is None or not await self._ends(self._body):
                    await self._gone
        except TimeoutError:
            metrics.http_turned_away.labels("refused body").inc()

    async def _ends(self, body: BodyStream) -> bool:
        """Read the body; return whether it came to an end."""
        try:
            while not body.complete:
                await body.read_available()
                self.data_arrived()
        except MalformedBodyError:
            return False
        return True

    def data_arrived(self) -> None:
        """Note that the client has sent data."""
        if not self._limit.expired():
            self._limit.reschedule(self._next())

    def shorten(self) -> None:
        """End soon, whatever arrives. Idempotent."""
        self._end = min(self._end, self._loop.time() + _HURRIED)
        self.data_arrived()

    def client_closed(self) -> None:
        """Note that nothing more arrives. Idempotent."""
        if not self._gone.done():
            self._gone.set_result(None)
        if self._body is not None:
            self._body.end()

    def _next(self) -> float:
        return min(self._end, self._loop.time() + _SILENCE)


LEAST_RATE: Final = 100  # bytes per second, over `body_timeout`; slower readers are disconnected
MAX_BACKLOGGED: Final = 256  # connections with unread responses; above it, responses are not buffered
BURST_BYTES: Final = 16 << 20  # queued in one turn of the loop, before the kernel is asked to take any
_EVICTED_SHARE = 64  # 1/64 of the connections are evicted at once when there are too many


class IdleTimer:
    """Calls `expired` after `seconds` without a request. Postponing it costs no timer of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expired: Callable[[], None]) -> None:
        self._loop, self._seconds, self._expired = loop, seconds, expired
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<IdleTimer of {self._seconds:g} s>"

    def restart(self) -> None:
        """Count the time from now on; also after it has expired."""
        self.postpone(self._loop.time())
        if self._handle is None:
            self._handle = self._loop.call_at(self._due, self._look)

    def postpone(self, now: float) -> None:
        """Count the time from `now` on, on the loop's clock."""
        self._due = now + self._seconds

    def cancel(self) -> None:
        """End it: the client is gone."""
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        self._handle = None
        if self._loop.time() < self._due:
            self._handle = self._loop.call_at(self._due, self._look)
        else:
            self._expired()


class _Unread(Protocol):
    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that this process buffers for the client."""


class LimitedConnection(_Unread, Protocol):
    """What the limiter knows of a connection (`meshd.server.connection.Connection`)."""

    last_received: float
    head_since: float

    @property
    def is_evictable(self) -> bool:
        """Whether its client has all its responses."""

    @property
    def has_pending_request(self) -> bool:
        """Whether bytes of a request have arrived that the event loop will deliver."""

    def is_stalled(self, now: float, seconds: float, least: int) -> bool:
        """Whether in the last `seconds` the client read fewer than `least` bytes."""

    def time_out(self) -> None:
        """Close a connection whose request head does not end in time."""

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not read its response."""

    def force_close(self) -> None:
        """Close it once the client has read what is buffered."""


class ConnectionLimiter:
    """Watches the connections of one worker. Call `start` in the running loop, `stop` with the server."""

    def __init__(self, http: HttpSettings, limit: int) -> None:
        self._http, self.limit = http, limit
        self._connections: set[LimitedConnection] = set()
        self._unread: set[_Unread] = set()
        self._pruned_at = 0.0
        self._burst = 0
        self.flush_count = 0
        """Changes when queued data has been offered to the kernel."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ConnectionLimiter of {len(self._connections)} connections, at most {self.limit}>"

    @property
    def under_pressure(self) -> bool:
        """Whether so many clients leave responses unread that no more may be buffered for them."""
        if self._burst > BURST_BYTES:
            return True
        return len(self._unread) > MAX_BACKLOGGED and self._still_pressed()

    @property
    def linger_seconds(self) -> float:
        """Seconds for which a client may go on sending a refused body."""
        return self._http.body_timeout

    @property
    def max_head_bytes(self) -> int:
        """Maximum bytes of an incomplete request head. The limit for a complete head is half of it."""
        return 2 * self._http.max_header_bytes

    def start(self) -> None:
        """Begin to check the connections periodically."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """Stop checking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def admit_connection(self, connection: LimitedConnection) -> bool:
        """Admit a new connection; False if there is no room for it and none can be made."""
        if len(self._connections) >= self.limit and not self.evict_idle():
            metrics.http_turned_away.labels("full").inc()
            return False
        self._connections.add(connection)
        return True

    def forget_connection(self, connection: LimitedConnection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)
        self._unread.discard(connection)

    def response_queued(self, connection: _Unread, size: int) -> None:
        """Record that a response of `size` bytes was queued, which the client may not have read yet."""
        self._unread.add(connection)
        if not self._burst:
            asyncio.get_running_loop().call_soon(self._flushed)
        self._burst += size

    def _flushed(self) -> None:
        """Note that data queued in the last turn of the loop is in the kernel, or counts as unread now."""
        self._burst = 0
        self.flush_count += 1

    def evict_idle(self) -> bool:
        """Close the connections that have been idle longest, since their clients can reconnect without loss;
        not those whose next request has arrived, for it might be one that must not be sent twice. Those with
        unread responses come last and are cut, because they would not close. Returns whether any was closed.
        """
        idle = sorted(
            (c for c in self._connections if c.is_evictable),
            key=lambda c: (c.unsent_bytes > 0, c.last_received),
        )
        candidates = (connection for connection in idle if not connection.has_pending_request)
        chosen = list(islice(candidates, 1 + self.limit // _EVICTED_SHARE))
        for connection in chosen:
            metrics.http_turned_away.labels("idle").inc()
            self._connections.discard(connection)
            if connection.unsent_bytes:
                connection.abort_stalled()
            connection.force_close()
        return bool(chosen)

    def _still_pressed(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._pruned_at > 0.05:
            self._pruned_at = now
            self._unread = {connection for connection in self._unread if connection.unsent_bytes}
        return len(self._unread) > MAX_BACKLOGGED

    def _look_later(self) -> None:
        pause = min(5.0, self._http.head_timeout / 4, self._http.body_timeout / 4)
        self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        stall = self._http.body_timeout
        for connection in list(self._connections):
            if connection.head_since and now - connection.head_since > self._http.head_timeout:
                metrics.http_turned_away.labels("slow head").inc()
                connection.time_out()
            elif connection.is_stalled(now, stall, int(stall * LEAST_RATE)):
                metrics.http_turned_away.labels("stalled").inc()
                connection.abort_stalled()
        self._unread = {connection for connection in self._unread if connection.unsent_bytes}
        self._look_later()
