"""ProcessServer: answers calls of the node's other processes on a Unix socket.

Each call runs in a task of its own, unless its method is ordered. A handler is cancelled when its caller
cancels the call or disconnects; what it attached to a reply is then released. An unlisted error is logged
here and crosses as the unexpected one. A connection runs at most `max_calls` calls, and an update waits while
the client's socket is full.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from meshd.rpc.process_rpc import (
    CANCEL,
    MAX_CALLS,
    NOTIFICATION,
    ErrorTypes,
    ErrorValue,
    close_all,
    decode_request,
)
from meshd.rpc.unix_messages import (
    BlockingMessageStream,
    MessageError,
    MessageStream,
    StreamClosedError,
    accept_sockets,
)
from meshd.telemetry import tracing

if TYPE_CHECKING:
    import socket

    from meshd.rpc.process_rpc import Method, RpcRequest

_log = logging.getLogger("meshd.rpc")
Q = TypeVar("Q")
R = TypeVar("R")


class ServerCall:
    """A call, as its handler sees it. `fds`: the descriptors of the request, closed when the handler ends."""

    __slots__ = (
        "_on_release",
        "_stream",
        "fds",
        "method",
        "number",
        "released",
        "replied",
        "reply_fds",
        "replying",
        "task",
    )

    def __init__(self, stream: MessageStream, number: int, method: str, fds: list[int]) -> None:
        self._stream, self.number, self.method, self.fds = stream, number, method, fds
        self.reply_fds: list[int] = []
        self._on_release: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.replying = self.replied = self.released = False

    def __repr__(self) -> str:
        return f"<ServerCall {self.method} {self.number}>"

    @property
    def is_held(self) -> bool:
        """Whether the reply was sent and an attachment is held for it until the client releases it."""
        return self.replied and self._on_release is not None and not self.released

    async def update(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send an update; the descriptors stay open. Waits while the client's socket is full."""
        await self._stream.send((self.number, "update", message), fds)

    def attach(self, fd: int, on_release: Callable[[], None] | None = None) -> None:
        """Send `fd` with the reply, then close it. With `on_release`, that is called once instead, when the
        client releases the answer, cancels the call, or disconnects."""
        self.reply_fds.append(fd)
        self._on_release = on_release

    def release(self) -> None:
        """Release the attachments. Idempotent."""
        fds, self.reply_fds = self.reply_fds, []
        on_release, self._on_release = self._on_release, None
        if on_release is None:
            close_all(fds)
        else:
            on_release()


Handler = Callable[[Q, ServerCall], Awaitable[R]]


