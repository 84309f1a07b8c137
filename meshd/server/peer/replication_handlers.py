"""Peer handlers for replication: replica changes, replica data, and ownership handover.

Law: a change under an older map is refused (421), once on arrival and again, by the store's fence, at
commit. Data streams into the store and is durable before its metadata is read. A handover is answered
only under the map by which the caller is the new owner.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from meshd.cluster.replication.primary_handover import HANDOVER_PATH
from meshd.cluster.replication.replicated_store import ReplicatedStore
from meshd.cluster.replication.replicator import BYTES_PATH, CHANGE_PATH
from meshd.core.error_mapping import to_s3_error
from meshd.rpc.peer_client import StaleMapError
from meshd.server.peer.endpoint import peer_reply, peer_route
from meshd.store.engine.write_fence import epoch_scope
from meshd.store.errors import NoSuchUploadError, ReplicaLacksError, StaleEpochError, StoreError
from meshd.store.replica.changes import ReplicaAck, ReplicaChange, ReplicaFacts
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.cluster_view import ClusterView
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.store.api import ObjectStore, ReplicaWriter
    from meshd.store.replica.changes import Applied
    from meshd.util.clock import Clock


T = TypeVar("T")
_MAX_FACTS: Final = 8 << 20  # an object of 10,000 parts, and all that is said of it
_encode = msgspec.msgpack.Encoder().encode
_decode_change = msgspec.msgpack.Decoder(ReplicaChange).decode
_decode_facts = msgspec.msgpack.Decoder(ReplicaFacts).decode


class ReplicaHandlers:
    """One a process."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<ReplicaDoors of {self._mesh.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """The doors."""
        return [
            peer_route("POST", CHANGE_PATH, self.apply_change),
            peer_route("POST", BYTES_PATH, self.receive_data),
        ]

    async def apply_change(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        told: ReplicaChange = _decode_or_refuse(_decode_change, await call.read_body(request, _MAX_FACTS))
        return self._answer(await self._apply_under_fence(told.epoch, self._store.apply_change(told.change)))

    async def receive_data(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        self._require_current_map(call.map_version)
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        try:
            bucket, key, size = query["bucket"], query["key"], int(query["size"])
        except (KeyError, ValueError) as error:
            raise S3Error("InvalidArgument", "bucket, key and size must be given") from error
        writer = self._store.replica_writer(bucket, key, size=size)
        try:
            return self._answer(await self._receive(writer, size, call.iter_body(request)))
        except StoreError as error:
            raise to_s3_error(error) from error
        finally:
            await writer.abort()

    async def _receive(self, writer: ReplicaWriter, size: int, pieces: AsyncIterator[bytes]) -> ReplicaAck:
        left, ending = size, bytearray()
        if not left:
            await writer.make_durable()
        async for piece in pieces:
            data = memoryview(piece)[:left] if left else memoryview(b"")
            if data:
                await writer.write(data if len(data) < len(piece) else piece)
                left -= len(data)
                if not left:
                    await writer.make_durable()
            ending += piece[len(data) :]
            if len(ending) > _MAX_FACTS:
                raise S3Error("EntityTooLarge")
        facts: ReplicaFacts = _decode_or_refuse(_decode_facts, bytes(ending))
        return await self._apply_under_fence(facts.epoch, writer.commit_at_stamp(facts.record, facts.part))

    async def _apply_under_fence(self, epoch: int, doing: Awaitable[Applied]) -> ReplicaAck:
        """What the store made of it. Raises StaleMapError, S3Error."""
        try:
            self._require_current_map(epoch)
            with epoch_scope(epoch):
                applied = await doing
            self._require_current_map(epoch)
        except StaleEpochError as error:
            raise StaleMapError(error.version) from error
        except ReplicaLacksError:
            return ReplicaAck(trouble="lacks")
        except NoSuchUploadError:
            return ReplicaAck(trouble="ended")
        except StoreError as error:
            raise to_s3_error(error) from error
        finally:
            if isinstance(doing, Coroutine):
                doing.close()
        metrics.replica_facts.labels("yes" if applied.changed else "no").inc()
        return ReplicaAck(applied.newest, applied.changed)

    def _require_current_map(self, epoch: int) -> None:
        """Raises StaleMapError: whoever decided by an older map may not be the decider any more."""
        version = self._mesh.current_map().version
        if epoch < version:
            raise StaleMapError(version)

    def _answer(self, taken: ReplicaAck) -> web.StreamResponse:
        return peer_reply(_encode(taken), self._clock.now_ms() // 1000)


def _decode_or_refuse(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error


_PATIENCE: Final = 1.0  # seconds for the caller's map to arrive here, too


def handover_peer_routes(store: ObjectStore, mesh: ClusterView, clock: Clock) -> list[HttpRoute]:
    """The door; none of a node that is alone for ever. `store`: the one that tells the other nodes."""
    if not isinstance(store, ReplicatedStore):
        return []
    return [peer_route("POST", HANDOVER_PATH, HandoverHandler(store, mesh, clock).hand_over)]


class HandoverHandler:
    """One a process."""

    def __init__(self, store: ReplicatedStore, mesh: ClusterView, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<HandoverDoor of {self._mesh.node_id}>"

    async def hand_over(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        await call.read_body(request, 0)
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        if "bucket" not in query or "key" not in query:
            raise S3Error("InvalidArgument", "bucket and key must be given")
        mesh = self._mesh
        if call.map_version > mesh.current_map().version:
            await mesh.wait_for_newer_map(call.map_version - 1, _PATIENCE)
        node = mesh.current_map().node(call.node_id)
        if call.map_version != mesh.current_map().version or node is None:
            raise StaleMapError(mesh.current_map().version)
        try:
            await self._store.hand_over(query["bucket"], query["key"], call.map_version, node)
        except StoreError as error:
            raise to_s3_error(error) from error
        return peer_reply(b"", self._clock.now_ms() // 1000)
