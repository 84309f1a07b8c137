"""The body of one request as it arrives: a bounded buffer between the connection and its handler.

The client is slowed down, by not reading from its socket, while more than 256 KiB wait for the handler. Bytes
come out once, in order; an error replaces the rest.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

HIGH_WATER: Final = 256 << 10  # waiting bytes above which the client is slowed down


class MalformedBodyError(Exception):
    """The framing of a body is broken, so its end is unknown."""


class BodyStream:
    """A body. `hold_client` is called with True when too much waits, and with False when it has been read."""

    __slots__ = (
        "_error",
        "_hold_client",
        "_holding",
        "_pieces",
        "_size",
        "_waiter",
        "complete",
        "received",
        "truncated",
    )

    def __init__(self, hold_client: Callable[[bool], None] | None = None) -> None:
        """Create a body. Without `hold_client` there is none: it is complete from the start."""
        self._hold_client, self._holding = hold_client, False
        self._pieces: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self.complete = hold_client is None
        """Whether nothing more arrives; parts may still be unread."""
        self.truncated = False
        """Whether the client closed its side before the body was complete."""
        self.received = 0
        """Bytes that have arrived."""

    def __repr__(self) -> str:
        return f"<BodyStream, {self.received} bytes received, {self._size} unread>"

    @property
    def exhausted(self) -> bool:
        """Whether all of it has been read."""
        return self.complete and not self._pieces and self._error is None

    def feed(self, data: bytes) -> None:
        """Add bytes that arrived; those of a failed body are dropped."""
        self.received += len(data)
        if self._error is not None:
            return
        self._pieces.append(data)
        self._size += len(data)
        self._wake()
        if self._size > HIGH_WATER and not self._holding and self._hold_client is not None:
            self._holding = True
            self._hold_client(True)

    def end(self) -> None:
        """Mark the body as complete, or ended early by its client. Idempotent."""
        self.complete = True
        self._wake()

    def truncate(self) -> None:
        """End it in the middle: the client has closed its side."""
        self.truncated = True
        self.end()

    def fail(self, error: BaseException) -> None:
        """Make reads raise `error`; a body that was read to its end stays as it is."""
        if self._error is None and not self.exhausted:
            self._take()
            self._error = error
            self._wake()

    def discard(self) -> None:
        """Drop the waiting bytes: nothing reads them any more."""
        self._take()

    def read_nowait(self) -> bytes:
        """Return the waiting bytes; empty if there are none. Raises the error of `fail`."""
        if self._error is not None:
            raise self._error
        return self._take()

    async def read_available(self) -> bytes:
        """Wait for bytes and return them; empty at the end. Raises the error of `fail`."""
        while not self._pieces and not self.complete and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.read_nowait()

    def _take(self) -> bytes:
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces, self._size = [], 0
        if self._holding and self._hold_client is not None:
            self._holding = False
            self._hold_client(False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


NO_BODY: Final = BodyStream()
