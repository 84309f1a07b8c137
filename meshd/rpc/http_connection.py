"""One HTTP/1.1 connection to a peer: requests out as bytes, responses in as they arrive.

Law: one exchange at a time; data is passed on in the callback that received it, and nothing is buffered.
Invariant: every exchange ends exactly once, with `on_end` or `on_error`, and a connection is reused only
after a response whose end was certain.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_HEAD = 96 << 10
_HEAD_ROOM = 16 << 10  # bytes read at a time while a head is awaited: the rest may be taken otherwise
_BODY_ROOM = 256 << 10
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [^\r\n]*)?\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[^\r\n]*)?\r\n")


class PeerUnreachableError(MeshdError):
    """A node did not answer: refused, reset, silent, or with something that is no HTTP. `begun`: bytes of the
    request were sent, so that it may have been carried out."""

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`raw` is the head as it came, its empty line included; header names are lower-case. `length` of the
    body in bytes; None: it ends with its last chunk, or with the connection."""

    status: int
    headers: Mapping[str, str]
    length: int | None
    raw: bytes


class ResponseHandler(Protocol):
    """Hears of one request's answer. Called from the connection's callbacks: must neither wait nor raise."""

    def on_continue(self) -> None:
        """100 Continue: the body is wanted."""

    def on_head(self, head: ResponseHead) -> None:
        """The head is here; `came` follows for the body, then `ended`."""

    def on_body(self, data: bytes) -> None:
        """More of the body."""

    def on_end(self) -> None:
        """The answer is whole; the connection is free."""

    def on_error(self, error: PeerUnreachableError) -> None:
        """No more will come."""


class _ReceiveBuffer(threading.local):
    """Where a thread's connections read into: what came is handed on before the next read."""

    def __init__(self) -> None:
        self.body = memoryview(bytearray(_BODY_ROOM))
        self.head = self.body[:_HEAD_ROOM]


_receive_buffer = _ReceiveBuffer()


class HttpConnection(asyncio.BufferedProtocol):
    """A connection to a peer. Made by `asyncio`; `start` begins an exchange."""

    def __init__(self, name: str, when_free: Callable[[HttpConnection], None] | None = None) -> None:
        self._name, self._when_free = name, when_free
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._exchange: ResponseHandler | None = None
        self._held = b""
        self._left = -2  # of the body: bytes, -1 in chunks, -2 no body yet, -3 until the connection ends
        self._chunk = 0
        self._head_only = False
        self._keep = True
        self._room: asyncio.Future[None] | None = None
        self._full = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.patience = 0.0
        self.sending = False
        """Whether more of the request's body is to come from this side: then the peer is not silent."""
        self._owes = False  # a body was announced whose end did not go out
        self.last_activity = self._loop.time()
        """When something last came or was sent, on the loop's clock."""
        self.uses = 0
        self._beside: socket.socket | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self._exchange else "free"
        return f"<Wire to {self._name}, {state}, {self.uses} uses>"

    # --- its life -----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def side_socket(self) -> socket.socket:
        """A second socket of the connection, non-blocking, for what is moved past this object while it is
        paused; closed with it. Raises ConnectionResetError."""
        if self._beside is None:
            if self._transport is None:
                raise ConnectionResetError(f"{self._name} closed the connection")
            self._beside = duplicate_socket(self._transport)
        return self._beside

    @property
    def body_left(self) -> int:
        """Bytes of the present answer that are still to come; negative when that is not known."""
        return self._left

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self.resume_writing()
        if self._exchange is not None:
            if self._left == -3 and exc is None:
                self._finish()
            else:
                self._break(f"{self._name} closed the connection" if exc is None else f"{self._name}: {exc}")
        beside, self._beside = self._beside, None
        if beside is not None:  # whoever moved something past this object has been told
            beside.close()

    def abort(self) -> None:
        """Ends the connection at once. Idempotent; the exchange hears no more."""
        self._exchange = None
        self._unwatch()
        if self._transport is not None:
            self._transport.abort()

    # --- asking -------------------------------------------------------------------------------------

    def send_request(
        self,
        exchange: ResponseHandler,
        head: bytes,
        *,
        patience: float,
        head_only: bool = False,
        more: bool = False,
    ) -> None:
        """Send a request's head, and its body if it is in `head`; if there is `more` of it, `send` and
        `sent_all` follow. `patience`: seconds of silence until the peer is given up; `head_only`: a HEAD,
        whose answer has no body."""
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
        """More of the request's body. Raises PeerUnreachableError."""
        if self._transport is None or self._transport.is_closing():
            raise PeerUnreachableError(f"{self._name} closed the connection", begun=True)
        self.last_activity = self._loop.time()
        self._transport.write(data)

    def finish_body(self) -> None:
        """The request's body went out to its end. Without this the connection serves no other request: the
        peer would take it for the rest."""
        self._owes = self.sending = False

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent. Returns also when the connection is lost."""
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

    # --- hearing ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take nothing more from the peer until `resume`."""
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
        """`count` bytes of the body were taken from the socket past this object, all that were left when it
        becomes 0."""
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
        if exchange is None:  # nobody asked: not a peer to go on with
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
            self._break(f"{self._name} does not speak HTTP as it should: {error}")

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
        if self._held:  # more than was asked for
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
                raise _BadResponseError("its head has no end")
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
        """How the body ends (RFC 9112 §6.3)."""
        if self._head_only or status in (204, 304):
            return 0
        coding = headers.get("transfer-encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise _BadResponseError("a transfer coding that is not known here")
            self._chunk = 0
            return -1
        length = headers.get("content-length")
        if length is None:
            self._keep = False
            return -3
        if not (length.isascii() and length.isdigit()):
            raise _BadResponseError("a content length that is no number")
        return int(length)

    def _read_chunk(self) -> bool:
        """Whether there may be more to read now."""
        if self._chunk > 0:
            taken = min(self._chunk, len(self._held))
            self._chunk -= taken
            self._hand_on(taken)
            if not self._chunk:
                self._chunk = -2  # the line end behind it
            return bool(self._held)
        if self._chunk == -2:
            if len(self._held) < 2:
                return False
            if self._held[:2] != b"\r\n":
                raise _BadResponseError("a chunk without its end")
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
                raise _BadResponseError("a chunk without its size")
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
        """Whether the peer has been silent for too long; not while it is kept waiting itself."""
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
    """What came is no HTTP/1.1 answer."""


def duplicate_socket(transport: asyncio.BaseTransport) -> socket.socket:
    """A second, non-blocking socket of a connection, the caller's to close. Raises ConnectionResetError."""
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
            raise _BadResponseError("a header that is none")
        lower, text = name.lower(), value.strip(" \t")
        headers[lower] = f"{headers[lower]},{text}" if lower in headers else text
    return int(match[1]), headers
