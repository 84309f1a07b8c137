"""Shards origin work over the worker processes of a node; each key has one worker.

The hash of a key alone determines its worker, which the others reach over a Unix socket. While that worker is
being replaced, calls fail with OriginDownError. Processes share the memory of a fetch instead of copying it:
its descriptor is sent once, with `FetchStarted`.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from meshd.origins.cache.in_flight import InFlightPiece
from meshd.origins.client import origin_api
from meshd.origins.client.origin_api import (
    ObjectFacts,
    OriginDownError,
    OriginMissingError,
)
from meshd.rpc.process_client import ProcessClient, Reconnect
from meshd.rpc.process_rpc import ErrorTypes, ErrorValue, Method, StreamMethod
from meshd.rpc.process_server import ProcessServer
from meshd.rpc.unix_messages import listen
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.store.records import WriteContext

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.cache.fetcher import Fetcher
    from meshd.origins.write_back import OriginWriter
    from meshd.rpc.process_client import Answer
    from meshd.rpc.process_server import ServerCall


class KeyRequest(msgspec.Struct, frozen=True):
    """A call about one key of a bucket."""

    bucket: str
    key: str


class FetchRequest(KeyRequest, frozen=True):
    """Fetch piece `number` of the version with this ETag; "" for any version."""

    number: int
    etag: str


class FinishedRequest(KeyRequest, frozen=True):
    """Asks whether everything that began under an older `version` of the map has ended at the origin."""

    version: int


class FetchStarted(msgspec.Struct, frozen=True, tag="began"):
    """The origin has answered: `have` of `length` bytes are in the file whose descriptor comes with this
    message, from `base` on."""

    facts: ObjectFacts
    length: int
    base: int
    have: int


class FetchProgress(msgspec.Struct, frozen=True, tag="grew"):
    """`have` bytes are in the file now."""

    have: int


class DeleteRequest(KeyRequest, frozen=True):
    """Delete a key at its origin, for a client whose request this node accepted under this map version; see
    `WriteContext`."""

    accepted_by: str
    map_version: int


FetchUpdate = FetchStarted | FetchProgress
FETCH: StreamMethod[FetchRequest, FetchUpdate, FetchUpdate] = StreamMethod(
    "fetch", FetchRequest, FetchUpdate, FetchUpdate
)
"""The reply is the update that completes the piece."""
CHECK: Method[KeyRequest, ObjectFacts] = Method("check", KeyRequest, ObjectFacts)
FORGET: Method[KeyRequest, None] = Method("forget", KeyRequest, None)
WRITE_BACK: Method[KeyRequest, str] = Method("write-back", KeyRequest, str)
DELETE: Method[DeleteRequest, None] = Method("delete", DeleteRequest, None)
IS_FINISHED: Method[FinishedRequest, bool] = Method("is-finished", FinishedRequest, bool)
ERRORS: Final = ErrorTypes(
    [
        origin_api.OriginMissingError,
        origin_api.OriginChangedError,
        origin_api.OriginRangeError,
        origin_api.OriginRefusedError,
        origin_api.OriginCredentialsError,
        origin_api.OriginDownError,
        origin_api.OriginPieceError,
        origin_api.OriginKeyError,
        NotPrimaryError,
        NotReplicatedError,
    ],
    unexpected=lambda: OriginDownError("the fetch failed; the node's log has the details"),
    lost=lambda _: OriginDownError("the process that fetches this key is being restarted; retry"),
)


class WorkerError(msgspec.Struct, frozen=True, tag="failed"):
    """An error for another node, by the name of its class. `number`: 0, which earlier releases expect."""

    number: int
    kind: str
    message: str


def encode_error(error: Exception) -> WorkerError:
    """Encode an error for another node."""
    value = ERRORS.encode(error) or ERRORS.encode(ERRORS.unexpected())
    assert value is not None
    return WorkerError(0, value.kind, value.message)


def decode_error(failed: WorkerError) -> Exception:
    """Return the error that another node encoded."""
    return ERRORS.decode(ErrorValue(failed.kind, failed.message))


_RECONNECT: Final = Reconnect((0.1,) * 19)
_STEP: Final = 512 << 10  # bytes per progress message, after the first


class FetchWorker(Protocol):
    """Does the work of one worker, in this process or behind its socket."""

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece: ...

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts: ...

    async def forget_object(self, bucket: Bucket, key: str) -> None: ...

    async def write_back(self, bucket: Bucket, key: str) -> str: ...

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None: ...

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool: ...


class LocalFetchWorker:
    """The worker of this process."""

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

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None:
        await self._writer.delete_at_origin(bucket, key, context)

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        return await self._writer.is_finished(bucket, key, version)


class WorkerShards:
    """All workers of the node, by key. `own` is the worker of this process, at `index`."""

    def __init__(
        self, sockets: Sequence[Path], index: int | None = None, own: FetchWorker | None = None
    ) -> None:
        self._workers: list[FetchWorker] = [
            own if own is not None and number == index else FetchWorkerClient(path)
            for number, path in enumerate(sockets)
        ]

    def __repr__(self) -> str:
        return f"<WorkerShards of {len(self._workers)}>"

    def worker_for(self, bucket: str, key: str) -> FetchWorker:
        """Return the worker of a key."""
        if len(self._workers) == 1:
            return self._workers[0]
        return self._workers[zlib.crc32(f"{bucket}\0{key}".encode()) % len(self._workers)]

    async def aclose(self) -> None:
        for fetch_worker in self._workers:
            if isinstance(fetch_worker, FetchWorkerClient):
                await fetch_worker.aclose()


class FetchWorkerClient:
    """Another worker. Use on one event loop only."""

    def __init__(self, path: Path) -> None:
        self._client = ProcessClient(path, ERRORS, reconnect=_RECONNECT)

    def __repr__(self) -> str:
        return f"<FetchWorkerClient of {self._client!r}>"

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        flight = InFlightPiece()
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_update(update: FetchUpdate, fds: list[int]) -> None:
            if isinstance(update, FetchStarted):
                flight.set_response(update.facts, update.length, (fds[0], update.base))
            flight.extend_to(update.have)
            if not began.done():
                began.set_result(None)

        def on_answer(answer: asyncio.Future[Answer[FetchUpdate]]) -> None:
            if began.cancelled():
                return  # the caller has given up; received descriptors are closed
            error = ERRORS.lost("") if answer.cancelled() else answer.exception()
            if isinstance(error, Exception):
                flight.fail(error)
            else:
                on_update(answer.result().message, answer.result().take_fds())
                flight.finish()
            if not began.done():
                began.set_result(None)

        request = FetchRequest(bucket.name, key, number, etag)
        call = await self._client.start(FETCH, request, on_update=on_update)
        call.answer.add_done_callback(on_answer)
        try:
            await began
        except BaseException:
            self._client.cancel(call)
            flight.release()
            raise
        return flight

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts:
        return await self._client.call(CHECK, KeyRequest(bucket.name, key))

    async def forget_object(self, bucket: Bucket, key: str) -> None:
        await self._client.call(FORGET, KeyRequest(bucket.name, key))

    async def write_back(self, bucket: Bucket, key: str) -> str:
        return await self._client.call(WRITE_BACK, KeyRequest(bucket.name, key))

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None:
        request = DeleteRequest(bucket.name, key, context.accepted_by, context.map_version)
        await self._client.call(DELETE, request)

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        return await self._client.call(IS_FINISHED, FinishedRequest(bucket.name, key, version))

    async def aclose(self) -> None:
        await self._client.aclose()


async def serve_fetches(path: Path, fetch_worker: FetchWorker, cache_store: CacheStore) -> None:
    """Answer the other processes of the node until cancelled."""
    handlers = _FetchHandlers(fetch_worker, cache_store)
    server = ProcessServer(ERRORS)
    server.register(FETCH, handlers.fetch)
    server.register(CHECK, handlers.check)
    server.register(FORGET, handlers.forget)
    server.register(WRITE_BACK, handlers.write_back)
    server.register(DELETE, handlers.delete)
    server.register(IS_FINISHED, handlers.is_finished)
    with listen(path) as listener:
        await server.serve_forever(listener)


class _FetchHandlers:
    def __init__(self, worker: FetchWorker, cache_store: CacheStore) -> None:
        self._worker, self._cache_store = worker, cache_store

    def _bucket(self, request: KeyRequest) -> Bucket:
        bucket = self._cache_store.backed_bucket(request.bucket)
        if bucket is None:
            raise OriginMissingError(f"there is no bucket {request.bucket} with an origin")
        return bucket

    async def fetch(self, request: FetchRequest, call: ServerCall) -> FetchUpdate:
        bucket = self._bucket(request)
        flight = await self._worker.fetch_piece(bucket, request.key, request.number, request.etag)
        try:
            facts = await flight.wait_for_facts()
            # The facts are sent with the first bytes.
            have = await flight.wait_for_bytes(min(flight.length, 1))
            started = FetchStarted(facts, flight.length, flight.base, have)
            if have == flight.length:
                call.attach(os.dup(flight.fd))
                return started
            await call.update(started, [flight.fd])
            while True:
                have = await flight.wait_for_bytes(min(flight.length, have + _STEP))
                if have == flight.length:
                    return FetchProgress(have)
                await call.update(FetchProgress(have))
        finally:
            flight.release()

    async def check(self, request: KeyRequest, call: ServerCall) -> ObjectFacts:
        return await self._worker.check_origin(self._bucket(request), request.key)

    async def forget(self, request: KeyRequest, call: ServerCall) -> None:
        await self._worker.forget_object(self._bucket(request), request.key)

    async def write_back(self, request: KeyRequest, call: ServerCall) -> str:
        return await self._worker.write_back(self._bucket(request), request.key)

    async def delete(self, request: DeleteRequest, call: ServerCall) -> None:
        context = WriteContext(request.accepted_by, request.map_version)
        await self._worker.delete_at_origin(self._bucket(request), request.key, context)

    async def is_finished(self, request: FinishedRequest, call: ServerCall) -> bool:
        return await self._worker.is_finished(self._bucket(request), request.key, request.version)
