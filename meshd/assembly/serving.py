"""The assembler's door in the steward: a Unix socket on which HTTP workers ask for frames."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from meshd.assembly.errors import BatchError
from meshd.assembly.messages import Answer, Ask, Forget
from meshd.kit.accounts import charged
from meshd.net.unixmessages import StreamClosedError, accept_streams

if TYPE_CHECKING:
    import socket

    from meshd.assembly.addressing import Frame, FrameSource
    from meshd.net.unixmessages import MessageStream

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
                self._take(msgspec.convert(body, Ask | Forget))
        finally:
            for task in self._tasks.values():
                task.cancel()
            for frame in self._held.values():
                frame.close()

    def _take(self, message: Ask | Forget) -> None:
        if isinstance(message, Forget):
            task, frame = self._tasks.get(message.number), self._held.pop(message.number, None)
            if task is not None:
                task.cancel()
            if frame is not None:
                frame.close()
            return
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks[message.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    async def _answer(self, ask: Ask) -> None:
        try:
            with charged(ask.account):
                frame = await self._assembler.frame(ask.address)
        except BatchError as error:
            await self._say(Answer(ask.number, error=error.to_document()))
            return
        except Exception:
            _log.exception("assembling failed", extra={"address": repr(ask.address)[:300]})
            failure = BatchError("InternalError", "the frame could not be assembled; the node's log says why")
            await self._say(Answer(ask.number, error=failure.to_document()))
            return
        self._held[ask.number] = frame  # its memory counts until the worker has sent it
        took = frame.took
        answer = Answer(
            ask.number, frame.size, frame.rows, frame.result, fetch=took.fetch, prepare=took.prepare
        )
        await self._say(answer, frame.fd)

    async def _say(self, answer: Answer, *fds: int) -> None:
        try:
            await self._stream.send(answer, fds)
        except StreamClosedError:
            _log.debug("a worker went away before its answer")
