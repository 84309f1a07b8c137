"""A client connection: aiohttp's protocol with S3 error responses and connection accounting.

Law: input that cannot be parsed gets an S3 error, and the connection closes. aiohttp's own error pages,
which reveal its version, never go out.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from meshd.server.connection_limits import (
    LingeringClose,
    is_malformed,
    malformed_request_error,
    oversized_head_message,
)
from meshd.server.proxy.response_relay import ProxiedResponse
from meshd.server.response import Reply, head_bytes, new_request_id
from meshd.server.response_body import ResumedResponse, is_encrypted
from meshd.server.s3.fast_path import RequestBoundary
from meshd.server.sendfile import DirectSender, unsent_bytes_of
from meshd.telemetry import metrics
from meshwire.errors import S3Error
from meshwire.s3.responses import render_error

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp.streams import StreamReader

    from meshd.rpc.http_connection import HttpConnection
    from meshd.server.connection_limits import ConnectionLimiter
    from meshd.server.request_trace import RequestTrace
    from meshd.server.response_body import BodyResumer, PendingResponse
    from meshd.server.s3.fast_path import FastPath
    from meshd.store.records import Span
    from meshd.util.clock import Clock

log = logging.getLogger(__name__)

_FIRST_WORD = 0.5  # seconds that a client has for its first request when the node stops
_ENCRYPTED_BACKLOG = 128 << 10  # bytes kept for a slow client before they are encrypted


class Connection(RequestHandler):
    """One client connection. `handle_error` is what aiohttp calls for a malformed request or a failed
    handler."""

    __slots__ = (
        "_at_once",
        "_boundary",
        "_broken",
        "_encrypted",
        "_ending",
        "_guard",
        "_half_closed",
        "_heading",
        "_hot",
        "_latest_body",
        "_lingering",
        "_passed",
        "_unread_then",
        "_wrote_in",
        "head_since",
        "last_received",
        "moved",
        "on_lost",
        "truncated_body",
    )

    def __init__(
        self, guard: ConnectionLimiter, hot: FastPath | None, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._guard, self._hot = guard, hot
        self._boundary = RequestBoundary()
        self._encrypted = False
        self._ending: asyncio.Transport | None = None
        self.last_received = 0.0
        """When the client last sent something, on the loop's clock."""
        self.head_since = 0.0
        """When the first bytes of a request head came whose end is missing; 0 when there is none."""
        self.moved = 0
        """Counts what was sent past the transport's own queue: progress of a long answer."""
        self._unread_then = (0.0, 0, 0, 0)
        self._wrote_in = -1
        self._at_once: DirectSender | None = None
        self._half_closed = False
        self._broken = False  # whether what comes cannot be understood any more, and is dropped
        self._heading = 0  # bytes of a head whose end is missing
        self.truncated_body: StreamReader | None = None
        self._latest_body: StreamReader | None = None
        self._lingering: LingeringClose | None = None
        self._passed: PendingResponse | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client is gone, by whoever waits for another node on its behalf."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        metrics.http_connections.inc()
        if is_encrypted(transport):
            self._encrypted = True
            cast("asyncio.Transport", transport).set_write_buffer_limits(high=_ENCRYPTED_BACKLOG)
        self.last_received = self._loop.time()
        if not self._guard.admit_connection(self):
            self._say("ServiceUnavailable", "This node has too many connections; try again later.")
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._manager is not None:
            metrics.http_connections.dec()
        self._guard.forget_connection(self)
        when_lost, self.on_lost = self.on_lost, None
        if when_lost is not None:
            when_lost()
        if self._at_once is not None:
            self._at_once.close()
        if self._lingering is not None:
            self._lingering.client_closed()
        self._ending = None
        if self._waiter is not None and self._waiter.done() and self._task_handler is not None:
            self._task_handler.cancel()  # it would begin what came last with nothing left to do it by
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or waits for it."""
        waits = self._waiter is not None and not self._waiter.done() and not self._messages
        return waits and self._passed is None

    @property
    def is_evictable(self) -> bool:
        """Whether its client has all its answers; it may still be sending what was refused."""
        return self.is_idle or self._lingering is not None

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that wait in this process for the client to take them."""
        transport = self.transport or self._ending
        return 0 if transport is None else transport.get_write_buffer_size()

    def force_close(self) -> None:
        """End it once the client has taken what waits for it. aiohttp forgets the transport here; who takes
        nothing would keep the connection for ever."""
        self._ending = self.transport or self._ending
        super().force_close()

    def wrote(self, size: int) -> None:
        """An answer of `size` bytes was queued on the transport."""
        self._wrote_in = self._guard.flush_count
        self._guard.response_queued(self, size)

    def send_direct(self, head: bytes, span: Span, rest: BodyResumer) -> bool:
        """Send a head and a range of a file past the transport, in this moment; False if nothing was sent.
        What the kernel did not take after all is queued; what cannot be read comes from `rest`, later."""
        transport, at_once = self.transport, self.past_the_queue()
        if transport is None or at_once is None:
            return False
        sent = at_once.send_now(head, span)
        if sent is None:
            return False
        left, torn = sent
        if left:
            transport.write(left)
            self.wrote(len(left))
        if torn is not None:
            self._passed = mending = ResumedResponse(self, rest, torn, self._came_back)
            self.on_lost = mending.cancel
        return True

    def past_the_queue(self) -> DirectSender | None:
        """What sends past the transport, when that can be done in this moment."""
        transport = self.transport
        # uvloop counts what it has queued in this turn of the loop nowhere: it must not be overtaken.
        if transport is None or self._encrypted or self._wrote_in == self._guard.flush_count:
            return None
        if self._at_once is None:
            if DirectSender.open_count >= DirectSender.MAX_OPEN:
                return None
            self._at_once = DirectSender(transport)
        return self._at_once

    @property
    def pressed(self) -> bool:
        """Whether answers should not be kept in memory for their clients just now."""
        return self._guard.under_pressure

    def is_stalled(self, now: float, seconds: float, least: int) -> bool:
        """Whether in the last `seconds` the client took less than `least` bytes of what waits for it."""
        transport = self.transport or self._ending
        unread = 0 if transport is None else unsent_bytes_of(transport)
        since, then, moved, answers = self._unread_then
        fresh = not since or moved != self.moved or answers != self._request_count
        if not unread or fresh or (now - since > seconds and then - unread >= least):
            self._unread_then = (now if unread else 0.0, unread, self.moved, self._request_count)
            return False
        return now - since > seconds

    def time_out(self) -> None:
        """End a connection whose request head does not come to an end."""
        self._say("RequestTimeout", "The request's head did not arrive in time.")
        self.head_since = 0.0
        self.force_close()

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not take its answer."""
        transport = self.transport or self._ending
        if transport is not None:
            transport.abort()

    def _say(self, code: str, message: str) -> None:
        """An error that answers no request in particular."""
        manager, transport = self._manager, self.transport
        if isinstance(manager, MeshServer) and transport is not None:
            rendered = render_error(S3Error(code, message), new_request_id(), "")
            now = manager.clock.now_ms() // 1000
            head = head_bytes(rendered.status, rendered.headers, now, connection="close")
            transport.write(head + rendered.body)

    @property
    def at_its_last(self) -> bool:
        """Whether the request being answered is the last one this client will have sent."""
        return self._half_closed and not self._messages

    @property
    def remote(self) -> str:
        """The client's address."""
        peer = self.peername
        return str(peer[0]) if isinstance(peer, (list, tuple)) else str(peer or "")

    @property
    def secure(self) -> bool:
        """Whether the client speaks TLS."""
        return self.ssl_context is not None

    def data_received(self, data: bytes) -> None:
        self.last_received = self._loop.time()
        if self._broken:
            if self._lingering is not None:
                self._lingering.data_arrived()
        elif self._passed is not None:
            self._passed.hold_input(data)
        elif not (data and self._hot is not None and self._answered_at_once(self._hot, data)):
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """The ordinary way."""
        if data:  # aiohttp calls without any, to have its parser look again
            self._boundary.feed(data)
        count, body = self._request_count, self._latest_body
        in_head = body is None or body.is_eof()
        super().data_received(data)
        if self._request_count != count:
            self._heading = 0
            self._note(*self._messages[-1])
        elif in_head:
            self._heading += len(data)
            if self._heading > self._guard.max_head_bytes:
                self._refuse_head()
        if self._messages or not self.is_idle:
            self.head_since = 0.0
        elif not self.head_since:
            self.head_since = self.last_received

    def _note(self, message: Any, body: StreamReader) -> None:
        """The parser's latest message."""
        if is_malformed(message):
            self._broke()
        else:
            self._latest_body = body

    def _refuse_head(self) -> None:
        """In its turn, as what the parser refuses itself."""
        self._messages.append(oversized_head_message(self._guard.max_head_bytes))
        self._request_count += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._broke()

    def _broke(self) -> None:
        """Nobody knows what the bytes from here on are. A body they belong to is incomplete: the parser tells
        its reader nothing."""
        self._broken = True
        body = self._latest_body
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(RequestPayloadError("malformed"))
        self._buffer_paused = False
        self.resume_reading(resume_parser=False)

    def _answered_at_once(self, hot: FastPath, data: bytes) -> bool:
        """Whether `data` was one request, the only one, and its answer is written."""
        if not self.is_idle or self._close or self._force_close or self._half_closed:
            return False
        transport = self.transport
        if (
            not self._boundary.at_boundary
            or transport is None
            or transport.get_write_buffer_size()
            or self.pressed
        ):
            return False
        answer = hot.try_respond(self, data)
        if answer is None:
            return False
        if answer:
            transport.write(answer)
            self.wrote(len(answer))
        self._request_count += 1
        if self._manager is not None:
            self._manager.requests_count += 1
        self._next_keepalive_close_time = self.last_received + self._keepalive_timeout
        return True

    # --- answers of other nodes, without a task -----------------------------------------------------------

    def proxy_to_peer(
        self, wire: HttpConnection, data: bytes, sent: bytes, trace: RequestTrace, *, head_only: bool
    ) -> None:
        """Ask another node with `sent`, and hand its answer on. If none comes, `data` takes the ordinary way,
        as it came from the client."""
        self._passed = passed = ProxiedResponse(self, wire, data, trace, self._came_back)
        self.on_lost = passed.relay.cancel
        passed.start(sent, head_only=head_only)

    def _came_back(self, passed: PendingResponse) -> None:
        self._passed = self.on_lost = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not passed.response_started:
            self._parse(passed.data)
        elif passed.closes_connection or (passed.is_last and not passed.held):
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if passed.held:
            self.data_received(passed.held)
        if self._half_closed and not self.eof_received():
            self.force_close()

    def _process_keepalive(self) -> None:
        if self._passed is not None:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def close_when_idle(self) -> None:
        """Close it if it is idle; if it answers the last of the requests that are here, in whole, have it
        close afterwards."""
        request, waiter = self._current_request, self._waiter
        if self._passed is not None:
            self._passed.is_last = True
        elif waiter is not None and not waiter.done():
            if self._request_count or self._loop.time() - self.last_received > _FIRST_WORD:
                self.force_close()
        elif self._lingering is not None:
            self._lingering.shorten()
        elif request is not None and request.content.is_eof() and not self._messages:
            self.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio takes a bool
        """A client that ends its side still gets its answers: IncompleteBody if it ended in the middle of a
        body. For that the other side stays open until they are written (`settle` closes it). Over TLS, where
        there is no half of a connection, it is gone."""
        if self._encrypted:
            return None
        if self._broken:
            self._half_closed = True
            if self._lingering is not None:
                self._lingering.client_closed()
            return True
        if self._passed is not None:
            self._half_closed = self._passed.is_last = True
            return True
        body, idle = self._latest_body, self._waiter is not None and not self._waiter.done()
        if body is None or (idle and not self._messages):
            return None
        self._half_closed = True
        if not body.is_eof():
            self.truncated_body = body
            body.feed_eof()
        if not self._messages:  # end after this answer, which may be written already
            self._close = True
        return True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer, then read and drop what the client sends that nobody wanted, or understood."""
        done = await super().finish_response(request, resp, start_time)
        body = request.content
        if done[1] or self._force_close:
            return done
        if self._broken and not resp.keep_alive:
            await self._linger(None)
        elif not body.is_eof():
            await self._linger(body)
        return done

    async def _linger(self, body: StreamReader | None) -> None:
        """Without a `body` until the client ends, who is told that nothing comes any more."""
        if body is None:
            if self._half_closed:
                return
            if self.transport is not None and not self._encrypted:
                self.transport.write_eof()
        self._lingering = LingeringClose(body, self._guard.linger_seconds)
        try:
            await self._lingering.drain_input()
        finally:
            self._lingering = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):  # nobody is there to be told
            raise exc
        manager = self._manager
        if request.writer.output_size > 0 or not isinstance(manager, MeshServer):
            raise ConnectionResetError("the response is under way already")
        request_id = new_request_id()
        error, shown = malformed_request_error(exc, status)
        if error.code == "InternalError":
            log.error("request %s failed", request_id, exc_info=exc)
        rendered = render_error(error, request_id, "")
        now = manager.clock.now_ms() // 1000
        reply = Reply(shown, list(rendered.headers), rendered.body, now)
        reply.force_close()
        metrics.http_requests.labels("Malformed", str(shown)).inc()
        return reply


class MeshServer(web.Server):
    """The low-level server, making our connections."""

    def __init__(
        self,
        handler: Any,
        *,
        clock: Clock,
        guard: ConnectionLimiter,
        hot: FastPath | None = None,
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        self.clock, self.guard, self.hot = clock, guard, hot
        self.connection_count = 0
        """How many connections there are."""
        self.on_connection_lost: Callable[[], None] | None = None
        """Called when one has ended."""
        guard.start()

    def __call__(self) -> Connection:
        return Connection(self.guard, self.hot, self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.connection_count += 1

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.connection_count -= 1
        if self.on_connection_lost is not None:
            self.on_connection_lost()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  aiohttp's signature
        self.guard.stop()
        await super().shutdown(timeout)
