"""Shards origin work over the processes of a node: each key has one worker, reached over a Unix socket.

Law: the hash of a key alone determines its worker. A lost connection fails pending requests; the next
request reconnects. Processes share the memory of a fetch instead of copying it. Messages are frozen
structs with explicit tags; a descriptor is sent with `FetchStarted` only.
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

from meshd.origins.cache.in_flight import InFlightPiece
from meshd.origins.client import origin_api
from meshd.origins.client.origin_api import (
    ObjectFacts,  # noqa: TC001  msgspec reads the annotations
    OriginDownError,
    OriginMissingError,
)
from meshd.rpc.unix_messages import StreamClosedError, accept_streams, connect, listen
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.control.buckets import Bucket
    from meshd.errors import MeshdError
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.cache.fetcher import Fetcher
    from meshd.origins.write_back import OriginWriter
    from meshd.rpc.unix_messages import MessageStream


class WorkerRequest(msgspec.Struct, frozen=True, tag="ask"):
    """`what`: fetch (a piece), check, forget, push, remove, quiet (by map `version`). `number` is the
    asker's, for the answers."""

    number: int
    what: str
    bucket: str
    key: str
    chunk: int = 0
    etag: str = ""
    version: int = 0


class FetchStarted(msgspec.Struct, frozen=True, tag="began"):
    """The origin has answered, and so many bytes are there; the descriptor is of the file that they come
    into, from `base` on."""

    number: int
    facts: ObjectFacts
    length: int
    base: int
    have: int


class FetchProgress(msgspec.Struct, frozen=True, tag="grew"):
    """So many bytes are there."""

    number: int
    have: int
    done: bool = False


class WorkerReply(msgspec.Struct, frozen=True, tag="told"):
    """The answer to what is no fetch."""

    number: int
    facts: ObjectFacts | None = None
    text: str = ""
    quiet: bool = False


class WorkerError(msgspec.Struct, frozen=True, tag="failed"):
    """An error, by the name of its class."""

    number: int
    kind: str
    message: str


WorkerAnswer = FetchStarted | FetchProgress | WorkerReply | WorkerError

_KINDS: dict[str, type[MeshdError]] = {
    kind.__name__: kind
    for kind in (
        origin_api.OriginMissingError,
        origin_api.OriginChangedError,
        origin_api.OriginRangeError,
        origin_api.OriginRefusedError,
        origin_api.OriginDownError,
        origin_api.OriginPieceError,
        origin_api.OriginKeyError,
        NotPrimaryError,
        NotReplicatedError,
    )
}


def encode_error(number: int, error: Exception) -> WorkerError:
    """An error on its way to another process, or node."""
    kind = type(error).__name__
    if kind in _KINDS:
        return WorkerError(number, kind, str(error))
    return WorkerError(number, "OriginDownError", "the fetch failed; the node's log says why")


def decode_error(failed: WorkerError) -> MeshdError:
    """The error that another process met, or node."""
    return _KINDS.get(failed.kind, origin_api.OriginDownError)(failed.message)


_log = logging.getLogger("meshd.origins")
_TRIES: Final = 20
_PAUSE: Final = 0.1  # seconds between looks for a worker that is being replaced
_STEP: Final = 512 << 10  # bytes that another process is told of at a time, after the first


class FetchWorker(Protocol):
    """Does what belongs to one worker: here, or behind its socket."""

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece: ...

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts: ...

    async def forget_object(self, bucket: Bucket, key: str) -> None: ...

    async def write_back(self, bucket: Bucket, key: str) -> str: ...

    async def delete_at_origin(self, bucket: Bucket, key: str) -> None: ...

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool: ...


class LocalFetchWorker:
    """This process."""

    def __init__(self, fetcher: Fetcher, writer: OriginWriter) -> None:
        self._fetcher, self._writer = fetcher, writer

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        return self._fetcher.start_fetch(bucket, key, number, etag)

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts:
        return await self._fetcher.check_origin(bucket, key)

    async def forget_object(self, bucket: Bucket, key: str) -> None:
        await self._fetcher.forget_object(bucket, key)

    async def write_back(self, bucket: Bucket, key: str) -> str:
        return await self._writer.write_back(bucket, key)

    async def delete_at_origin(self, bucket: Bucket, key: str) -> None:
        await self._writer.delete_at_origin(bucket, key)

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        return await self._writer.is_finished(bucket, key, version)


class WorkerShards:
    """All workers of the node, by what belongs to whom. `own`: which of them this process is."""

    def __init__(
        self, sockets: Sequence[Path], index: int | None = None, own: FetchWorker | None = None
    ) -> None:
        self._workers: list[FetchWorker] = [
            own if own is not None and number == index else FetchWorkerClient(path)
            for number, path in enumerate(sockets)
        ]

    def __repr__(self) -> str:
        return f"<Crew of {len(self._workers)}>"

    def worker_for(self, bucket: str, key: str) -> FetchWorker:
        """Whom a key belongs to."""
        if len(self._workers) == 1:
            return self._workers[0]
        return self._workers[zlib.crc32(f"{bucket}\0{key}".encode()) % len(self._workers)]

    async def aclose(self) -> None:
        for doer in self._workers:
            if isinstance(doer, FetchWorkerClient):
                await doer.aclose()


