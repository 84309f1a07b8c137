"""One HTTP/1.1 connection to a peer: requests out as bytes, responses in as they arrive.

One exchange at a time. Data is passed on in the callback that received it, and nothing is buffered. Every
exchange ends exactly once, with `on_end` or `on_error`. A connection is reused only after a response whose
end was certain.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_HEAD = 96 << 10
_HEAD_ROOM = 16 << 10  # bytes per read of a head: the body may be read by other means
_BODY_ROOM = 256 << 10
_MAX_DIGITS = 18  # of a content length
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[^\r\n]*)?\r\n")


class PeerUnreachableError(MeshdError):
    """A node did not answer: the connection was refused, reset or silent, or the response was not HTTP.
    `begun`: bytes of the request were sent, so it may have been carried out."""

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class ResponseHead(msgspec.Struct, frozen=True):
    """`raw` is the head as received, including its empty line; header names are lower-case. `length` is that
    of the body in bytes; None: the body ends with its last chunk, or with the connection."""

    status: int
    headers: Mapping[str, str]
    length: int | None
    raw: bytes


class ResponseHandler(Protocol):
    """Receives one response. Called from the connection's callbacks: must neither wait nor raise."""

    def on_continue(self) -> None:
        """100 Continue: send the body."""

    def on_head(self, head: ResponseHead) -> None:
        """The head has arrived; `on_body` follows for the body, then `on_end`."""

    def on_body(self, data: bytes) -> None:
        """More of the body."""

    def on_end(self) -> None:
        """The response is complete; the connection is free."""

    def on_error(self, error: PeerUnreachableError) -> None:
        """The response failed; nothing more follows."""


class _ReceiveBuffer(threading.local):
    """The buffer into which a thread's connections read; data is passed on before the next read."""

    def __init__(self) -> None:
        self.body = memoryview(bytearray(_BODY_ROOM))
        self.head = self.body[:_HEAD_ROOM]


_receive_buffer = _ReceiveBuffer()


