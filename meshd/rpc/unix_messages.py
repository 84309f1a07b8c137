"""JSON messages with file descriptors (SCM_RIGHTS) over Unix stream sockets, asynchronous and blocking.

Wire format: u32 length and u16 descriptor count, big-endian, then that many bytes of JSON; descriptors travel
with the first byte. The sender closes the descriptors it sent; the receiver closes the ones it received.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence
    from pathlib import Path

_HEADER = struct.Struct("!IH")
_MAX_FDS = 253  # the kernel's SCM_MAX_FD
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_READ = 1 << 18
_FLAGS = socket.MSG_CMSG_CLOEXEC
MAX_MESSAGE_BYTES = 64 << 20
_OUT_OF_FILES = 0.1  # seconds until the next attempt to accept, or to send or receive
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

encode = msgspec.json.encode
decode = msgspec.json.decode
Decode = Callable[[bytes], Any]
"""Decodes the JSON of one message into a value."""


class MessageError(MeshdError):
    """The peer broke the framing; the stream is unusable."""


class StreamClosedError(MeshdError, ConnectionError):
    """The peer has closed the stream. Raised by send and receive alike."""


class MessageDecoder:
    """Turns bytes and descriptors into whole messages. No I/O.

    Take all messages before you feed more. Then no peer can make it hold more than one message,
    `MAX_MESSAGE_BYTES` and the descriptors it announces, and the data of one read.
    """

    def __init__(self, decode: Decode = decode) -> None:
        self._decode = decode
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def next_message(self) -> tuple[Any, list[int]] | None:
        """Return the next whole message, or None while bytes are missing. Raises MessageError."""
        if len(self._buffer) < _HEADER.size:
            self._refuse_more_than(_MAX_FDS if self._buffer else 0)
            return None
        length, count = _HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES or count > _MAX_FDS:
            raise MessageError(f"message of {length} bytes and {count} descriptors exceeds the limit")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            self._refuse_more_than(count)
            return None
        if len(self._fds) < count:
            raise MessageError(f"message announces {count} descriptors, and {len(self._fds)} arrived")
        return self._take(end, count)

    def _refuse_more_than(self, count: int) -> None:
        """Reject descriptors on a later byte than a message's first: our senders do not do that, and they
        pile up."""
        if len(self._fds) > count:
            raise MessageError(f"{len(self._fds)} descriptors arrived where a message may have {count}")

    def _take(self, end: int, count: int) -> tuple[Any, list[int]]:
        try:
            body = self._decode(bytes(memoryview(self._buffer)[_HEADER.size : end]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"message is not JSON, or not of the expected type: {error}") from None
        del self._buffer[:end]
        return body, [self._fds.popleft() for _ in range(count)]

    def discard(self) -> None:
        """Close the descriptors that were not taken."""
        while self._fds:
            os.close(self._fds.popleft())


def encode_message(body: object, fds: Sequence[int]) -> bytes:
    """Encode one message. Raises MessageError if it is larger than receivers accept."""
    payload = encode(body)
    if len(payload) > MAX_MESSAGE_BYTES or len(fds) > _MAX_FDS:
        raise MessageError(f"message of {len(payload)} bytes and {len(fds)} descriptors exceeds the limit")
    return _HEADER.pack(len(payload), len(fds)) + payload


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _receive(sock: socket.socket, into: MessageDecoder) -> None:
    """Call recvmsg once. Raises StreamClosedError at the end, MessageError if the kernel dropped
    descriptors."""
    try:
        data, ancillary, flags, _ = sock.recvmsg(_READ, _ANCILLARY, _FLAGS)
    except ConnectionError as error:
        raise StreamClosedError("the other process closed the stream") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    into.feed(data, fds)
    if flags & socket.MSG_CTRUNC:
        raise MessageError("descriptors were lost: this process has too many open files")
    if not data:
        raise StreamClosedError("the other process closed the stream")


class MessageStream:
    """The asynchronous side. Any number of tasks may send; one at a time may receive.

    Cancelling `receive` loses nothing. Cancelling a `send` that has begun closes the stream, because half a
    message has been sent.
    """

    def __init__(self, sock: socket.socket, decode: Decode = decode) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._assembly = MessageDecoder(decode=decode)
        self._sending = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<MessageStream fd={self._sock.fileno()}>"

    async def send(self, body: object, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open. Raises StreamClosedError."""
        data = encode_message(body, fds)
        async with self._sending:
            sent = 0
            try:
                sent = await self._send(lambda: self._sock.sendmsg([data], _ancillary(fds)))
                while sent < len(data):
                    rest = memoryview(data)[sent:]
                    sent += await self._send(lambda rest=rest: self._sock.send(rest))  # type: ignore[misc]  # bound early
            except asyncio.CancelledError:
                if 0 < sent < len(data):
                    self.close()
                raise

    async def _send(self, attempt: Callable[[], int]) -> int:
        while True:
            if self._sock.fileno() < 0:
                raise StreamClosedError("the stream is closed")
            try:
                return attempt()
            except BlockingIOError:
                await _ready(self._sock, writing=True)
            except ConnectionError as error:  # replies that it sent before may still be received
                raise StreamClosedError("the other process closed the stream") from error
            except OSError as error:
                self.close()
                raise StreamClosedError(f"nothing more can be sent: {error}") from error

    async def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller closes. Raises StreamClosedError,
        MessageError."""
        while True:
            message = self._assembly.next_message()
            if message is not None:
                return message
            if self._sock.fileno() < 0:
                raise StreamClosedError("the stream is closed")
            try:
                _receive(self._sock, self._assembly)
            except BlockingIOError:
                await _ready(self._sock, writing=False)

    def close(self) -> None:
        """Close the socket and drop what was not received. Idempotent; a waiting receive ends with an
        error."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a task that waits on the descriptor
            self._sock.close()
        self._assembly.discard()


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    """Wait until a socket is ready; without a free descriptor, for a moment."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.dup(sock.fileno())  # a duplicate: closing the stream meanwhile cannot reuse this number
    except OSError as error:
        if error.errno not in _NO_DESCRIPTOR:
            raise
        await asyncio.sleep(_OUT_OF_FILES)
        return
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    waiter: asyncio.Future[None] = loop.create_future()
    try:
        add(fd, lambda: None if waiter.done() else waiter.set_result(None))
        await waiter
    finally:
        remove(fd)
        os.close(fd)


class BlockingMessageStream:
    """The blocking side, for processes without an event loop."""

    def __init__(self, sock: socket.socket, decode: Decode = decode) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._assembly = MessageDecoder(decode=decode)

    def __repr__(self) -> str:
        return f"<BlockingMessageStream fd={self._sock.fileno()}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, body: object, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open. Raises StreamClosedError."""
        data = encode_message(body, fds)
        try:
            sent = self._sock.sendmsg([data], _ancillary(fds))
            self._sock.sendall(memoryview(data)[sent:])
        except OSError as error:
            raise StreamClosedError("the other process closed the stream") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller closes. Raises StreamClosedError,
        MessageError."""
        while True:
            message = self._assembly.next_message()
            if message is not None:
                return message
            _receive(self._sock, self._assembly)

    def close(self) -> None:
        self._sock.close()
        self._assembly.discard()


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name for `path` that fits the 108 bytes of sun_path, however long the directory's name is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path, backlog: int = 128) -> socket.socket:
    """Listen on a Unix socket at `path`, replacing what a dead process left there."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        sock.bind(name)
    sock.listen(backlog)
    return sock


async def connect(path: Path, decode: Decode = decode) -> MessageStream:
    """Connect to `path`. Raises OSError if no process listens there. (A Unix socket connects at once.)"""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return MessageStream(sock, decode)


async def accept_sockets(
    listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]], most: int = 0
) -> None:
    """Run `serve(sock)` for every connection until cancelled; its tasks are then cancelled too.

    A socket is closed when `serve` returns. A connection that ends or breaks ends its task quietly; other
    errors of `serve` go to the loop's handler. `most`: maximum concurrent connections, 0 for any number;
    further ones are closed at once.
    """
    listener.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await _ready(listener, writing=False)
                continue
            except OSError:
                if listener.fileno() < 0:
                    raise
                await asyncio.sleep(_OUT_OF_FILES)
                continue
            if most and len(tasks) >= most:
                sock.close()
                continue
            sock.setblocking(False)
            task = asyncio.ensure_future(_closing(sock, serve))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _closing(sock: socket.socket, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
    with sock, contextlib.suppress(ConnectionError, TimeoutError):
        await serve(sock)
