"""The doors through which a node takes what others decided.

Law: whoever goes by an older map than this node is refused (421), before and, by the store's fence, at the
commit. Bytes stream into the store as they come and are durable before their facts are asked for.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from meshd.cluster.delivering import BYTES, CHANGE
from meshd.net.peers import StaleMapError
from meshd.service.semantics.translation import translate
from meshd.store.changes import Facts, Taken, Told
from meshd.store.epochs import decided_by
from meshd.store.errors import NoSuchUploadError, ReplicaLacksError, StaleEpochError, StoreError
from meshd.telemetry import metrics
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.store.changes import Applied
    from meshd.store.interface import ObjectStore, ReplicaWriter
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

T = TypeVar("T")
_MAX_FACTS: Final = 8 << 20  # an object of 10,000 parts, and all that is said of it
_encode = msgspec.msgpack.Encoder().encode
_told = msgspec.msgpack.Decoder(Told).decode
_facts = msgspec.msgpack.Decoder(Facts).decode


class ReplicaDoors:
    """One a process."""

    def __init__(self, store: ObjectStore, mesh: Mesh, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<ReplicaDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The doors."""
        return [peer_route("POST", CHANGE, self.change), peer_route("POST", BYTES, self.data)]

    async def change(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        told: Told = _read(_told, await call.read(request, _MAX_FACTS))
        return self._answer(await self._enter(told.epoch, self._store.apply(told.change)))

    async def data(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        self._admit(call.map_version)
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        try:
            bucket, key, size = query["bucket"], query["key"], int(query["size"])
        except (KeyError, ValueError) as error:
            raise S3Error("InvalidArgument", "bucket, key and size must be given") from error
        writer = self._store.replica_writer(bucket, key, size=size)
        try:
            return self._answer(await self._receive(writer, size, call.pieces(request)))
        except StoreError as error:
            raise translate(error) from error
        finally:
            await writer.abort()

    async def _receive(self, writer: ReplicaWriter, size: int, pieces: AsyncIterator[bytes]) -> Taken:
        left, ending = size, bytearray()
        if not left:
            await writer.settle()
        async for piece in pieces:
            data = memoryview(piece)[:left] if left else memoryview(b"")
            if data:
                await writer.write(data if len(data) < len(piece) else piece)
                left -= len(data)
                if not left:
                    await writer.settle()
            ending += piece[len(data) :]
            if len(ending) > _MAX_FACTS:
                raise S3Error("EntityTooLarge")
        facts: Facts = _read(_facts, bytes(ending))
        return await self._enter(facts.epoch, writer.commit_as(facts.record, facts.part))

    async def _enter(self, epoch: int, doing: Awaitable[Applied]) -> Taken:
        """What the store made of it. Raises StaleMapError, S3Error."""
        try:
            self._admit(epoch)
            with decided_by(epoch):
                applied = await doing
            self._admit(epoch)
        except StaleEpochError as error:
            raise StaleMapError(error.version) from error
        except ReplicaLacksError:
            return Taken(trouble="lacks")
        except NoSuchUploadError:
            return Taken(trouble="ended")
        except StoreError as error:
            raise translate(error) from error
        finally:
            if isinstance(doing, Coroutine):
                doing.close()
        metrics.replica_facts.labels("yes" if applied.changed else "no").inc()
        return Taken(applied.newest, applied.changed)

    def _admit(self, epoch: int) -> None:
        """Raises StaleMapError: whoever decided by an older map may not be the decider any more."""
        version = self._mesh.map().version
        if epoch < version:
            raise StaleMapError(version)

    def _answer(self, taken: Taken) -> web.StreamResponse:
        return peer_reply(_encode(taken), self._clock.now_ms() // 1000)


def _read(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