class ProcessServer:
    """Answers the calls on a listening socket, each in a task of its own. Register the handlers first."""

    def __init__(self, errors: ErrorTypes | None = None, *, max_calls: int = MAX_CALLS) -> None:
        self.errors, self.max_calls = errors or ErrorTypes(), max_calls
        self._handlers: dict[str, tuple[Method[Any, Any], Handler[Any, Any]]] = {}

    def __repr__(self) -> str:
        return f"<ProcessServer of {', '.join(self._handlers)}>"

    def register(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer `method` with `handler(request, call)`: its result is the reply, and a listed error that it
        raises is passed to the caller. It is cancelled when the caller cancels the call or disconnects."""
        self._handlers[method.name] = (method, handler)

    def find(self, name: str) -> tuple[Method[Any, Any], Handler[Any, Any]]:
        """Return a method and its handler. Raises MessageError."""
        try:
            return self._handlers[name]
        except KeyError:
            raise MessageError(f"no such method: {name[:100]!r}") from None

    async def serve_forever(self, listener: socket.socket) -> None:
        """Serve until cancelled, then end the handlers. The caller closes the listener."""
        await accept_sockets(listener, self._serve)

    async def _serve(self, sock: socket.socket) -> None:
        await _ServerConnection(self, MessageStream(sock, decode_request)).run()


class _ServerConnection:
    """The calls of one client."""

    def __init__(self, server: ProcessServer, stream: MessageStream) -> None:
        self._server, self._stream = server, stream
        self._running: dict[int, ServerCall] = {}
        self._held: dict[int, ServerCall] = {}
        self._ended = False

    async def run(self) -> None:
        try:
            while True:
                request, fds = await self._stream.receive()
                try:
                    await self._on_request(request, fds)
                except msgspec.MsgspecError as error:
                    raise MessageError(f"{request.method[:100]!r} is malformed: {error}") from error
        except StreamClosedError:
            pass
        except MessageError as error:
            _log.error("closing the connection of another process: %s", error)
        finally:
            await self._end()

    async def _end(self) -> None:
        tasks = [call.task for call in self._running.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        self._stream.close()
        self._ended = True
        for call in self._held.values():
            call.release()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_request(self, request: RpcRequest, fds: list[int]) -> None:
        if request.method == CANCEL:
            close_all(fds)
            self._cancel(request.number)
            return
        call = ServerCall(self._stream, request.number, request.method, fds)
        try:
            method, handler = self._server.find(request.method)
            work = self._answer(call, handler, method.decode_request(request.body), request.trace)
        except BaseException:
            close_all(fds)
            raise
        if method.ordered or call.number == NOTIFICATION:
            try:
                await work
            finally:
                self._on_end(call)
            return
        self._running[call.number] = call
        call.task = asyncio.get_running_loop().create_task(work)
        call.task.add_done_callback(lambda _: self._on_end(call))  # a task may be cancelled before it begins
        if len(self._running) > self._server.max_calls:
            raise MessageError(f"more than {self._server.max_calls} calls are under way")

    def _cancel(self, number: int) -> None:
        call = self._running.get(number)
        if call is None:
            call = self._held.pop(number, None)
            if call is not None:
                call.release()
        elif call.replying:  # cancelling a message that has begun would end the connection
            call.released = True
        elif call.task is not None:
            call.task.cancel()

    async def _answer(self, call: ServerCall, handler: Handler[Any, Any], request: Any, trace: str) -> None:
        span = tracing.enter_remote(trace)
        try:
            reply = await self._run_handler(call, handler, request)
            if call.number != NOTIFICATION:
                call.replying = True
                await self._reply(call, reply)
        except StreamClosedError:
            pass  # the connection ends
        finally:
            tracing.leave_remote(span)  # an ordered call runs in the connection's task

    def _on_end(self, call: ServerCall) -> None:
        self._running.pop(call.number, None)
        close_all(call.fds)
        if call.is_held and not self._ended:
            self._held[call.number] = call
        else:
            call.release()

    async def _run_handler(self, call: ServerCall, handler: Handler[Any, Any], request: Any) -> Any:
        """Return the reply, or the error as a value."""
        task = asyncio.current_task()
        try:
            return await handler(request, call)
        except StreamClosedError:
            raise
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            return self._error_value(error, call, request)  # something it awaited was cancelled, not the call
        except Exception as error:
            return self._error_value(error, call, request)

    async def _reply(self, call: ServerCall, reply: Any) -> None:
        try:
            if isinstance(reply, ErrorValue):
                await self._stream.send((call.number, "error", reply))
            else:
                await self._stream.send((call.number, "reply", reply), call.reply_fds)
                call.replied = True
        except (MessageError, msgspec.MsgspecError, TypeError) as error:  # too large, or not encodable
            await self._stream.send((call.number, "error", self._error_value(error, call, None)))

    def _error_value(self, error: BaseException, call: ServerCall, request: Any) -> ErrorValue:
        value = self._server.errors.encode(error)
        if value is None:
            fields = {"method": call.method, "request": repr(request)[:300]}
            _log.error("a call of another process failed", extra=fields, exc_info=error)
            value = self._server.errors.encode(self._server.errors.unexpected())
            assert value is not None
        return value


BlockingHandler = Callable[[Q, Sequence[int]], tuple[R, Sequence[int]]]


def serve_blocking(sock: socket.socket, method: Method[Q, R], handler: BlockingHandler[Q, R]) -> None:
    """Answer one client in a process without an event loop: calls of one method, one at a time, in order.

    `handler(request, fds)` returns the reply and its descriptors, which are closed once they are sent; those
    of the request are closed when the handler ends. Returns when the client disconnects; an error of the
    handler ends the connection and is raised.
    """
    stream = BlockingMessageStream(sock, decode_request)
    try:
        while True:
            request, fds = stream.receive()
            try:
                if request.method == CANCEL:
                    continue  # a call runs to its end here
                if request.method != method.name:
                    raise MessageError(f"no such method: {request.method[:100]!r}")
                reply, reply_fds = handler(method.decode_request(request.body), fds)
                try:
                    stream.send((request.number, "reply", reply), reply_fds)
                finally:
                    close_all(reply_fds)
            finally:
                close_all(fds)
    except StreamClosedError:
        pass
    finally:
        stream.close()
