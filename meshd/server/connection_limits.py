"""Protection against slow and excessive clients: connection limits and the idle timeout.

Law: the limiter scans all connections periodically and checks each new one at once; it never touches a
request that makes progress.
Invariant: the number of open connections and the bytes buffered for clients that do not read stay below their
limits.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.config import HttpSettings

LEAST_RATE: Final = 100  # bytes per second, over `body_timeout`; slower readers are disconnected
MAX_BACKLOGGED: Final = 256  # connections with unread responses; above it, responses are not buffered
BURST_BYTES: Final = 16 << 20  # queued in one turn of the loop; above it, responses are not buffered
_EVICTED_SHARE: Final = 64  # 1/64 of the connections are evicted at once when there are too many
_PRUNE_SECONDS: Final = 0.05  # between two looks at which clients have read their responses


class IdleTimer:
    """Calls `expired` after `seconds` without a request. Postponing it sets no new timer in the event
    loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expired: Callable[[], None]) -> None:
        self._loop, self._seconds, self._expired = loop, seconds, expired
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<IdleTimer of {self._seconds:g} s>"

    def restart(self) -> None:
        """Count the time from now on. Also valid after the timer has expired."""
        self.postpone(self._loop.time())
        if self._handle is None:
            self._handle = self._loop.call_at(self._due, self._check)

    def postpone(self, now: float) -> None:
        """Count the time from `now` on, on the loop's clock."""
        self._due = now + self._seconds

    def cancel(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()

    def _check(self) -> None:
        self._handle = None
        if self._loop.time() < self._due:
            self._handle = self._loop.call_at(self._due, self._check)
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
        """Whether the client read fewer than `least` bytes in the last `seconds`."""

    def time_out(self) -> None:
        """Close a connection whose request head does not end in time."""

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not read its response."""

    def force_close(self) -> None:
        """Close the connection once the client has read what is buffered."""


class ConnectionLimiter:
    """Watches the connections of one worker. Call `start` in the running loop, `stop` with the server."""

    def __init__(self, http: HttpSettings, limit: int) -> None:
        self._http, self.limit = http, limit
        self._connections: set[LimitedConnection] = set()
        self._unread: set[_Unread] = set()
        self._pruned_at = 0.0
        self._burst = 0
        self.flush_count = 0
        """Increases whenever queued data has been offered to the kernel."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ConnectionLimiter of {len(self._connections)} connections, at most {self.limit}>"

    @property
    def under_pressure(self) -> bool:
        """Whether so many clients leave responses unread that no more may be buffered for them."""
        if self._burst > BURST_BYTES:
            return True
        if len(self._unread) > MAX_BACKLOGGED:
            now = asyncio.get_running_loop().time()
            if now - self._pruned_at > _PRUNE_SECONDS:
                self._pruned_at = now
                self._prune_unread()
        return len(self._unread) > MAX_BACKLOGGED

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
            self._schedule_scan()

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
        """Record that a response of `size` bytes was queued for a client."""
        self._unread.add(connection)
        if not self._burst:
            asyncio.get_running_loop().call_soon(self._start_turn)
        self._burst += size

    def _start_turn(self) -> None:
        """Start a new turn: the data queued in the last one is in the kernel by now, or counts as unread."""
        self._burst = 0
        self.flush_count += 1

    def evict_idle(self) -> bool:
        """Close the connections that have been idle longest, since their clients can reconnect without loss.

        Connections whose next request has arrived are spared: it may be one that must not be sent twice.
        Connections with unread responses come last, and are cut, because they would not close. Returns
        whether any was closed.
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

    def _prune_unread(self) -> None:
        self._unread = {connection for connection in self._unread if connection.unsent_bytes}

    def _schedule_scan(self) -> None:
        pause = min(5.0, self._http.head_timeout / 4, self._http.body_timeout / 4)
        self._timer = asyncio.get_running_loop().call_later(pause, self._scan)

    def _scan(self) -> None:
        """Cut the connections of clients that send their request head, or read their response, too slowly."""
        now = asyncio.get_running_loop().time()
        stall = self._http.body_timeout
        for connection in list(self._connections):
            if connection.head_since and now - connection.head_since > self._http.head_timeout:
                metrics.http_turned_away.labels("slow head").inc()
                connection.time_out()
            elif connection.is_stalled(now, stall, int(stall * LEAST_RATE)):
                metrics.http_turned_away.labels("stalled").inc()
                connection.abort_stalled()
        self._prune_unread()
        self._schedule_scan()
