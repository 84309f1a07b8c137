"""Replica handlers: a replica's side of the replicator's calls.

Law: a change or data under an older map is refused (421), on arrival and, by the store's fence, at commit;
data is durable before its metadata is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final, cast

import msgspec

from meshd.cluster.replication.replicator import (
    APPLY_CHANGE,
    MAX_FACTS_BYTES,
    RECEIVE_BATCH,
    RECEIVE_DATA,
    ReplicaAcks,
)
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import decode_message, handler
from meshd.store.errors import NoSuchUploadError, ReplicaLacksError, StaleEpochError
from meshd.store.records import WriteContext
from meshd.store.replica.changes import ReplicaAck, ReplicaFacts
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.replicator import ReplicaBatch, ReplicaData, ReplicaObject
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.store.replica.changes import Applied, ReplicaChange
    from meshd.store.writer_api import ReplicaWriter

_decode_facts: Final = msgspec.msgpack.Decoder(ReplicaFacts).decode


class ReplicaHandlers:
    """Applies what primaries send. One per process. `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView) -> None:
        self._store, self._mesh = store, mesh

    @handler(APPLY_CHANGE)
    async def apply_change(self, message: ReplicaChange, context: CallContext) -> ReplicaAck:
        fenced = WriteContext(epoch=message.epoch)
        return await self._apply_under_fence(
            message.epoch, self._store.apply_change(message.change, context=fenced)
        )

    @handler(RECEIVE_DATA)
    async def receive_data(self, data: ReplicaData, context: CallContext) -> ReplicaAck:
        self._require_current_map(context.map_version)
        writer = self._store.replica_writer(data.bucket, data.key, size=data.size)
        try:
            return await self._receive(writer, data.size, context.iter_body())
        finally:
            await writer.abort()

    @handler(RECEIVE_BATCH)
    async def receive_batch(self, batch: ReplicaBatch, context: CallContext) -> ReplicaAcks:
        self._require_current_map(batch.epoch)
        taking = [self._take(batch, new) for new in batch.objects]
        answers = await asyncio.gather(*taking, return_exceptions=True)  # none of them is abandoned
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return ReplicaAcks(tuple(cast("list[ReplicaAck]", answers)))

    async def _take(self, batch: ReplicaBatch, new: ReplicaObject) -> ReplicaAck:
        writer = self._store.replica_writer(batch.bucket, new.key, size=len(new.data))
        try:
            await writer.write(new.data)
            fenced = WriteContext(epoch=batch.epoch)
            return await self._apply_under_fence(
                batch.epoch, writer.commit_at_stamp(new.record, None, context=fenced)
            )
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
            if len(ending) > MAX_FACTS_BYTES:
                raise S3Error("EntityTooLarge")
        facts: ReplicaFacts = decode_message(bytes(ending), _decode_facts)
        fenced = WriteContext(epoch=facts.epoch)
        return await self._apply_under_fence(
            facts.epoch, writer.commit_at_stamp(facts.record, facts.part, context=fenced)
        )

    async def _apply_under_fence(self, epoch: int, doing: Awaitable[Applied]) -> ReplicaAck:
        """Awaits `doing`, a write under the fence of `epoch`, and returns the answer to it. Raises
        StaleMapError, StoreError."""
        try:
            self._require_current_map(epoch)
            applied = await doing
            self._require_current_map(epoch)
        except StaleEpochError as error:
            raise StaleMapError(error.version) from error
        except ReplicaLacksError:
            return ReplicaAck(trouble="lacks")
        except NoSuchUploadError:
            return ReplicaAck(trouble="ended")
        finally:
            if isinstance(doing, Coroutine):
                doing.close()
        metrics.replica_facts.labels("yes" if applied.changed else "no").inc()
        return ReplicaAck(applied.newest, applied.changed, amended=applied.amended)

    def _require_current_map(self, epoch: int) -> None:
        """Raises StaleMapError: the primary of an older map may not be the primary any more."""
        version = self._mesh.current_map().version
        if epoch < version:
            raise StaleMapError(version)
