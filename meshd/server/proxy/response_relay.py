"""Relays another node's response to the client as it arrives, with a fast path that needs no task.

Bytes move to the client in the callback that received them, or by splice when both sockets are plain and much
is left. A slow client slows down the other node. The fast path serves only requests that are safe to repeat:
if no byte of a response came, the request takes the regular path. Either nothing of a response is sent, or
all of it, or the client's connection is cut.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from meshd.rpc.http_connection import duplicate_socket
from meshd.rpc.peer_client import PeerUnreachableError
from meshd.server.direct_sender import is_encrypted
from meshd.server.proxy.hops import is_peer_status
from meshd.server.proxy.splice import Splice
from meshd.server.request import CLIENT_GONE
from meshd.server.response_body import PendingResponse
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.rpc.http_connection import HttpConnection, ResponseHead
    from meshd.server.direct_sender import DirectSender
    from meshd.server.request import RequestTrace


_SPLICED: Final = 96 << 10  # below this, splicing is not worthwhile
_HIGH: Final = 256 << 10  # bytes queued for the client above which the other node is slowed down
_IDLE_SECONDS: Final = 120.0  # a client that reads nothing for this time is disconnected
_SILENCE: Final = 60.0  # seconds of silence from a node in the middle of a response
_HOP_BY_HOP = (b"connection", b"keep-alive")


class ResponseRelay:
    """Relays one response. `protocol` is the client's connection; `connection` returns, at the last moment,
    the value of the Connection header. `outcome` is set once: None if the whole response was sent, the head
    of a response that must not be sent (`kept_back` decides), or the error if none came or it broke off."""

    def __init__(
        self,
        protocol: Any,
        wire: HttpConnection,
        connection: Callable[[], str],
        kept_back: Callable[[ResponseHead], bool],
    ) -> None:
        self._protocol, self._wire = protocol, wire
        self._connection, self._kept_back = connection, kept_back
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[ResponseHead | None] = self._loop.create_future()
        self.body_requested: asyncio.Future[bool] = self._loop.create_future()
        """Whether the other node asks for the request's body."""
        self.head: ResponseHead | None = None
        """The head of the response that is being relayed."""
        self.sent = 0
        """Bytes of its body that were relayed."""
        self.closes_connection = False
        """Whether the client's connection must be closed after it."""
        self.aborted_by_peer = False
        """Whether the other node broke off after a part was sent."""
        self._chunked = False
        self._early: bytes | None = None  # data to send before the rest is spliced
        self._helper: asyncio.Task[None] | None = None
        self._pump: Splice | None = None
        self._own: socket.socket | None = None
        self._dropping: ResponseHead | None = None

    def __repr__(self) -> str:
        return f"<ResponseRelay from {self._wire!r}, {self.sent} bytes sent>"

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._stop()
        if not self.outcome.done():
            self.outcome.cancel()
            self._wire.abort()

    def fail(self, error: Exception) -> None:
        """Fail with `error`; a partly sent response is cut."""
        if self.outcome.done():
            return
        self._wire.abort()
        self._fail(error)

    # --- called by the other node's connection --------------------------------------------------------

    def on_continue(self) -> None:
        if not self.body_requested.done():
            self.body_requested.set_result(True)

    def on_head(self, head: ResponseHead) -> None:
        if not self.body_requested.done():
            self.body_requested.set_result(False)
        if self.outcome.done():
            self._wire.abort()
            return
        if self._kept_back(head):
            self._dropping = head
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            self.fail(_client_gone())
            return
        self.head = head
        self._wire.patience = _SILENCE
        word = self._connection()
        self._chunked = head.length is None
        if self._chunked:  # it ends with the connection: rare, and valid for every client
            word = "close"
        self.closes_connection = word == "close"
        text = _rewritten(head, word)
        if head.length is not None and head.length >= _SPLICED and not self._is_encrypted(transport):
            self._early = text
            self._wire.pause()
            self._loop.call_soon(self._splice)
        else:
            self._write(transport, text)

    def on_body(self, data: bytes) -> None:
        if self._dropping is not None:
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            self.fail(_client_gone())
            return
        self.sent += len(data)
        if self._early is not None:
            self._early += data
            return
        self._write(transport, data)
        if self._wire.body_left and self._helper is None and transport.get_write_buffer_size() > _HIGH:
            self._wire.pause()
            self._helper = self._loop.create_task(self._await_client())

    def on_end(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(self._dropping)

    def on_error(self, error: PeerUnreachableError) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._stop()
        if not self.body_requested.done():
            self.body_requested.set_result(False)
        if self.outcome.done():
            return
        self.outcome.set_exception(error)
        self.outcome.exception()  # marks it as retrieved, since there may be no waiter
        if self.head is not None:
            self.aborted_by_peer = isinstance(error, PeerUnreachableError)
            if self._protocol.transport is not None:
                self._protocol.transport.abort()

    def _stop(self) -> None:
        """Stop moving data. Idempotent."""
        helper, self._helper = self._helper, None
        if helper is not None and helper is not asyncio.current_task():
            helper.cancel()
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.close()
            self.sent += pump.bytes_sent
        own, self._own = self._own, None
        if own is not None:
            own.close()

    # --- slow clients, large responses ------------------------------------------------------------------

    def _is_encrypted(self, transport: asyncio.Transport) -> bool:
        other = self._wire.transport
        return is_encrypted(transport) or other is None or is_encrypted(other)

    async def _await_client(self) -> None:
        """Wait until the client has read most of what is queued."""
        try:
            async with timeout(_IDLE_SECONDS):
                await self._protocol.drain()
        except (ConnectionError, TimeoutError) as error:
            self.fail(error)
        else:
            self._helper = None
            self._wire.resume()

    def _splice(self) -> None:
        """Send the data at hand past the transport's queue, and splice the rest."""
        early, self._early = self._early, None
        if self.outcome.done() or early is None:
            return
        transport, past = self._protocol.transport, self._protocol.past_the_queue()
        if transport is None or transport.is_closing():
            self.fail(_client_gone())
            return
        if past is not None and not transport.get_write_buffer_size():
            try:
                with suppress(BlockingIOError):
                    early = early[past.sock.send(early, socket.MSG_MORE) :]
            except OSError as error:
                self.fail(error)
                return
        if early:
            self._write(transport, early)
            self._helper = self._loop.create_task(self._splice_behind(transport))
        else:
            self._start(past)

    async def _splice_behind(self, transport: asyncio.Transport) -> None:
        """Wait until the queue for the client is empty, since spliced data overtakes it; then splice."""
        try:
            await asyncio.sleep(0)  # uvloop queues data of this turn in the next one
            if transport.get_write_buffer_size():
                low, high = transport.get_write_buffer_limits()
                transport.set_write_buffer_limits(high=0)
                try:
                    async with timeout(_IDLE_SECONDS):
                        await self._protocol.drain()
                finally:
                    transport.set_write_buffer_limits(high=high, low=low)
        except (OSError, TimeoutError) as error:
            self.fail(error)
        else:
            self._helper = None
            self._start(self._protocol.past_the_queue())

    def _start(self, past: DirectSender | None) -> None:
        transport = self._protocol.transport
        try:
            if transport is None:
                raise _client_gone()
            if past is None:
                self._own = duplicate_socket(transport)
            drain = past.sock if past is not None else self._own
            assert drain is not None
            self._pump = Splice(
                self._wire.side_socket(), drain, self._wire.body_left, self._count_moved, self._end_splice
            )
        except OSError as error:
            self.fail(error)
        else:
            self._pump.start()

    def _end_splice(self, error: Exception | None) -> None:
        self._stop()
        if error is not None:
            self.fail(error)
            return
        self._wire.resume()
        self._wire.body_spliced(self._wire.body_left)

    def _count_moved(self) -> None:
        self._protocol.moved += 1

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        transport.write(data)
        self._protocol.wrote(len(data))


def _client_gone() -> ConnectionResetError:
    return ConnectionResetError("the client closed the connection")


def _rewritten(head: ResponseHead, connection: str) -> bytes:
    """Return the head as received, except for headers about its own connection."""
    raw = head.raw
    if "connection" in head.headers or "keep-alive" in head.headers or "transfer-encoding" in head.headers:
        lines = raw[:-4].split(b"\r\n")
        dropped = (*_HOP_BY_HOP, b"transfer-encoding")
        kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
        raw = b"\r\n".join(kept) + b"\r\n\r\n"
    if connection:
        raw = raw[:-2] + f"Connection: {connection}\r\n\r\n".encode()
    return raw


_FIRST_BYTE: Final = 2.0  # seconds of silence before the request takes the regular path


class ProxiedResponse(PendingResponse):
    """Proxies `data`, the client's only request, received on `protocol`. `ended` is called once, in a turn of
    the loop of its own, when the response was sent, none came, or the client is gone; before that, if none
    came, `unanswered`."""

    def __init__(
        self,
        protocol: Any,
        wire: HttpConnection,
        data: bytes,
        trace: RequestTrace,
        ended: Callable[[ProxiedResponse], None],
        unanswered: Callable[[], None],
    ) -> None:
        super().__init__(protocol, data)
        self._wire, self._trace, self._ended, self._unanswered = wire, trace, ended, unanswered
        self.relay = ResponseRelay(protocol, wire, self._word, is_peer_status)

    def __repr__(self) -> str:
        return f"<ProxiedResponse {self.relay!r}, {len(self.held)} bytes held>"

    @property
    def response_started(self) -> bool:
        return self.relay.head is not None

    @property
    def closes_connection(self) -> bool:
        return self.relay.closes_connection

    def start(self, sent: bytes, *, head_only: bool) -> None:
        """Send `sent` to the other node."""
        self.relay.outcome.add_done_callback(self._on_done)
        self._wire.send_request(self.relay, sent, patience=_FIRST_BYTE, head_only=head_only)

    def _word(self) -> str:
        return "close" if self.is_last and not self.held else ""

    def _on_done(self, _: asyncio.Future[Any]) -> None:
        transport, trace, head = self._protocol.transport, self._trace, self.relay.head
        trace.sent += self.relay.sent
        gone = transport is None or transport.is_closing()
        if head is None and not gone:
            trace.suspend()
            self._unanswered()
        else:
            trace.finish(CLIENT_GONE if gone or head is None else head.status, later=True)
        if head is not None:
            metrics.forwarded.labels("broken" if self.relay.aborted_by_peer else "answered").inc()
        if not gone:
            self._read_on()
        self._ended(self)
