"""Zero-copy response bodies: sendfile from data files to a duplicate of the connection's socket.

The event loop never waits for a disk: a thread first reads pages that are not in the page cache, from
rotational disks in long turns (`meshd.store.disks.cold_reads`). Exactly the announced bytes are sent, or the
connection is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from meshd.rpc.http_connection import duplicate_socket
from meshd.server.direct_sender import PartialReadError, is_encrypted, is_resident
from meshd.server.response import connection_header, head_bytes
from meshd.server.response_body import write_piece, write_spans_encrypted
from meshd.server.sendfile_preload import WINDOW, read_pages
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from meshd.server.request import MeshRequest
    from meshd.server.response import Header
    from meshd.server.response_body import BodyResumer
    from meshd.store.disks.cold_reads import ColdRead, ColdReader
    from meshd.store.records import Span

_IDLE_SECONDS = 120.0  # a client that reads nothing for this time is disconnected
_WARM_SECONDS = 1.0  # seconds for which pages are assumed to stay in memory
_ADVICE = 4 << 20  # bytes from a cold window on that the kernel is asked to read ahead, within the span


async def send_spans(
    request: MeshRequest,
    status: int,
    headers: Iterable[Header],
    spans: Sequence[Span],
    now: int,
    rest: BodyResumer | None = None,
    reader: ColdReader | None = None,
    begun: ColdRead | None = None,
) -> bool:
    """Send a head, then the bytes of `spans`; return whether the connection may serve another request.

    `headers` must have a Content-Length equal to the spans' sum; `now` is in seconds since the epoch. The
    files must stay open until this returns. `rest` yields the missing bytes if the spans cannot be read to
    their end; its errors, or PartialReadError without it, are raised after the connection was cut. `reader`
    reads what is not in memory from rotational disks; `begun`: what it has begun, which is closed at the end.
    Raises ConnectionError if the client disconnected or stopped reading; the connection is then unusable.
    """
    keep_alive = request.keep_alive
    head = _head(request, status, headers, now)
    try:
        await _send(request, head, spans, resumable=rest is not None, reader=reader, begun=begun)
    except PartialReadError as error:
        if rest is None:
            raise
        await _go_on(request, rest, error)
    finally:
        if begun is not None:
            begun.close()
    return keep_alive


async def _go_on(request: MeshRequest, rest: BodyResumer, torn: PartialReadError) -> None:
    """Send the bytes of `rest` after those that were sent already."""
    transport = _open_transport(request)
    try:
        async with aclosing(rest(torn).pieces()) as pieces:
            async for piece in pieces:
                await write_piece(request, piece)
    except BaseException:
        transport.abort()
        raise


async def send_groups(
    request: MeshRequest,
    status: int,
    headers: Iterable[Header],
    groups: AsyncGenerator[Sequence[Span], None],
    now: int,
    torn: Callable[[int], None] | None = None,
    reader: ColdReader | None = None,
) -> bool:
    """Like `send_spans`, for a body that comes in groups of spans; each must stay valid until the next is
    requested. A failure after the first group cuts the connection. `torn` is called with the bytes sent of a
    group that cannot be read to its end; the next group must begin after them. Without `torn` that is a
    failure too. `reader`: see `send_spans`."""
    keep_alive, transport = request.keep_alive, request.transport
    head = _head(request, status, headers, now)
    pump: _Pump | None = None
    try:
        async with aclosing(groups):
            async for spans in groups:
                if pump is None and not is_encrypted(_open_transport(request)):
                    pump = _Pump(_open_transport(request), reader)
                try:
                    await _send(request, head, spans, pump=pump, resumable=torn is not None, reader=reader)
                except PartialReadError as error:
                    if torn is None:
                        raise
                    torn(error.sent)
                head = b""
    except Exception as error:
        if head:  # nothing was sent yet: a response can still report the error
            raise
        if transport is not None:
            transport.abort()
        raise ConnectionAbortedError(f"a response in progress cannot be finished: {error}") from error
    finally:
        if pump is not None:
            pump.close()
    return keep_alive


class ResponseWriter:
    """Writes a response piece by piece. Small pieces are sent together with their neighbours, since every
    segment of its own wakes the client. Must be closed."""

    def __init__(self, request: MeshRequest) -> None:
        """Open the connection for writing. Raises ConnectionResetError."""
        self._request, self._transport = request, _open_transport(request)
        self._pump = None if is_encrypted(self._transport) else _Pump(self._transport)
        if self._pump is not None:
            self._pump.cork(held=True)

    def __repr__(self) -> str:
        return f"<ResponseWriter {self._pump!r}>"

    async def write_data(self, data: bytes | memoryview, spans: Sequence[Span] = ()) -> None:
        """Write `data`, then `spans`, which were in memory a moment ago; both may be reused when this
        returns. Raises ConnectionError."""
        if self._pump is None:
            await _send_encrypted(self._request, self._transport, data, spans)
            return
        await _drain(self._request, self._transport)
        self._request.response_started = True
        try:
            await self._pump.run(data, spans, warm=True)
        except BaseException:
            self._transport.abort()
            raise

    def close(self) -> None:
        """Send what is held back and release the connection. Idempotent."""
        pump, self._pump = self._pump, None
        if pump is not None:
            with suppress(OSError):
                pump.cork(held=False)
            pump.close()


def _head(request: MeshRequest, status: int, headers: Iterable[Header], now: int) -> bytes:
    return head_bytes(status, headers, now, connection=connection_header(request, request.keep_alive))


def _open_transport(request: MeshRequest) -> asyncio.Transport:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client closed the connection")
    return transport


async def _send(
    request: MeshRequest,
    head: bytes,
    spans: Sequence[Span],
    *,
    pump: _Pump | None = None,
    resumable: bool = False,
    reader: ColdReader | None = None,
    begun: ColdRead | None = None,
) -> None:
    """Send a head and spans. `pump`: that of the response, if it is sent in several turns; otherwise one is
    created. `resumable`: the connection stays open if the spans cannot be read to their end."""
    transport = _open_transport(request)
    if is_encrypted(transport):
        await _send_encrypted(
            request, transport, head, spans, resumable=resumable, reader=reader, begun=begun
        )
        return
    await _drain(request, transport)
    request.response_started = True
    turn = pump or _Pump(transport, reader)
    try:
        await turn.run(head, spans, begun=begun)
    except BaseException as error:
        _cut(transport, error, resumable=resumable)
        raise
    finally:
        if turn is not pump:
            turn.close()


async def _send_encrypted(
    request: MeshRequest,
    transport: asyncio.Transport,
    head: bytes | memoryview,
    spans: Sequence[Span],
    *,
    resumable: bool = False,
    reader: ColdReader | None = None,
    begun: ColdRead | None = None,
) -> None:
    try:  # its queue keeps the head
        await write_spans_encrypted(request, bytes(head), spans, is_resident, reader, begun)
    except BaseException as error:
        _cut(transport, error, resumable=resumable)
        raise


def _cut(transport: asyncio.Transport, error: BaseException, *, resumable: bool) -> None:
    if not (resumable and isinstance(error, PartialReadError)):
        transport.abort()


async def _drain(request: MeshRequest, transport: asyncio.Transport) -> None:
    """Wait until everything queued earlier is in the kernel, since the pump writes past the transport's
    queue."""
    if transport.get_write_buffer_size() == 0:
        return
    low, high = transport.get_write_buffer_limits()
    transport.set_write_buffer_limits(high=0)
    try:
        await request.drain()
    finally:
        transport.set_write_buffer_limits(high=high, low=low)


class _Pump:
    """Writes a head and file ranges through a duplicate of the connection's descriptor.

    uvloop's transports have no sendfile and own their descriptor; a duplicate may be watched and written next
    to them, as long as the transport itself has nothing queued.
    """

    def __init__(self, transport: asyncio.Transport, reader: ColdReader | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._read: ColdRead | None = None  # once a window was not in memory, on a rotational disk
        self._body: Sequence[Span] = ()
        self._warm_until = 0.0
        self._socket = duplicate_socket(transport)
        self._head = memoryview(b"")
        self._spans: Iterator[Span] = iter(())
        self._fd = -1
        self._offset = self._left = 0
        self._moved = self._sent = 0  # bytes in total; bytes of these spans
        self._seen = -1
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._watched = False
        self._watchdog: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<_Pump fd={self._socket.fileno()}, {self._moved} bytes moved>"

    async def run(
        self,
        head: bytes | memoryview,
        spans: Sequence[Span],
        *,
        warm: bool = False,
        begun: ColdRead | None = None,
    ) -> None:
        """Send everything; may be called again. Raises ConnectionError or PartialReadError."""
        self._warm_until = self._loop.time() + _WARM_SECONDS if warm else 0.0
        self._head, self._spans, self._sent = memoryview(head), iter(spans), 0
        self._body, self._read = spans, begun
        self._done = self._loop.create_future()
        self._next_span()
        self._step()
        if not self._done.done():
            self._seen = -1
            self._check_progress()
        try:
            await self._done
        finally:
            self._head = memoryview(b"")
            if self._read is not None:
                self._read.close()
            if self._watchdog is not None:
                self._watchdog.cancel()

    def cork(self, *, held: bool) -> None:
        """Set whether the kernel holds back segments that are not full."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, held)

    def close(self) -> None:
        """Close the duplicate. Idempotent; the connection itself stays open."""
        self._unwatch()
        self._socket.close()

    def _next_span(self) -> None:
        self._left = 0
        while not self._left:
            span = next(self._spans, None)
            if span is None:
                return
            self._fd, self._offset, self._left = span.fd, span.offset, span.length

    def _step(self) -> None:
        """Run one turn: send as much as fits now, at most one window. Called directly first, then whenever
        there is room."""
        if self._done.done():
            return
        try:
            if len(self._head) and not self._send_head():
                self._watch()
            elif not self._left:
                self._finish()
            elif self._is_warm(WINDOW):
                self._send_window()
            else:
                self._fetch()
        except BlockingIOError:
            self._watch()
        except OSError as error:
            self._fail(error)

    def _send_head(self) -> bool:
        more = socket.MSG_MORE if self._left else 0
        sent = self._socket.send(self._head, more)
        self._head = self._head[sent:]
        self._moved += sent
        return not self._head

    def _send_window(self) -> None:
        room = WINDOW if self._read is None else min(WINDOW, self._read.fetched - self._sent)
        failpoints.hit("web.send.before")
        while True:
            sent = os.sendfile(self._socket.fileno(), self._fd, self._offset, min(self._left, room))
            if not sent:
                raise OSError(f"a data file ends {self._left} bytes before its extent does")
            self._offset += sent
            self._left -= sent
            self._moved += sent
            self._sent += sent
            room -= sent
            if not self._left:
                self._next_span()
            if not (room and self._left and self._is_warm(room)):
                break
        if self._read is not None:
            self._read.advance(self._sent)
        if self._left:
            self._watch()
        else:
            self._finish()

    def _is_warm(self, most: int) -> bool:
        """Whether the next bytes, at most `most`, can be sent without waiting for a disk."""
        if self._read is not None:
            most = min(most, self._read.fetched - self._sent)
            if not most:
                return False
        return self._loop.time() < self._warm_until or is_resident(
            self._fd, self._offset, min(self._left, most)
        )

    def _fetch(self) -> None:
        """Have a thread read the window, so that sendfile finds it in memory."""
        self._unwatch()
        if self._read is None and self._reader is not None:
            try:
                self._read = self._reader.begin(self._body, self._sent)
            except OSError:  # reading it says why
                self._reader = None
        if self._read is not None:
            self._read.fetch(self._sent, self._resume_sending)
            return
        window, advice = min(self._left, WINDOW), min(self._left, _ADVICE)
        reading = self._loop.run_in_executor(None, read_pages, self._fd, self._offset, window, advice)
        reading.add_done_callback(self._on_pages_read)

    def _on_pages_read(self, reading: asyncio.Future[None]) -> None:
        if reading.cancelled() or self._done.done():
            return
        self._resume_sending(reading.exception())

    def _resume_sending(self, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is not None:
            self._fail(error)
            return
        try:
            self._send_window()
        except BlockingIOError:
            self._watch()
        except OSError as failure:
            self._fail(failure)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._loop.add_writer(self._socket, self._step)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_writer(self._socket)

    def _check_progress(self) -> None:
        if self._moved == self._seen:
            self._fail(ConnectionAbortedError(f"the client read nothing for {_IDLE_SECONDS:.0f} seconds"))
            return
        self._seen = self._moved
        self._watchdog = self._loop.call_later(_IDLE_SECONDS, self._check_progress)

    def _finish(self) -> None:
        self._unwatch()
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Fail. sendfile(2) does not report which file failed: an error that is not a connection's is the
        disk's."""
        self._unwatch()
        if not self._done.done():
            of_client = not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError)
            self._done.set_exception(error if of_client else PartialReadError(self._sent, error))
