"""JSON messages with file descriptors (SCM_RIGHTS) over Unix stream sockets, asynchronous and blocking.

Wire format: u32 length and u16 descriptor count, big-endian, then that many bytes of JSON; descriptors
ride on the first byte. Law: the sender closes the descriptors it sent; the receiver closes the ones it
received.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
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
_OUT_OF_FILES = 0.1  # seconds until accepting is tried again

encode = msgspec.json.encode
decode = msgspec.json.decode
Decode = Callable[[bytes], Any]
"""Makes a value of the JSON of one message."""


class MessageError(MeshdError):
    """The peer broke the framing; the stream is of no further use."""


class StreamClosedError(MeshdError, ConnectionError):
    """The peer is gone. Raised by send and receive alike."""


class MessageDecoder:
    """Bytes and descriptors in, whole messages out. No I/O.

    Law: take all messages before more is fed. Invariant: then no peer can make it hold more than one message,
    `limit` bytes and the descriptors it announces, and what one read brings.
    """

    def __init__(self, limit: int = MAX_MESSAGE_BYTES, decode: Decode = decode) -> None:
        self._limit, self._decode = limit, decode
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def next_message(self) -> tuple[Any, list[int]] | None:
        """The next whole message, or None while bytes are missing. Raises MessageError."""
        if len(self._buffer) < _HEADER.size:
            self._refuse_more_than(_MAX_FDS if self._buffer else 0)
            return None
        length, count = _HEADER.unpack_from(self._buffer)
        if length > self._limit or count > _MAX_FDS:
            raise MessageError(f"message of {length} bytes and {count} descriptors exceeds the limit")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            self._refuse_more_than(count)
            return None
        if len(self._fds) < count:
            raise MessageError(f"message announces {count} descriptors, {len(self._fds)} came")
        return self._take(end, count)

    def _refuse_more_than(self, count: int) -> None:
        """What rides on a later byte than a message's first was not sent by us, and would pile up."""
        if len(self._fds) > count:
            raise MessageError(f"{len(self._fds)} descriptors came where a message may have {count}")

    def _take(self, end: int, count: int) -> tuple[Any, list[int]]:
        try:
            body = self._decode(bytes(memoryview(self._buffer)[_HEADER.size : end]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"message is not JSON, or not of the expected type: {error}") from None
        del self._buffer[:end]
        return body, [self._fds.popleft() for _ in range(count)]

    def discard(self) -> None:
        """Close descriptors nobody took."""
        while self._fds:
            os.close(self._fds.popleft())


def encode_message(body: object, fds: Sequence[int]) -> bytes:
    """One message as bytes. Raises MessageError when it is larger than any receiver takes."""
    payload = encode(body)
    if len(payload) > MAX_MESSAGE_BYTES or len(fds) > _MAX_FDS:
        raise MessageError(f"message of {len(payload)} bytes and {len(fds)} descriptors exceeds the limit")
    return _HEADER.pack(len(payload), len(fds)) + payload


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _receive(sock: socket.socket, into: MessageDecoder) -> None:
    """One recvmsg. Raises StreamClosedError at the end, MessageError when the kernel dropped descriptors."""
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

    Cancelling `receive` loses nothing; cancelling a `send` that has begun closes the stream, for half a
    message is out.
    """

    def __init__(self, sock: socket.socket, decode: Decode = decode) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._assembly = MessageDecoder(decode=decode)
        self._sending = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<MessageStream fd={self._sock.fileno()}>"

    async def send(self, body: object, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open and the caller's. Raises StreamClosedError."""
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
            except OSError as error:
                raise StreamClosedError("the other process closed the stream") from error

    async def receive(self) -> tuple[Any, list[int]]:
        """The next message and its descriptors, now the caller's. Raises StreamClosedError, MessageError."""
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
        """Close the socket, drop what was not received. Idempotent; a waiting receive ends with an error."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits on the descriptor
            self._sock.close()
        self._assembly.discard()


async def _ready(sock: socket.socket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    fd = os.dup(sock.fileno())  # our own: closing the stream meanwhile cannot make it another file's
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
        """Send one message; the descriptors stay open and the caller's. Raises StreamClosedError."""
        data = encode_message(body, fds)
        try:
            sent = self._sock.sendmsg([data], _ancillary(fds))
            self._sock.sendall(memoryview(data)[sent:])
        except OSError as error:
            raise StreamClosedError("the other process closed the stream") from error

    def receive(self) -> tuple[Any, list[int]]:
        """The next message and its descriptors, now the caller's. Raises StreamClosedError, MessageError."""
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
    """A name for `path` that fits sun_path's 108 bytes however long the directory's is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path, backlog: int = 128) -> socket.socket:
    """A listening Unix socket at `path`, replacing what a dead process left there."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        sock.bind(name)
    sock.listen(backlog)
    return sock


def connect_blocking(path: Path) -> BlockingMessageStream:
    """Connect to `path`. Raises OSError when nobody listens there."""
    return BlockingMessageStream(_connected(path))


async def connect(path: Path, decode: Decode = decode) -> MessageStream:
    """Connect to `path`. Raises OSError when nobody listens there. (A Unix socket connects at once.)"""
    return MessageStream(_connected(path), decode)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


async def accept_sockets(
    listener: socket.socket, serve: Callable[[socket.socket], Awaitable[None]], most: int = 0
) -> None:
    """Run `serve(sock)` for every connection until cancelled; its tasks then end with it.

    A socket is closed when `serve` returns. A connection that ends or breaks ends its task quietly; other
    errors of `serve` go to the loop's handler. `most`: connections at a time, 0 for any number; those beyond
    are closed at once.
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
