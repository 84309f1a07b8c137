"""ProcessClient: calls the methods of another process of the node over its Unix socket.

Cancelling a call cancels its handler. When the other process ends, every running call fails with the `lost`
error of its socket; the next call connects again, and nothing is repeated implicitly. At most `max_calls`
calls run at a time, further ones wait; updates are consumed as they are received, so nothing queues here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from meshd.rpc.process_rpc import (
    CANCEL,
    MAX_CALLS,
    NOTIFICATION,
    ErrorTypes,
    StreamMethod,
    close_all,
    decode_error,
    decode_response,
)
from meshd.rpc.unix_messages import MessageError, StreamClosedError, connect
from meshd.telemetry import tracing
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from meshd.rpc.process_rpc import Method, RpcResponse
    from meshd.rpc.unix_messages import MessageStream

_log = logging.getLogger("meshd.rpc")
_ENDED: Final = "ended before it answered"
Q = TypeVar("Q")
R = TypeVar("R")
U = TypeVar("U")


class Reconnect(msgspec.Struct, frozen=True):
    """How often a client tries to connect: once, and again after each of `delays` (seconds). `forever`: the
    last delay repeats."""

    delays: tuple[float, ...] = ()
    forever: bool = False

    def __iter__(self) -> Iterator[float]:
        return itertools.chain(self.delays, itertools.repeat(self.delays[-1]) if self.forever else ())


ONCE: Final = Reconnect()


class Answer(msgspec.Struct, Generic[R], eq=False):
    """A reply with its descriptors, which the caller closes. `release` tells the server that what it holds
    for the reply (`ServerCall.attach`) is no longer needed."""

    message: R
    fds: list[int]
    release: Callable[[], None]

    def take_fds(self) -> list[int]:
        """Return the descriptors; `close` does not close them any more."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the descriptors and release the answer."""
        close_all(self.take_fds())
        self.release()


