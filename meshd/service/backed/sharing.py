"""Fetches across the processes of a node: each worker does what belongs to it, and asks the others.

Law: a key's worker follows from its hash alone. A connection that is lost fails what is under way; the next
question connects anew. Bytes are not copied between processes: their memory is shared.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from meshd.kit.tasks import Tasks
from meshd.net.unixmessages import StreamClosedError, accept_streams, connect, listen
from meshd.origin.errors import OriginDownError, OriginMissingError
from meshd.service.backed.messages import (
    Answer,
    Ask,
    Began,
    Failed,
    Grew,
    Told,
    failure,
    raised,
)
from meshd.service.caching.flights import Flight

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.control.buckets import Bucket
    from meshd.net.unixmessages import MessageStream
    from meshd.origin.interface import Facts
    from meshd.service.backed.writing import OriginWriter
    from meshd.service.caching.fetching import Fetcher
    from meshd.service.caching.shelf import Shelf

_log = logging.getLogger("meshd.origins")
_TRIES: Final = 20
_PAUSE: Final = 0.1  # seconds between looks for a worker that is being replaced
_STEP: Final = 512 << 10  # bytes that another process is told of at a time, after the first


class Doer(Protocol):
    """Does what belongs to one worker: here, or behind its socket."""

    async def fetch(self, bucket: Bucket, key: str, number: int, etag: str) -> Flight: ...

    async def check(self, bucket: Bucket, key: str) -> Facts: ...

    async def forget(self, bucket: Bucket, key: str) -> None: ...

    async def push(self, bucket: Bucket, key: str) -> str: ...

    async def remove(self, bucket: Bucket, key: str) -> None: ...

    async def quiet(self, bucket: Bucket, key: str, version: int) -> bool: ...


class OwnDoer:
    """This process."""

    def __init__(self, fetcher: Fetcher, writer: OriginWriter) -> None:
        self._fetcher, self._writer = fetcher, writer

    async def fetch(self, bucket: Bucket, key: str, number: int, etag: str) -> Flight:
        return self._fetcher.fetch(bucket, key, number, etag)

    async def check(self, bucket: Bucket, key: str) -> Facts:
        return await self._fetcher.check(bucket, key)

    async def forget(self, bucket: Bucket, key: str) -> None:
        await self._fetcher.forget(bucket, key)

    async def push(self, bucket: Bucket, key: str) -> str:
        return await self._writer.push(bucket, key)

    async def remove(self, bucket: Bucket, key: str) -> None:
        await self._writer.remove(bucket, key)

    async def quiet(self, bucket: Bucket, key: str, version: int) -> bool:
        return await self._writer.quiet(bucket, key, version)


class Crew:
    """All workers of the node, by what belongs to whom. `own`: which of them this process is."""

    def __init__(self, sockets: Sequence[Path], index: int | None = None, own: Doer | None = None) -> None:
        self._doers: list[Doer] = [
            own if own is not None and number == index else RemoteDoer(path)
            for number, path in enumerate(sockets)
        ]

    def __repr__(self) -> str:
        return f"<Crew of {len(self._doers)}>"

    def of(self, bucket: str, key: str) -> Doer:
        """Whom a key belongs to."""
        if len(self._doers) == 1:
            return self._doers[0]
        return self._doers[zlib.crc32(f"{bucket}\0{key}".encode()) % len(self._doers)]

    async def aclose(self) -> None:
        for doer in self._doers:
            if isinstance(doer, RemoteDoer):
                await doer.aclose()


class RemoteDoer:
    """Another worker. Use on one event loop only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: MessageStream | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._flights: dict[int, tuple[Flight, asyncio.Future[None]]] = {}
        self._answers: dict[int, asyncio.Future[Told]] = {}
        self._tasks = Tasks("crew")

    def __repr__(self) -> str:
        return f"<RemoteDoer {self._path.name}>"

    async def fetch(self, bucket: Bucket, key: str, number: int, etag: str) -> Flight:
        stream, asked = await self._connected(), next(self._numbers)
        flight = Flight()
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flights[asked] = (flight, began)
        try:
            await self._send(stream, Ask(asked, "fetch", bucket.name, key, number, etag))
            await began
        except BaseException:
            self._flights.pop(asked, None)
            flight.release()
            raise
        return flight

    async def check(self, bucket: Bucket, key: str) -> Facts:
        told = await self._ask("check", bucket, key)
        if told.facts is None:
            raise OriginMissingError(f"the origin of {bucket.name} has no {key[:200]!r}")
        return told.facts

    async def forget(self, bucket: Bucket, key: str) -> None:
        await self._ask("forget", bucket, key)

    async def push(self, bucket: Bucket, key: str) -> str:
        return (await self._ask("push", bucket, key)).text

    async def remove(self, bucket: Bucket, key: str) -> None:
        await self._ask("remove", bucket, key)

    async def quiet(self, bucket: Bucket, key: str, version: int) -> bool:
        return (await self._ask("quiet", bucket, key, version)).quiet

    async def _ask(self, what: str, bucket: Bucket, key: str, version: int = 0) -> Told:
        stream, asked = await self._connected(), next(self._numbers)
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._answers[asked] = answer
        try:
            await self._send(stream, Ask(asked, what, bucket.name, key, version=version))
            return await answer
        finally:
            self._answers.pop(asked, None)

    async def aclose(self) -> None:
        if self._stream is not None:
            self._stream.close()
        await self._tasks.aclose()

    async def _connected(self) -> MessageStream:
        async with self._connecting:
            for _ in range(_TRIES):
                if self._stream is not None:
                    return self._stream
                try:
                    self._stream = await connect(self._path)
                except OSError:
                    await asyncio.sleep(_PAUSE)
                    continue
                self._tasks.spawn(self._listen(self._stream), "listen")
        if self._stream is None:
            raise OriginDownError("the process that fetches this is being replaced; ask again")
        return self._stream

    async def _send(self, stream: MessageStream, message: Ask) -> None:
        try:
            await stream.send(message)
        except StreamClosedError as error:
            raise OriginDownError("the process that fetches this is being replaced; ask again") from error

    async def _listen(self, stream: MessageStream) -> None:
        try:
            while True:
                body, fds = await stream.receive()
                self._settle(msgspec.convert(body, Answer), fds)
        except StreamClosedError:
            pass
        finally:
            self._lost(stream)

    def _settle(self, answer: Answer, fds: Sequence[int]) -> None:
        flying = self._flights.get(answer.number)
        if isinstance(answer, Told) or flying is None:
            for fd in fds:
                os.close(fd)
            waiting = self._answers.get(answer.number)
            if waiting is not None and not waiting.done():
                if isinstance(answer, Told):
                    waiting.set_result(answer)
                elif isinstance(answer, Failed):
                    waiting.set_exception(raised(answer))
            return
        flight, began = flying
        if isinstance(answer, Began):
            flight.began(answer.facts, answer.length, (fds[0], answer.base))
            flight.grew(answer.have)
            if answer.have == answer.length:
                flight.ended()
        elif isinstance(answer, Grew):
            flight.grew(answer.have)
            if answer.done:
                flight.ended()
        else:
            flight.failed(raised(answer))
        if not began.done():
            began.set_result(None)
        if flight.done:
            del self._flights[answer.number]

    def _lost(self, stream: MessageStream) -> None:
        stream.close()
        if self._stream is stream:
            self._stream = None
        error = OriginDownError("the process that fetched this was replaced; ask again")
        flights, self._flights = self._flights, {}
        for flight, began in flights.values():
            flight.failed(error)
            if not began.done():
                began.set_result(None)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


