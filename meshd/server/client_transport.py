"""One client's transport: its address, the responses that are queued for it, and the way past that queue.

A response waits while the client does not read; nothing that was queued is overtaken by what is sent past
the queue.
"""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING

from meshd.server.direct_sender import DirectSender, is_encrypted, unsent_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.server.connection_limits import ConnectionLimiter

_ENCRYPTED_BACKLOG = 128 << 10  # bytes buffered for a slow client before encryption


class ClientTransport(asyncio.Protocol):
    """The part of a connection that requests and their responses know. `remote` is the client's address,
    `secure` whether it speaks TLS."""

    __slots__ = (
        "_at_once",
        "_drain_waiter",
        "_flushing",
        "_limiter",
        "_loop",
        "_reading_paused",
        "_request_count",
        "_unread_then",
        "_writing_paused",
        "_wrote_in",
        "moved",
        "on_closed",
        "on_lost",
        "remote",
        "secure",
        "transport",
    )

    def __init__(self, limiter: ConnectionLimiter, loop: asyncio.AbstractEventLoop) -> None:
        self._limiter, self._loop = limiter, loop
        self.transport: asyncio.Transport | None = None
        """None once the connection is closed, or closes as soon as its client has read what is buffered for
        it."""
        self.remote, self.secure = "", False
        self._flushing: asyncio.Transport | None = None
        self._writing_paused = self._reading_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self.moved = 0
        """Counts the bytes sent past the transport's own queue: the progress of a long response."""
        self._request_count = 0
        self._unread_then = (0.0, 0, 0, 0)
        self._wrote_in = -1
        self._at_once: DirectSender | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client is gone; set by code that waits for another node on its behalf."""
        self.on_closed: Callable[[], None] | None = None
        """Called when the client has closed at least its side; set by code whose result may be of use to
        nobody then."""

    def open_transport(self, transport: asyncio.Transport) -> None:
        """Begin to use the transport of a new connection."""
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.remote = str(peer[0]) if isinstance(peer, (list, tuple)) and peer else str(peer or "")
        # An IPv4 client of a socket that listens on `[::]`: policies and logs name it as any IPv4 client.
        self.remote = self.remote.removeprefix("::ffff:")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if is_encrypted(transport):
            self.secure = True
            transport.set_write_buffer_limits(high=_ENCRYPTED_BACKLOG)

    @property
    def has_unread_bytes(self) -> bool:
        """Whether the kernel holds bytes, from a client that is still there, that nobody has read yet."""
        sock = None if self.transport is None else self.transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        return any(events == select.POLLIN for _, events in poller.poll(0))

    def close_transport(self) -> None:
        """Close it once the client has read what is buffered. Idempotent."""
        transport, self.transport = self.transport, None
        if transport is not None:
            self._flushing = transport
            transport.close()

    def input_closed(self) -> None:
        """Note that the client has closed its side: killed clients do that."""
        when_closed, self.on_closed = self.on_closed, None
        if when_closed is not None:
            when_closed()

    def transport_lost(self) -> None:
        """Note that the client is gone."""
        self.input_closed()
        when_lost, self.on_lost = self.on_lost, None
        if when_lost is not None:
            when_lost()
        if self._at_once is not None:
            self._at_once.close()
        self.transport = self._flushing = None
        self.resume_writing()

    @property
    def tls(self) -> str:
        """The client's version of TLS, as `1.3`; empty without TLS, and once the connection is closed."""
        tls = None if self.transport is None else self.transport.get_extra_info("ssl_object")
        version = None if tls is None else tls.version()
        return "" if version is None else version.removeprefix("TLSv")

    @property
    def is_last_request(self) -> bool:
        """Whether the request being answered is the client's last one."""
        raise NotImplementedError

    @property
    def is_closing(self) -> bool:
        """Whether the connection closes after the present responses."""
        raise NotImplementedError

    # --- the queue ----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    async def drain(self) -> None:
        """Wait until the client has received most of what is buffered. Raises ConnectionResetError if it is
        gone."""
        if self._writing_paused and self.transport is not None:
            if self._drain_waiter is None or self._drain_waiter.done():
                self._drain_waiter = self._loop.create_future()
            await self._drain_waiter
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")

    def queue_response(self, data: bytes) -> None:
        """Queue a response, or the end of one. Raises ConnectionResetError if the client is gone."""
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")
        self.transport.write(data)
        self.wrote(len(data))

    def hold_reading(self, *, hold: bool) -> None:
        """Read nothing further from the client while `hold`."""
        transport = self.transport
        if hold == self._reading_paused or transport is None or transport.is_closing():
            return
        self._reading_paused = hold
        if hold:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def wrote(self, size: int) -> None:
        """Record that a response of `size` bytes was queued on the transport."""
        self._wrote_in = self._limiter.flush_count
        self._limiter.response_queued(self, size)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that this process buffers for the client."""
        transport = self.transport or self._flushing
        return 0 if transport is None else transport.get_write_buffer_size()

    @property
    def pressed(self) -> bool:
        """Whether responses should not be buffered in memory at present."""
        return self._limiter.under_pressure

    def is_stalled(self, now: float, seconds: float, least: int) -> bool:
        """Whether in the last `seconds` the client read fewer than `least` bytes of what is buffered for
        it."""
        transport = self.transport or self._flushing
        unread = 0 if transport is None else unsent_bytes_of(transport)
        since, then, moved, answers = self._unread_then
        fresh = not since or moved != self.moved or answers != self._request_count
        if not unread or fresh or (now - since > seconds and then - unread >= least):
            self._unread_then = (now if unread else 0.0, unread, self.moved, self._request_count)
            return False
        return now - since > seconds

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not read its response."""
        transport = self.transport or self._flushing
        if transport is not None:
            transport.abort()

    # --- past the queue -----------------------------------------------------------------------------------

    def past_the_queue(self) -> DirectSender | None:
        """Return the sender past the transport, if it can be used at this moment."""
        transport = self.transport
        # uvloop does not report what was queued in this turn of the loop: that must not be overtaken.
        if transport is None or self.secure or self._wrote_in == self._limiter.flush_count:
            return None
        if self._at_once is None:
            if DirectSender.open_count >= DirectSender.MAX_OPEN:
                return None
            self._at_once = DirectSender(transport)
        return self._at_once