class PendingCall(msgspec.Struct, Generic[R], eq=False):
    """A running call; cancel it through the client when its answer is no longer needed."""

    number: int
    method: Method[Any, R]
    on_update: Callable[[Any, list[int]], None] | None
    answer: asyncio.Future[Answer[R]] = msgspec.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ProcessClient:
    """The client's side of one socket; the first call connects it. Use on one event loop only; call `aclose`
    at the end."""

    def __init__(
        self,
        path: Path,
        errors: ErrorTypes | None = None,
        *,
        reconnect: Reconnect = ONCE,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._path, self._errors = path, errors or ErrorTypes()
        self._reconnect = reconnect
        self._stream: MessageStream | None = None
        self._connecting = asyncio.Lock()
        self._slots = asyncio.Semaphore(max_calls)
        self._numbers = itertools.count(NOTIFICATION + 1)
        self._calls: dict[int, PendingCall[Any]] = {}
        self._lost = asyncio.Event()
        self._tasks = BackgroundTasks(f"rpc-{path.stem}")

    def __repr__(self) -> str:
        return f"<ProcessClient {self._path.name}, {len(self._calls)} calls under way>"

    async def call(self, method: Method[Q, R], request: Q, fds: Sequence[int] = ()) -> R:
        """Send a request and return the reply. `fds` stay open. Raises the error of the handler, and `lost`
        of the error types. Cancelling this call cancels the handler."""
        answer = await self.open(method, request, fds)
        close_all(answer.fds)
        return answer.message

    async def open(self, method: Method[Q, R], request: Q, fds: Sequence[int] = ()) -> Answer[R]:
        """Like `call`, returning the reply with its descriptors; the caller must `release` the answer."""
        return await self._finish(await self._begin(method, request, fds))

    async def stream(
        self,
        method: StreamMethod[Q, R, U],
        request: Q,
        on_update: Callable[[U, list[int]], None],
        fds: Sequence[int] = (),
    ) -> Answer[R]:
        """Like `open`; `on_update` is called for each received update, with its descriptors, which it must
        close. It must not block."""
        return await self._finish(await self._begin(method, request, fds, on_update))

    async def start(
        self,
        method: Method[Q, R],
        request: Q,
        fds: Sequence[int] = (),
        on_update: Callable[[Any, list[int]], None] | None = None,
        *,
        connect: bool = True,
    ) -> PendingCall[R]:
        """Send a request and return the running call. `connect=False` is for a request that depends on
        earlier ones: it raises `lost` of the error types if there is no connection."""
        if not connect and self._stream is None:
            raise self._errors.lost(f"there is no connection to {self._path.name}")
        return await self._begin(method, request, fds, on_update, None if connect else self._stream)

    def cancel(self, call: PendingCall[Any]) -> None:
        """Cancel a call and its handler, or release its answer."""
        answer = call.answer
        if not answer.done():
            answer.cancel()
        if self._forget(call.number) is not None:
            self._release(self._stream, call.number)
        elif not answer.cancelled() and answer.exception() is None:
            answer.result().close()

    async def notify(self, method: Method[Q, None], request: Q, fds: Sequence[int] = ()) -> None:
        """Send a request without a reply. Raises `lost` of the error types if it cannot be sent."""
        await self._send(await self._connect(), (NOTIFICATION, method.name, request), fds)

    async def connect(self) -> None:
        """Connect if necessary. Raises `lost` of the error types after the last attempt."""
        await self._connect()

    async def wait_until_lost(self) -> None:
        """Wait until the connection has ended and every running call has failed."""
        await self._lost.wait()

    async def aclose(self) -> None:
        """Close the connection; running calls fail."""
        if self._stream is not None:
            self._on_lost(self._stream)
        await self._tasks.aclose()

    async def _connect(self) -> MessageStream:
        if self._stream is not None:
            return self._stream
        async with self._connecting:
            delays = iter(self._reconnect)
            while self._stream is None:
                try:
                    self._stream = await connect(self._path, decode_response)
                except OSError as error:
                    delay = next(delays, None)
                    if delay is None:
                        raise self._errors.lost(
                            f"no process listens on {self._path.name}: {error}"
                        ) from error
                    await asyncio.sleep(delay)
                else:
                    self._lost.clear()
                    self._tasks.spawn(self._receive_all(self._stream), "receive")
            return self._stream

    async def _begin(
        self,
        method: Method[Q, R],
        request: Q,
        fds: Sequence[int],
        on_update: Callable[[Any, list[int]], None] | None = None,
        stream: MessageStream | None = None,
    ) -> PendingCall[R]:
        await self._slots.acquire()
        call: PendingCall[R] = PendingCall(next(self._numbers), method, on_update)
        self._calls[call.number] = call
        try:
            stream = stream or await self._connect()
            message = (call.number, method.name, request)
            trace = tracing.context_text()
            await self._send(stream, (*message, trace) if trace else message, fds)
        except BaseException:
            self.cancel(call)
            raise
        return call

    async def _send(self, stream: MessageStream, message: object, fds: Sequence[int] = ()) -> None:
        try:
            await stream.send(message, fds)
        except StreamClosedError as error:
            raise self._errors.lost(f"the process behind {self._path.name} ended") from error

    async def _finish(self, call: PendingCall[R]) -> Answer[R]:
        try:
            return await call.answer
        except asyncio.CancelledError:
            self.cancel(call)
            raise

    def _forget(self, number: int) -> PendingCall[Any] | None:
        call = self._calls.pop(number, None)
        if call is not None:
            self._slots.release()
        return call

    def _release(self, stream: MessageStream | None, number: int) -> None:
        if stream is not None and stream is self._stream:
            self._tasks.spawn(self._send_cancel(stream, number), "cancel")

    @staticmethod
    async def _send_cancel(stream: MessageStream, number: int) -> None:
        with contextlib.suppress(StreamClosedError):  # a server releases everything with the connection
            await stream.send((number, CANCEL, None))

    async def _receive_all(self, stream: MessageStream) -> None:
        why = _ENDED
        try:
            while True:
                response, fds = await stream.receive()
                self._on_response(stream, response, fds)
        except StreamClosedError:
            pass
        except MessageError as error:
            why = f"sent what this process cannot read: {error}"
            _log.error("closing the connection to another process: %s %s", self._path.name, why)
        finally:
            self._on_lost(stream, why)

    def _on_response(self, stream: MessageStream, response: RpcResponse, fds: list[int]) -> None:
        """Raises MessageError, which fails the call of this response, too: it is still under way then."""
        is_update = response.kind == "update"
        call = self._calls.get(response.number)
        message: Any
        try:
            message = self._decode(call.method, response) if call and not call.answer.done() else None
        except Exception as error:
            close_all(fds)
            method = call.method.name if call is not None else ""
            raise MessageError(f"the {response.kind} of {method!r} is malformed: {error}") from error
        if not is_update:
            self._forget(response.number)
        if call is None or call.answer.done():
            close_all(fds)  # it was cancelled
            # Cancelled in this turn of the loop: `cancel` found it forgotten.
            if call is not None and not is_update:
                self._release(stream, response.number)
        elif is_update:
            assert call.on_update is not None
            call.on_update(message, fds)
        elif response.kind == "reply":
            release = partial(self._release, stream, response.number)
            call.answer.set_result(Answer(message, fds, release))
        else:
            call.answer.set_exception(message)

    def _decode(self, method: Method[Any, Any], response: RpcResponse) -> Any:
        if response.kind == "error":
            return self._errors.decode(decode_error(response.body))
        if response.kind == "reply":
            return method.decode_reply(response.body)
        assert isinstance(method, StreamMethod)
        return method.decode_update(response.body)

    def _on_lost(self, stream: MessageStream, why: str = _ENDED) -> None:
        stream.close()
        if stream is not self._stream:
            return
        self._stream = None
        for number in list(self._calls):
            call = self._forget(number)
            if call is not None and not call.answer.done():
                call.answer.set_exception(self._errors.lost(f"the process behind {self._path.name} {why}"))
        self._lost.set()
