"""What a client still sends when its answer is out: read and dropped, so that it comes to read the answer.

Law: a connection that is closed while bytes of its client are unread is reset, and a reset takes the answer
from clients that send all before they read (RFC 9112 §9.6). Bounded in time and by silence; what is held in
memory is what the body's buffer takes, as before the answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp.web_protocol import RequestPayloadError

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from aiohttp.streams import StreamReader

_SILENCE: Final = 5.0  # seconds without a byte: such a client has stopped sending, or is gone
_HURRIED: Final = 1.0  # seconds for those that still send when the node stops


class Lingering:
    """The rest of one body, dropped for at most `seconds`. Without a `body`, or when that turns out to be
    malformed, nobody knows where the rest ends: with the client, who is told of by `came` and
    `client_gone`."""

    def __init__(self, body: StreamReader | None, seconds: float) -> None:
        self._body, self._loop = body, asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._end = self._loop.time() + seconds
        self._limit = asyncio.timeout_at(self._next())

    def __repr__(self) -> str:
        return f"<Lingering for {self._end - self._loop.time():.1f} s at most, {self._body!r}>"

    async def drop(self) -> None:
        """Return when the body has ended, or nothing more is worth waiting for. Once only."""
        try:
            async with self._limit:
                if self._body is None or not await self._ends(self._body):
                    await self._gone
        except TimeoutError:
            metrics.http_turned_away.labels("refused body").inc()

    async def _ends(self, body: StreamReader) -> bool:
        """Read it; whether it came to an end."""
        try:
            while not body.is_eof():
                await body.readany()
                self.came()
        except RequestPayloadError:
            return False
        return True

    def came(self) -> None:
        """The client has sent something."""
        if not self._limit.expired():
            self._limit.reschedule(self._next())

    def hurry(self) -> None:
        """End soon, whatever still comes. Idempotent."""
        self._end = min(self._end, self._loop.time() + _HURRIED)
        self.came()

    def client_gone(self) -> None:
        """Nothing comes any more. Idempotent."""
        if not self._gone.done():
            self._gone.set_result(None)
        if self._body is not None and not self._body.is_eof():
            self._body.feed_eof()

    def _next(self) -> float:
        return min(self._end, self._loop.time() + _SILENCE)