class FetchWorkerClient:
    """Another worker. Use on one event loop only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: MessageStream | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._flights: dict[int, tuple[InFlightPiece, asyncio.Future[None]]] = {}
        self._answers: dict[int, asyncio.Future[WorkerReply]] = {}
        self._tasks = BackgroundTasks("crew")

    def __repr__(self) -> str:
        return f"<RemoteDoer {self._path.name}>"

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        stream, asked = await self._connected(), next(self._numbers)
        flight = InFlightPiece()
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flights[asked] = (flight, began)
        try:
            await self._send(stream, WorkerRequest(asked, "fetch", bucket.name, key, number, etag))
            await began
        except BaseException:
            self._flights.pop(asked, None)
            flight.release()
            raise
        return flight

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts:
        told = await self._ask("check", bucket, key)
        if told.facts is None:
            raise OriginMissingError(f"the origin of {bucket.name} has no {key[:200]!r}")
        return told.facts

    async def forget_object(self, bucket: Bucket, key: str) -> None:
        await self._ask("forget", bucket, key)

    async def write_back(self, bucket: Bucket, key: str) -> str:
        return (await self._ask("push", bucket, key)).text

    async def delete_at_origin(self, bucket: Bucket, key: str) -> None:
        await self._ask("remove", bucket, key)

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        return (await self._ask("quiet", bucket, key, version)).quiet

    async def _ask(self, what: str, bucket: Bucket, key: str, version: int = 0) -> WorkerReply:
        stream, asked = await self._connected(), next(self._numbers)
        answer: asyncio.Future[WorkerReply] = asyncio.get_running_loop().create_future()
        self._answers[asked] = answer
        try:
            await self._send(stream, WorkerRequest(asked, what, bucket.name, key, version=version))
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

    async def _send(self, stream: MessageStream, message: WorkerRequest) -> None:
        try:
            await stream.send(message)
        except StreamClosedError as error:
            raise OriginDownError("the process that fetches this is being replaced; ask again") from error

    async def _listen(self, stream: MessageStream) -> None:
        try:
            while True:
                body, fds = await stream.receive()
                self._settle(msgspec.convert(body, WorkerAnswer), fds)
        except StreamClosedError:
            pass
        finally:
            self._lost(stream)

    def _settle(self, answer: WorkerAnswer, fds: Sequence[int]) -> None:
        flying = self._flights.get(answer.number)
        if isinstance(answer, WorkerReply) or flying is None:
            for fd in fds:
                os.close(fd)
            waiting = self._answers.get(answer.number)
            if waiting is not None and not waiting.done():
                if isinstance(answer, WorkerReply):
                    waiting.set_result(answer)
                elif isinstance(answer, WorkerError):
                    waiting.set_exception(decode_error(answer))
            return
        flight, began = flying
        if isinstance(answer, FetchStarted):
            flight.set_response(answer.facts, answer.length, (fds[0], answer.base))
            flight.extend_to(answer.have)
            if answer.have == answer.length:
                flight.finish()
        elif isinstance(answer, FetchProgress):
            flight.extend_to(answer.have)
            if answer.done:
                flight.finish()
        else:
            flight.fail(decode_error(answer))
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
            flight.fail(error)
            if not began.done():
                began.set_result(None)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


async def serve_fetches(path: Path, doer: FetchWorker, shelf: CacheStore) -> None:
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

    def __init__(self, doer: FetchWorker, shelf: CacheStore, stream: MessageStream) -> None:
        self._worker, self._cache_store, self._stream = doer, shelf, stream
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                body, fds = await self._stream.receive()
                for fd in fds:
                    os.close(fd)
                self._take(msgspec.convert(body, WorkerRequest))
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _take(self, message: WorkerRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks[message.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    async def _answer(self, ask: WorkerRequest) -> None:
        with suppress(StreamClosedError):
            try:
                await self._do(ask)
            except StreamClosedError:
                raise
            except Exception as error:
                answer = encode_error(ask.number, error)
                if answer.kind != type(error).__name__:
                    _log.exception("a question of another process failed", extra={"what": ask.what})
                await self._stream.send(answer)

    async def _do(self, ask: WorkerRequest) -> None:
        bucket = self._cache_store.backed_bucket(ask.bucket)
        if bucket is None:
            raise OriginMissingError(f"there is no bucket {ask.bucket} with an origin")
        if ask.what == "fetch":
            await self._fetch(bucket, ask)
        elif ask.what == "check":
            await self._stream.send(WorkerReply(ask.number, await self._worker.check_origin(bucket, ask.key)))
        elif ask.what in {"forget", "remove"}:
            await (self._worker.forget_object if ask.what == "forget" else self._worker.delete_at_origin)(
                bucket, ask.key
            )
            await self._stream.send(WorkerReply(ask.number))
        elif ask.what == "quiet":
            quiet = await self._worker.is_finished(bucket, ask.key, ask.version)
            await self._stream.send(WorkerReply(ask.number, quiet=quiet))
        else:
            await self._stream.send(
                WorkerReply(ask.number, text=await self._worker.write_back(bucket, ask.key))
            )

    async def _fetch(self, bucket: Bucket, ask: WorkerRequest) -> None:
        flight = await self._worker.fetch_piece(bucket, ask.key, ask.chunk, ask.etag)
        try:
            facts = await flight.wait_for_facts()
            told = await flight.wait_for_bytes(min(flight.length, 1))  # a head goes out with the first bytes
            began = FetchStarted(ask.number, facts, flight.length, flight.base, told)
            await self._stream.send(began, [flight.fd])
            while told < flight.length:
                told = await flight.wait_for_bytes(min(flight.length, told + _STEP))
                await self._stream.send(FetchProgress(ask.number, told, told == flight.length))
        finally:
            flight.release()
