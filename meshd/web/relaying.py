"""An answer of another node, handed on to the client as it arrives.

Law: bytes go from one connection to the other in the callback that brings them, and between two sockets
without coming into the process where both are plain and much is left (splice). A client that is slow slows
the other node. Invariant: either nothing of an answer went out, or all of it, or the client's connection is
cut.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

from meshd.net.peers import PeerUnreachableError
from meshd.web.encrypting import is_encrypted
from meshd.web.sending import duplicate

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.net.wires import AnswerHead, Wire

_SPLICED: Final = 512 << 10  # so much must be left for it to be worth a pipe and two descriptors
_PIPE: Final = 1 << 20
_HIGH: Final = 256 << 10  # bytes queued for the client before the other node is made to wait
_IDLE_SECONDS: Final = 120.0  # a client that takes nothing for so long is given up
_SILENCE: Final = 60.0  # seconds: of a node in the middle of an answer
_HOP_BY_HOP = (b"connection", b"keep-alive")


class Relay:
    """One answer on its way. `protocol` is the client's connection; `finish` says at the last moment whether
    it is closed afterwards. `outcome` is set once: None when all of the answer went out, the head of one that
    must not (`kept_back` says so), the error when nothing came or it broke off."""

    def __init__(
        self,
        protocol: Any,
        wire: Wire,
        connection: Callable[[], str],
        kept_back: Callable[[AnswerHead], bool],
    ) -> None:
        self._protocol, self._wire = protocol, wire
        self._connection, self._kept_back = connection, kept_back
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[AnswerHead | None] = self._loop.create_future()
        self.wanted: asyncio.Future[bool] = self._loop.create_future()
        """Whether the request's body is asked for."""
        self.head: AnswerHead | None = None
        """Of the answer that is being handed on."""
        self.sent = 0
        """Bytes of its body."""
        self.closing = False
        """Whether the client's connection is to be closed after it."""
        self.broken = False
        """Whether the other node broke it off when a part of it was out."""
        self._chunked = False
        self._helper: asyncio.Task[None] | None = None
        self._dropping: AnswerHead | None = None

    def __repr__(self) -> str:
        return f"<Relay from {self._wire!r}, {self.sent} bytes sent>"

    def cancel(self) -> None:
        """The client is gone: ask no more."""
        if not self.outcome.done():
            self.outcome.cancel()
            self._wire.abort()
        if self._helper is not None:
            self._helper.cancel()

    def give_up(self, error: Exception) -> None:
        """No answer is waited for any more; one of which a part is out is cut."""
        if self.outcome.done():
            return
        self._wire.abort()
        self._fail(error)

    # --- what the other node's connection tells -------------------------------------------------------

    def continued(self) -> None:
        if not self.wanted.done():
            self.wanted.set_result(True)

    def begun(self, head: AnswerHead) -> None:
        if not self.wanted.done():
            self.wanted.set_result(False)
        if self.outcome.done():
            self._wire.abort()
            return
        if self._kept_back(head):
            self._dropping = head
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            self.give_up(_client_gone())
            return
        self.head = head
        self._wire.patience = _SILENCE
        word = self._connection()
        self._chunked = head.length is None
        if self._chunked:  # its end is the connection's: rare, and the same for every client
            word = "close"
        self.closing = word == "close"
        self._write(transport, _rewritten(head, word))
        if head.length is not None and head.length >= _SPLICED and not self._is_encrypted(transport):
            self._wire.pause()
            self._helper = self._loop.create_task(self._splice())

    def came(self, data: bytes) -> None:
        if self._dropping is not None:
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            self.give_up(_client_gone())
            return
        self.sent += len(data)
        self._write(transport, data)
        if self._wire.left and self._helper is None and transport.get_write_buffer_size() > _HIGH:
            self._wire.pause()
            self._helper = self._loop.create_task(self._await_client())

    def ended(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(self._dropping)

    def broke(self, error: PeerUnreachableError) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.wanted.done():
            self.wanted.set_result(False)
        if self.outcome.done():
            return
        self.outcome.set_exception(error)
        self.outcome.exception()  # whoever waits is told; it may have left
        if self.head is not None:
            self.broken = isinstance(error, PeerUnreachableError)
            if self._protocol.transport is not None:
                self._protocol.transport.abort()
        if self._helper is not None and self._helper is not asyncio.current_task():
            self._helper.cancel()

    # --- a slow client, a large answer ------------------------------------------------------------------

    def _is_encrypted(self, transport: asyncio.Transport) -> bool:
        other = self._wire.transport
        return is_encrypted(transport) or other is None or is_encrypted(other)

    async def _await_client(self) -> None:
        """Until the client has taken most of what waits for it."""
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                await self._protocol._drain_helper()
        except (ConnectionError, TimeoutError) as error:
            self.give_up(error)
        else:
            self._helper = None
            self._wire.resume()

    async def _splice(self) -> None:
        if self.outcome.done():
            return
        try:
            await self._drain()
            await self._pump()
        except (PeerUnreachableError, OSError, TimeoutError) as error:
            self.give_up(error)

    async def _drain(self) -> None:
        """Wait until all that is queued for the client is with the kernel: the pump writes past the queue."""
        transport = self._protocol.transport
        if transport is None:
            raise ConnectionResetError
        await asyncio.sleep(0)  # what uvloop was given in this turn it queues in the next
        if transport.get_write_buffer_size():
            low, high = transport.get_write_buffer_limits()
            transport.set_write_buffer_limits(high=0)
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._protocol._drain_helper()
            finally:
                transport.set_write_buffer_limits(high=high, low=low)

    async def _pump(self) -> None:
        source, drain = self._wire.transport, self._protocol.transport
        if source is None or drain is None:
            raise ConnectionResetError
        pump = _Pump(source, drain, self._wire.left)
        before = self._wire.left
        try:
            await pump.run(self._moved)
        finally:
            pump.close()
        self.sent += before
        self._helper = None
        self._wire.resume()
        self._wire.passed(before)

    def _moved(self) -> None:
        self._protocol.moved += 1

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        transport.write(data)
        self._protocol.wrote(len(data))


def _client_gone() -> ConnectionResetError:
    return ConnectionResetError("the client closed the connection")


class _Pump:
    """Moves `left` bytes from one connection's socket to another's by way of a pipe (splice(2)).

    Works on duplicates of both descriptors, while neither transport reads or has anything queued.
    """

    def __init__(self, source: asyncio.Transport, drain: asyncio.Transport, left: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._left, self._held = left, 0
        self._in = duplicate(source)
        self._out = duplicate(drain)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._size = _grown(self._writer)
        self._turn: asyncio.Future[None] | None = None

    async def run(self, moved: Callable[[], None]) -> None:
        """Raises PeerUnreachableError, OSError, TimeoutError (no byte moved for minutes)."""
        while self._left or self._held:
            if self._left and self._held < self._size:
                taken = self._fill()
                if not taken and not self._held:
                    await self._wait(self._in.fileno(), reading=True)
                    continue
            if not self._empty():
                await self._wait(self._out.fileno(), reading=False)
            else:
                moved()
                await asyncio.sleep(0)

    def close(self) -> None:
        for fd in (self._reader, self._writer):
            os.close(fd)
        self._in.close()
        self._out.close()

    def _fill(self) -> int:
        try:
            room = min(self._left, self._size - self._held)
            flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
            taken = os.splice(self._in.fileno(), self._writer, room, flags=flags)
        except BlockingIOError:
            return 0
        if not taken:
            raise PeerUnreachableError("a node closed the connection in the middle of an answer", begun=True)
        self._left -= taken
        self._held += taken
        return taken

    def _empty(self) -> int:
        more = os.SPLICE_F_MORE if self._left else 0
        flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK | more
        try:
            given = os.splice(self._reader, self._out.fileno(), self._held, flags=flags)
        except BlockingIOError:
            return 0
        self._held -= given
        return given

    async def _wait(self, fd: int, *, reading: bool) -> None:
        turn = self._loop.create_future()
        sock = self._in if reading else self._out
        add = self._loop.add_reader if reading else self._loop.add_writer
        remove = self._loop.remove_reader if reading else self._loop.remove_writer
        add(sock, _wake, turn)
        try:
            async with asyncio.timeout(_IDLE_SECONDS):
                await turn
        finally:
            remove(sock)


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _grown(pipe: int) -> int:
    """The size of a pipe after asking for a larger one: how much one may have is the system's."""
    import fcntl

    try:
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
    except OSError:
        return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def _rewritten(head: AnswerHead, connection: str) -> bytes:
    """The head as it came, but for what is about the connection it came on."""
    raw = head.raw
    if "connection" in head.headers or "keep-alive" in head.headers or "transfer-encoding" in head.headers:
        lines = raw[:-4].split(b"\r\n")
        dropped = (*_HOP_BY_HOP, b"transfer-encoding")
        kept = [line for line in lines if line.partition(b":")[0].lower() not in dropped]
        raw = b"\r\n".join(kept) + b"\r\n\r\n"
    if connection:
        raw = raw[:-2] + f"Connection: {connection}\r\n\r\n".encode()
    return raw
