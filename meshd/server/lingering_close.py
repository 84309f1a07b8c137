"""Lingering close: reads and drops a client's remaining input after an early response (RFC 9112 §9.6).

Closing a socket with unread input resets the connection, and the reset destroys the response. So the input is
read first, for a bounded time and while the client is not silent for long.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.server.body_stream import MalformedBodyError
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout_at

if TYPE_CHECKING:
    from meshd.server.body_stream import BodyStream

_SILENCE: Final = 5.0  # seconds without a byte, after which a client counts as gone
_SHORTENED: Final = 1.0  # seconds for clients that still send when the node stops


class LingeringClose:
    """Drops the rest of a request body for at most `seconds`. Without a `body`, or if it turns out to be
    malformed, the end of the input is unknown, and input is dropped until the client closes the connection.
    The connection reports input with `data_arrived` and its end with `client_closed`."""

    def __init__(self, body: BodyStream | None, seconds: float) -> None:
        self._body, self._loop = body, asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._end = self._loop.time() + seconds
        self._limit = timeout_at(self._deadline())

    def __repr__(self) -> str:
        return f"<LingeringClose for {self._end - self._loop.time():.1f} s at most, {self._body!r}>"

    async def drain_input(self) -> None:
        """Return when the input has ended, the client is silent, or the time is over. Call it once."""
        try:
            async with self._limit:
                if self._body is None or not await self._drain_body(self._body):
                    await self._gone
        except TimeoutError:
            metrics.http_turned_away.labels("refused body").inc()

    async def _drain_body(self, body: BodyStream) -> bool:
        """Drop the rest of the body; return False if it is malformed."""
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
            self._limit.reschedule(self._deadline())

    def shorten(self) -> None:
        """End soon, even if input still arrives. Idempotent."""
        self._end = min(self._end, self._loop.time() + _SHORTENED)
        self.data_arrived()

    def client_closed(self) -> None:
        """Note that nothing more arrives. Idempotent."""
        if not self._gone.done():
            self._gone.set_result(None)
        if self._body is not None:
            self._body.end()

    def _deadline(self) -> float:
        return min(self._end, self._loop.time() + _SILENCE)
