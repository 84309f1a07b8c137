"""The assembler as an HTTP worker sees it: the same interface, over a Unix socket to the steward.

Law: a lost connection fails what is under way with Busy (the client asks again: addresses are idempotent),
and the next request connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from meshd.assembly.addressing import Frame
from meshd.assembly.errors import BatchError, busy
from meshd.assembly.messages import Answer, Ask, Forget
from meshd.kit.accounts import account
from meshd.kit.tasks import Tasks
from meshd.net.unixmessages import StreamClosedError, connect
from meshwire.servertimings import Took

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.assembly.addressing import Asked
    from meshd.net.unixmessages import MessageStream

_RESTARTING = "the node's assembler is restarting"


class RemoteAssembler:
    """Use on one event loop only; `aclose` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: MessageStream | None = None
        self._tasks = Tasks("remote-assembler")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Frame]] = {}

    def __repr__(self) -> str:
        return f"<RemoteAssembler {self._path.name}, {len(self._waiting)} frames asked for>"

    async def frame(self, address: Asked) -> Frame:
        """As Assembler.frame; Busy, too, while the steward is away."""
        stream = await self._connected()
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send(stream, Ask(number, address, account()))
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

    async def _send(self, stream: MessageStream, message: Ask | Forget) -> None:
        try:
            await stream.send(message)
        except StreamClosedError as error:
            raise busy(_RESTARTING) from error

    def _through(self, stream: MessageStream, number: int) -> None:
        if stream is self._stream:
            self._tasks.spawn(self._forget(stream, number), "forget")

    async def _forget(self, stream: MessageStream, number: int) -> None:
        with contextlib.suppress(BatchError):
            await self._send(stream, Forget(number))

    async def _listen(self, stream: MessageStream) -> None:
        try:
            while True:
                body, fds = await stream.receive()
                self._settle(stream, msgspec.convert(body, Answer), fds)
        except StreamClosedError:
            pass
        finally:
            self._lost(stream)

    def _settle(self, stream: MessageStream, answer: Answer, fds: Sequence[int]) -> None:
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():
            for fd in fds:
                os.close(fd)
        elif answer.error is not None:
            waiting.set_exception(BatchError.from_document(answer.error))
        else:
            done = partial(self._through, stream, answer.number)
            took = Took(answer.fetch, answer.prepare)
            waiting.set_result(Frame(fds[0], answer.size, answer.rows, answer.result, done=done, took=took))

    def _lost(self, stream: MessageStream) -> None:
        stream.close()
        if self._stream is stream:
            self._stream = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(busy(_RESTARTING))
