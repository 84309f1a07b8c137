"""What a worker does against clients that cost more than they bring: too many, too slow, or silent.

Law: looks at all connections now and then and at a new one at once; never touches a request that makes
progress. Invariant: open connections stay below the limit, and so does what is buffered for clients that do
not read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.config import HttpSettings
    from meshd.web.connections import Connection


LEAST_RATE: Final = 100  # bytes a second, over `body_timeout`; a client that takes less is given up
BACKLOGGED: Final = 256  # connections with unread answers; with more, answers are no longer buffered
BURST_BYTES: Final = 16 << 20  # queued in one turn of the loop, before the kernel is asked to take any
_EVICTED_SHARE = 64  # of the connections, how many go at once when there are too many


class Guard:
    """Watches the connections of one worker; `start` it in the running loop, `stop` it with the server."""

    def __init__(self, http: HttpSettings, limit: int) -> None:
        self._http, self.limit = http, limit
        self._connections: set[Connection] = set()
        self._unread: set[Connection] = set()
        self._pruned_at = 0.0
        self._burst = 0
        self.turn = 0
        """Changes when what was queued has been offered to the kernel."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Guard of {len(self._connections)} connections, at most {self.limit}>"

    @property
    def pressed(self) -> bool:
        """Whether so many clients leave their answers unread that no more may be kept in memory for them."""
        if self._burst > BURST_BYTES:
            return True
        return len(self._unread) > BACKLOGGED and self._still_pressed()

    @property
    def patience(self) -> float:
        """Seconds for which a client may go on sending a body that was refused."""
        return self._http.body_timeout

    @property
    def longest_head(self) -> int:
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

    def entered(self, connection: Connection) -> bool:
        """A client connected; False when there is no room for it and none can be made."""
        if len(self._connections) >= self.limit and not self.make_room():
            metrics.http_turned_away.labels("full").inc()
            return False
        self._connections.add(connection)
        return True

    def left(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.discard(connection)
        self._unread.discard(connection)

    def wrote(self, connection: Connection, size: int) -> None:
        """An answer of `size` bytes was queued; remember who may not have taken all of it."""
        self._unread.add(connection)
        if not self._burst:
            asyncio.get_running_loop().call_soon(self._flushed)
        self._burst += size

    def _flushed(self) -> None:
        """What was queued in the last turn of the loop is with the kernel, or counts as unread now."""
        self._burst = 0
        self.turn += 1

    def make_room(self) -> bool:
        """Close the connections that have been idle longest: clients can connect again at no loss. Those with
        an answer partly unread come last, and are cut, for they would not close. Whether any was."""
        idle = sorted((c for c in self._connections if c.can_go), key=lambda c: (c.unread > 0, c.touched))
        chosen = idle[: 1 + self.limit // _EVICTED_SHARE]
        for connection in chosen:
            metrics.http_turned_away.labels("idle").inc()
            self._connections.discard(connection)
            if connection.unread:
                connection.give_up()
            connection.force_close()
        return bool(chosen)

    def _still_pressed(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._pruned_at > 0.05:
            self._pruned_at = now
            self._unread = {connection for connection in self._unread if connection.unread}
        return len(self._unread) > BACKLOGGED

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
                connection.give_up()
        self._unread = {connection for connection in self._unread if connection.unread}
        self._look_later()