class HttpConnection(asyncio.BufferedProtocol):
    """A connection to a peer. Created by `asyncio`; `send_request` begins an exchange."""

    def __init__(self, name: str, when_free: Callable[[HttpConnection], None] | None = None) -> None:
        self._name, self._when_free = name, when_free
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._exchange: ResponseHandler | None = None
        self._held = b""
        self._left = -2  # bytes of the body; -1 chunked, -2 no body yet, -3 until the connection ends
        self._chunk = 0
        self._head_only = False
        self._keep = True
        self._room: asyncio.Future[None] | None = None
        self._full = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.patience = 0.0
        self.sending = False
        """Whether this side still has to send parts of the request's body; the peer then does not count as
        silent."""
        self._owes = False  # the end of an announced body has not been sent
        self.last_activity = self._loop.time()
        """When data was last received or sent, on the loop's clock."""
        self.uses = 0
        self._beside: socket.socket | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self._exchange else "free"
        return f"<HttpConnection to {self._name}, {state}, {self.uses} uses>"

    # --- lifetime -----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def side_socket(self) -> socket.socket:
        """Return a second, non-blocking socket of the connection, for data that is moved without this object
        while it is paused; closed together with it. Raises ConnectionResetError."""
        if self._beside is None:
            if self._transport is None:
                raise ConnectionResetError(f"{self._name} closed the connection")
            self._beside = duplicate_socket(self._transport)
        return self._beside

    @property
    def body_left(self) -> int:
        """Bytes of the current response's body that have not arrived; negative if unknown."""
        return self._left

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self.resume_writing()
        if self._exchange is not None:
            if self._left == -3 and exc is None:
                self._finish()
            else:
                self._break(f"{self._name} closed the connection" if exc is None else f"{self._name}: {exc}")
        beside, self._beside = self._beside, None
        if beside is not None:  # its user has been notified
            beside.close()

    def abort(self) -> None:
        """Close the connection at once. Idempotent; the handler gets no further calls."""
        self._exchange = None
        self._unwatch()
        if self._transport is not None:
            self._transport.abort()

    # --- requests -----------------------------------------------------------------------------------

    def send_request(
        self,
        exchange: ResponseHandler,
        head: bytes,
        *,
        patience: float,
        head_only: bool = False,
        more: bool = False,
    ) -> None:
        """Send a request's head, and its body if `head` contains it; with `more`, `send_body` and
        `finish_body` follow. `patience`: seconds of silence until the peer is given up. `head_only`: a HEAD,
        whose response has no body."""
        assert self._exchange is None, "one exchange at a time"
        self._exchange, self._head_only = exchange, head_only
        self._left, self._held, self._keep, self.sending = -2, b"", True, False
        self._owes = more
        self.uses += 1
        self.last_activity = self._loop.time()
        self.patience = patience
        if self._transport is None or self._transport.is_closing():
            self._loop.call_soon(self._break, f"{self._name} closed the connection", False)
            return
        self._transport.write(head)
        self._timer = self._loop.call_later(patience, self._look)

    def send_body(self, data: bytes | bytearray | memoryview) -> None:
        """Send more of the request's body. Raises PeerUnreachableError."""
        if self._transport is None or self._transport.is_closing():
            raise PeerUnreachableError(f"{self._name} closed the connection", begun=True)
        self.last_activity = self._loop.time()
        self._transport.write(data)

    def finish_body(self) -> None:
        """Mark the request's body as complete. Without this the connection is not reused: the peer would take
        a next request for the rest of the body."""
        self._owes = self.sending = False

    async def drain(self) -> None:
        """Wait until the peer has received most of what was sent. Also returns when the connection is
        lost."""
        if self._full and self._transport is not None:
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.shield(self._room)
            self.last_activity = self._loop.time()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    # --- responses ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop reading from the peer until `resume`."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.last_activity = self._loop.time()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def body_spliced(self, count: int) -> None:
        """Record that `count` bytes of the body were read from the socket directly. The response ends when
        none are left."""
        self._left -= count
        self.last_activity = self._loop.time()
        if not self._left:
            self._finish()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _receive_buffer.head if self._left == -2 else _receive_buffer.body

    def buffer_updated(self, nbytes: int) -> None:
        self._came(bytes(self.get_buffer(nbytes)[:nbytes]))

    def _came(self, data: bytes) -> None:
        self.last_activity = self._loop.time()
        exchange = self._exchange
        if exchange is None:  # unrequested data: do not use this connection any more
            self.abort()
            return
        if self._left > len(data) and not self._held:
            self._left -= len(data)
            exchange.on_body(data)
            return
        self._held = self._held + data if self._held else data
        try:
            self._read()
        except _BadResponseError as error:
            self._break(f"{self._name} sent an invalid HTTP response: {error}")

    def eof_received(self) -> bool:
        return False

    def _read(self) -> None:
        while self._exchange is not None:
            if self._left == -2:
                if not self._read_head():
                    return
            elif self._left == -3:
                self._hand_on(len(self._held))
                return
            elif self._left == -1:
                if not self._read_chunk():
                    return
            else:
                taken = min(len(self._held), self._left)
                self._left -= taken
                left = self._left
                self._hand_on(taken)
                if left:
                    return
                self._finish()
        if self._held:  # more data than one response
            self.abort()

    def _hand_on(self, count: int) -> None:
        if not count:
            return
        piece = self._held if count == len(self._held) else self._held[:count]
        self._held = b"" if count == len(self._held) else self._held[count:]
        if self._exchange is not None:
            self._exchange.on_body(piece)

    def _read_head(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > _MAX_HEAD:
                raise _BadResponseError("the head is too long")
            return False
        raw, self._held = self._held[: end + 4], self._held[end + 4 :]
        status, headers = _parse(raw)
        exchange = self._exchange
        assert exchange is not None
        if status < 200:
            if status == 100:
                exchange.on_continue()
            return bool(self._held)
        self._keep = headers.get("connection", "").lower() != "close"
        self._left = self._body_of(status, headers)
        length = self._left if self._left >= 0 else None
        nothing = self._left == 0
        exchange.on_head(ResponseHead(status, headers, length, raw))
        if nothing:
            self._finish()
        return True

    def _body_of(self, status: int, headers: Mapping[str, str]) -> int:
        """Return how the body ends (RFC 9112 §6.3)."""
        if self._head_only or status in (204, 304):
            return 0
        coding = headers.get("transfer-encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise _BadResponseError("unknown transfer coding")
            self._chunk = 0
            return -1
        length = headers.get("content-length")
        if length is None:
            self._keep = False
            return -3
        if not (length.isascii() and length.isdigit() and len(length) <= _MAX_DIGITS):
            raise _BadResponseError("the content length is not a number")
        return int(length)

    def _read_chunk(self) -> bool:
        """Read from a chunked body; return whether more may be read now."""
        if self._chunk > 0:
            taken = min(self._chunk, len(self._held))
            self._chunk -= taken
            self._hand_on(taken)
            if not self._chunk:
                self._chunk = -2  # the line end after it
            return bool(self._held)
        if self._chunk == -2:
            if len(self._held) < 2:
                return False
            if self._held[:2] != b"\r\n":
                raise _BadResponseError("a chunk without a line end")
            self._held, self._chunk = self._held[2:], 0
        if self._chunk == -3:
            if len(self._held) < 2:
                return False
            if self._held[:2] != b"\r\n":
                raise _BadResponseError("trailers")
            self._held = self._held[2:]
            self._finish()
            return False
        match = _CHUNK.match(self._held)
        if match is None:
            if len(self._held) > 1024:
                raise _BadResponseError("a chunk without a size")
            return False
        self._held = self._held[match.end() :]
        self._chunk = int(match[1], 16) or -3
        return True

    def _finish(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._left = -2
        self._unwatch()
        if not self._keep or self._held or self._paused or self._owes:
            self.abort()
        if exchange is not None:
            exchange.on_end()
        if self._when_free is not None and not self.closed:
            self._when_free(self)

    def _break(self, why: str, begun: bool = True) -> None:
        exchange, self._exchange = self._exchange, None
        self._unwatch()
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.on_error(PeerUnreachableError(why, begun=begun))

    def _look(self) -> None:
        """Fail if the peer has been silent for too long, except while this side keeps it waiting."""
        now = self._loop.time()
        if self._paused or (self.sending and not self._full):
            self.last_activity = now
        due = self.last_activity + self.patience
        if now >= due:
            self._break(f"{self._name} was silent for {self.patience:g} s")
        elif self._exchange is not None:
            self._timer = self._loop.call_at(due, self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _BadResponseError(Exception):
    """The received data is not an HTTP/1.1 response."""


def duplicate_socket(transport: asyncio.BaseTransport) -> socket.socket:
    """Return a second, non-blocking socket of a connection; the caller closes it. Raises
    ConnectionResetError."""
    original = transport.get_extra_info("socket")
    if original is None:
        raise ConnectionResetError("the connection is closed")
    second = socket.socket(original.family, original.type, original.proto, fileno=os.dup(original.fileno()))
    second.setblocking(False)
    return second


def _parse(raw: bytes) -> tuple[int, dict[str, str]]:
    line, *lines = raw[:-4].split(b"\r\n")
    match = _STATUS.match(line)
    if match is None:
        raise _BadResponseError("no status line")
    headers: dict[str, str] = {}
    for field in lines:
        name, colon, value = field.decode("utf-8", "surrogateescape").partition(":")
        if not colon or name != name.strip():
            raise _BadResponseError("an invalid header line")
        lower, text = name.lower(), value.strip(" \t")
        headers[lower] = f"{headers[lower]},{text}" if lower in headers else text
    return int(match[1]), headers
