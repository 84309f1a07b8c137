"""Client and server of the assembler: HTTP workers request frames from the coordinator over a Unix socket.

Law: the worker numbers its requests, and replies arrive in any order; a frame is sent as a descriptor. A
lost connection fails pending requests with Busy. A client may retry them because addresses are
idempotent; the next request reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.core.frame_address import AnyFrameAddress, Frame, FrameResult  # noqa: TC001  msgspec reads the annotations
from meshd.rpc.unix_messages import StreamClosedError, accept_streams, connect
from meshd.util.admission import current_tenant, tenant_scope
from meshd.util.async_tasks import BackgroundTasks
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.core.frame_address import FrameSource
    from meshd.rpc.unix_messages import MessageStream


class FrameRequest(msgspec.Struct, frozen=True, tag="ask"):
    """`account`: whom the work is charged to."""

    number: int
    address: AnyFrameAddress
    account: str = ""


class ReleaseFrame(msgspec.Struct, frozen=True, tag="forget"):
    """The worker is through with this request: it has sent the frame, or nobody waits for it any more."""

    number: int


class FrameReply(msgspec.Struct, frozen=True):
    """Either `error` (a BatchError's document) or a frame, whose memfd comes along. `fetch`, `prepare`:
    seconds of its making."""

    number: int
    size: int = 0
    rows: int = 0
    result: FrameResult = "miss"
    error: dict[str, Any] | None = None
    fetch: float = 0.0
    prepare: float = 0.0


_RESTARTING = "the node's assembler is restarting"


class AssemblerClient:
    """Use on one event loop only; `aclose` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: MessageStream | None = None
        self._tasks = BackgroundTasks("remote-assembler")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}

    def __repr__(self) -> str:
        return f"<RemoteAssembler {self._path.name}, {len(self._waiting)} frames asked for>"

    async def get_frame(self, address: AnyFrameAddress) -> Frame:
        """As Assembler.frame; Busy, too, while the steward is away."""
        stream = await self._connected()
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(stream, FrameRequest(number, address, current_tenant()))
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().close()
            else:
                self._through(stream, number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def aclose(self) -> None:
        """Close the connection; whoever waits gets Busy."""
        if self._stream is not None:
            self._stream.close()
        await self._tasks.aclose()

    async def _connected(self) -> MessageStream:
        if self._stream is None:
            try:
                self._stream = await connect(self._path)
            except OSError as error:
                raise busy(_RESTARTING) from error
            self._tasks.spawn(self._listen(self._stream), "listen")
        return self._stream

    async def _send(self, stream: MessageStream, message: FrameRequest | ReleaseFrame) -> None:
        try:
            await stream.send(message)
        except StreamClosedError as error:
            raise busy(_RESTARTING) from error

    def _through(self, stream: MessageStream, number: int) -> None:
        if stream is self._stream:
            self._tasks.spawn(self._forget(stream, number), "forget")

    async def _forget(self, stream: MessageStream, number: int) -> None:
        with contextlib.suppress(BatchError):
            await self._send(stream, ReleaseFrame(number))

    async def _listen(self, stream: MessageStream) -> None:
        try:
            while True:
                body, fds = await stream.receive()
                self._settle(stream, msgspec.convert(body, FrameReply), fds)
        except StreamClosedError:
            pass
        finally:
            self._lost(stream)

    def _settle(self, stream: MessageStream, answer: FrameReply, fds: Sequence[int]) -> None:
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():
            for fd in fds:
                os.close(fd)
        elif answer.error is not None:
            waiting.set_exception(BatchError.from_document(answer.error))
        else:
            done = partial(self._through, stream, answer.number)
            took = FrameTiming(answer.fetch, answer.prepare)
            waiting.set_result(Frame(fds[0], answer.size, answer.rows, answer.result, done=done, took=took))

    def _lost(self, stream: MessageStream) -> None:
        stream.close()
        if self._stream is stream:
            self._stream = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(busy(_RESTARTING))


_log = logging.getLogger(__name__)


async def serve_assembler(assembler: FrameSource, listener: socket.socket) -> None:
    """Answer workers on `listener` until cancelled. A worker that goes away takes its requests with it."""

    async def serve(stream: MessageStream) -> None:
        await _Conversation(assembler, stream).run()

    await accept_streams(listener, serve)


class _Conversation:
    """One worker's requests, any number at a time."""

    def __init__(self, assembler: FrameSource, stream: MessageStream) -> None:
        self._assembler, self._stream = assembler, stream
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, Frame] = {}

    async def run(self) -> None:
        try:
            while True:
                body, fds = await self._stream.receive()
                for fd in fds:
                    os.close(fd)
                self._take(msgspec.convert(body, FrameRequest | ReleaseFrame))
        finally:
            for task in self._tasks.values():
                task.cancel()
            for frame in self._held.values():
                frame.close()

    def _take(self, message: FrameRequest | ReleaseFrame) -> None:
        if isinstance(message, ReleaseFrame):
            task, frame = self._tasks.get(message.number), self._held.pop(message.number, None)
            if task is not None:
                task.cancel()
            if frame is not None:
                frame.close()
            return
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks[message.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    async def _answer(self, ask: FrameRequest) -> None:
        try:
            with tenant_scope(ask.account):
                frame = await self._assembler.get_frame(ask.address)
        except BatchError as error:
            await self._say(FrameReply(ask.number, error=error.to_document()))
            return
        except Exception:
            _log.exception("assembling failed", extra={"address": repr(ask.address)[:300]})
            failure = BatchError("InternalError", "the frame could not be assembled; the node's log says why")
            await self._say(FrameReply(ask.number, error=failure.to_document()))
            return
        self._held[ask.number] = frame  # its memory counts until the worker has sent it
        took = frame.took
        answer = FrameReply(
            ask.number, frame.size, frame.rows, frame.result, fetch=took.fetch, prepare=took.prepare
        )
        await self._say(answer, frame.fd)

    async def _say(self, answer: FrameReply, *fds: int) -> None:
        try:
            await self._stream.send(answer, fds)
        except StreamClosedError:
            _log.debug("a worker went away before its answer")