async def serve_fetches(path: Path, doer: Doer, shelf: Shelf) -> None:
    """Answer the other processes of the node until cancelled."""
    listener = listen(path)

    async def serve(stream: MessageStream) -> None:
        await _Conversation(doer, shelf, stream).run()

    try:
        await accept_streams(listener, serve)
    finally:
        listener.close()


class _Conversation:
    """One process's questions, any number at a time."""

    def __init__(self, doer: Doer, shelf: Shelf, stream: MessageStream) -> None:
        self._doer, self._shelf, self._stream = doer, shelf, stream
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                body, fds = await self._stream.receive()
                for fd in fds:
                    os.close(fd)
                self._take(msgspec.convert(body, Ask))
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _take(self, message: Ask) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks[message.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    async def _answer(self, ask: Ask) -> None:
        with suppress(StreamClosedError):
            try:
                await self._do(ask)
            except StreamClosedError:
                raise
            except Exception as error:
                answer = failure(ask.number, error)
                if answer.kind != type(error).__name__:
                    _log.exception("a question of another process failed", extra={"what": ask.what})
                await self._stream.send(answer)

    async def _do(self, ask: Ask) -> None:
        bucket = self._shelf.backed(ask.bucket)
        if bucket is None:
            raise OriginMissingError(f"there is no bucket {ask.bucket} with an origin")
        if ask.what == "fetch":
            await self._fetch(bucket, ask)
        elif ask.what == "check":
            await self._stream.send(Told(ask.number, await self._doer.check(bucket, ask.key)))
        elif ask.what in {"forget", "remove"}:
            await (self._doer.forget if ask.what == "forget" else self._doer.remove)(bucket, ask.key)
            await self._stream.send(Told(ask.number))
        elif ask.what == "quiet":
            quiet = await self._doer.quiet(bucket, ask.key, ask.version)
            await self._stream.send(Told(ask.number, quiet=quiet))
        else:
            await self._stream.send(Told(ask.number, text=await self._doer.push(bucket, ask.key)))

    async def _fetch(self, bucket: Bucket, ask: Ask) -> None:
        flight = await self._doer.fetch(bucket, ask.key, ask.chunk, ask.etag)
        try:
            facts = await flight.started()
            told = await flight.reaches(min(flight.length, 1))  # a head goes out with the first bytes
            began = Began(ask.number, facts, flight.length, flight.base, told)
            await self._stream.send(began, [flight.fd])
            while told < flight.length:
                told = await flight.reaches(min(flight.length, told + _STEP))
                await self._stream.send(Grew(ask.number, told, told == flight.length))
        finally:
            flight.release()
