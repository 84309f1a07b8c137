"""Protection against misbehaving clients: connection limits, lingering close, malformed requests.

Law: the limiter scans all connections periodically and checks each new one at once; it never touches a
request that makes progress. The number of open connections and the bytes buffered for clients that do
not read stay below their limits. Lingering close (RFC 9112 §9.6): closing a socket with unread input
resets it, and the reset destroys the response. Input after an early response is therefore read and
dropped, bounded in time and in silence. The parser's own messages quote the input, so they are never
sent to the client.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.server.body_stream import MalformedBodyError
from meshd.server.http_parser import MalformedRequestError
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from meshd.config import HttpSettings
    from meshd.server.body_stream import BodyStream
    from meshd.server.connection import Connection


_TOO_LARGE: Final = 431  # RFC 6585 §5; S3's own table has 400 for the code


def malformed_request_error(error: Exception) -> tuple[S3Error, int]:
    """(error, status) for what could not be parsed, or a handler's failure."""
    if not isinstance(error, MalformedRequestError):
        return S3Error("InternalError"), 500
    if error.too_large:
        return S3Error("RequestHeaderSectionTooLarge"), _TOO_LARGE
    if error.request_line:
        return S3Error("BadRequest", "The request line is not valid HTTP."), 400
    return S3Error("BadRequest", "An error occurred when parsing the HTTP request."), 400


_SILENCE: Final = 5.0  # seconds without a byte: such a client has stopped sending, or is gone
_HURRIED: Final = 1.0  # seconds for those that still send when the node stops


class LingeringClose:
    """The rest of one body, dropped for at most `seconds`. Without a `body`, or when that turns out to be
    malformed, nobody knows where the rest ends: with the client, who is told of by `came` and
    `client_gone`."""

    def __init__(self, body: BodyStream | None, seconds: float) -> None:
        self._body, self._loop = body, asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._end = self._loop.time() + seconds
        self._limit = asyncio.timeout_at(self._next())

    def __repr__(self) -> str:
        return f"<Lingering for {self._end - self._loop.time():.1f} s at most, {self._body!r}>"

    async def drain_input(self) -> None:
        """Return when the body has ended, or nothing more is worth waiting for. Once only."""
        try:
            async with self._limit:
                if self._body is None or not await self._ends(self._body):
                    await self._gone
        except TimeoutError:
            metrics.http_turned_away.labels("refused body").inc()

    async def _ends(self, body: BodyStream) -> bool:
        """Read it; whether it came to an end."""
        try:
            while not body.complete:
                await body.read_available()
                self.data_arrived()
        except MalformedBodyError:
            return False
        return True

    def data_arrived(self) -> None:
        """The client has sent something."""
        if not self._limit.expired():
            self._limit.reschedule(self._next())

    def shorten(self) -> None:
        """End soon, whatever still comes. Idempotent."""
        self._end = min(self._end, self._loop.time() + _HURRIED)
        self.data_arrived()

    def client_closed(self) -> None:
        """Nothing comes any more. Idempotent."""
        if not self._gone.done():
            self._gone.set_result(None)
        if self._body is not None:
            self._body.end()

    def _next(self) -> float:
        return min(self._end, self._loop.time() + _SILENCE)


LEAST_RATE: Final = 100  # bytes a second, over `body_timeout`; a client that takes less is given up
MAX_BACKLOGGED: Final = 256  # connections with unread answers; with more, answers are no longer buffered
BURST_BYTES: Final = 16 << 20  # queued in one turn of the loop, before the kernel is asked to take any
_EVICTED_SHARE = 64  # of the connections, how many go at once when there are too many


class ConnectionLimiter:
    """Watches the connections of one worker; `start` it in the running loop, `stop` it with the server."""

    def __init__(self, http: HttpSettings, limit: int) -> None:
        self._http, self.limit = http, limit
        self._connections: set[Connection] = set()
        self._unread: set[Connection] = set()
        self._pruned_at = 0.0
        self._burst = 0
        self.flush_count = 0
        """Changes when what was queued has been offered to the kernel."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Guard of {len(self._connections)} connections, at most {self.limit}>"

    @property
    def under_pressure(self) -> bool:
        """Whether so many clients leave their answers unread that no more may be kept in memory for them."""
        if self._burst > BURST_BYTES:
            return True
        return len(self._unread) > MAX_BACKLOGGED and self._still_pressed()

    @property
    def linger_seconds(self) -> float:
        """Seconds for which a client may go on sending a body that was refused."""
        return self._http.body_timeout

    @property
    def max_head_bytes(self) -> int:
        """Bytes of a request's head whose end is waited for. One that is here in whole is judged by what it
        says, at half of it."""
        return 2 * self._http.max_header_bytes

    def start(self) -> None:
        """Begin to look at the connections every so often."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def admit_connection(self, connection: Connection) -> bool:
        """A client connected; False when there is no room for it and none can be made."""
        if len(self._connections) >= self.limit and not self.evict_idle():
            metrics.http_turned_away.labels("full").inc()
            return False
        self._connections.add(connection)
        return True

    def forget_connection(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.discard(connection)
        self._unread.discard(connection)

    def response_queued(self, connection: Connection, size: int) -> None:
        """An answer of `size` bytes was queued; remember who may not have taken all of it."""
        self._unread.add(connection)
        if not self._burst:
            asyncio.get_running_loop().call_soon(self._flushed)
        self._burst += size

    def _flushed(self) -> None:
        """What was queued in the last turn of the loop is with the kernel, or counts as unread now."""
        self._burst = 0
        self.flush_count += 1

    def evict_idle(self) -> bool:
        """Close the connections that have been idle longest: clients can connect again at no loss. Those with
        an answer partly unread come last, and are cut, for they would not close. Whether any was."""
        idle = sorted(
            (c for c in self._connections if c.is_evictable),
            key=lambda c: (c.unsent_bytes > 0, c.last_received),
        )
        chosen = idle[: 1 + self.limit // _EVICTED_SHARE]
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
