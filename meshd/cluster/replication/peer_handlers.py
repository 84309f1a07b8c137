"""Peer handlers for replication: replica changes and data, handover of names, forwarded writes.

Law: a replica change under an older map is refused (421), once on arrival and again, by the store's fence,
at commit; data is durable before its metadata is read. A handover is answered only under the map by which
the caller is the new primary. A forwarded write is carried out only for a name that this node owns: else
the response is 421 with this node's map version, and nothing was changed. The node that received a
forwarded write has authorized the client and verified the bytes.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.primary_handover import HAND_OVER
from meshd.cluster.replication.replicator import APPLY_CHANGE, MAX_FACTS_BYTES, RECEIVE_DATA
from meshd.cluster.replication.write_forwarding import (
    FORWARD_REQUEST,
    FORWARD_WRITE,
    AbortUploadRequest,
    AmendRequest,
    CompleteUploadRequest,
    CreateUploadRequest,
    DeleteRequest,
    WriteResult,
    WriteSpec,
    result_of_error,
)
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import decode_message, handler
from meshd.store.errors import (
    NoSuchUploadError,
    NotPrimaryError,
    ReplicaLacksError,
    StaleEpochError,
    StoreError,
)
from meshd.store.replica.changes import (
    ReplicaAck,
    ReplicaFacts,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.write_context import WriteContext
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.primary_handover import HandedName
    from meshd.cluster.replication.primary_writes import PrimaryWrites
    from meshd.cluster.replication.replicator import ReplicaData
    from meshd.cluster.replication.write_forwarding import ForwardedData, ForwardedRequest
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore, ObjectWriter, ReplicaWriter, StoreReader, StoreWriter
    from meshd.store.records import Removed, Upload
    from meshd.store.replica.changes import Applied, ReplicaChange

_decode_facts: Final = msgspec.msgpack.Decoder(ReplicaFacts).decode
_decode_spec: Final = msgspec.msgpack.Decoder(WriteSpec).decode


class ReplicaHandlers:
    """One a process. `store`: this node's own."""

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
        return ReplicaAck(applied.newest, applied.changed)

    def _require_current_map(self, epoch: int) -> None:
        """Raises StaleMapError: the primary of an older map may not be the primary any more."""
        version = self._mesh.current_map().version
        if epoch < version:
            raise StaleMapError(version)


class HandoverHandler:
    """One per process."""

    def __init__(self, primary: PrimaryWrites, mesh: ClusterView) -> None:
        self._primary, self._mesh = primary, mesh

    @handler(HAND_OVER)
    async def hand_over(self, name: HandedName, context: CallContext) -> None:
        cluster = self._mesh.current_map()
        node = cluster.node(context.node_id)
        if context.map_version != cluster.version or node is None:
            raise StaleMapError(cluster.version)
        await self._primary.hand_over(name.bucket, name.key, context.map_version, node)


class ForwardedWriteHandlers:
    """One a process. `store`: this node's own; `replicated`: the store that commits writes as the primary."""

    def __init__(self, store: StoreReader, replicated: StoreWriter, mesh: ClusterView) -> None:
        self._store, self._replicated, self._mesh = store, replicated, mesh

    @handler(FORWARD_REQUEST)
    async def change_name(self, asked: ForwardedRequest, context: CallContext) -> WriteResult:
        self._mesh.require_primary(asked.bucket, asked.key)
        return await self._result(self._execute(asked, _write_context(context)))

    @handler(FORWARD_WRITE)
    async def write_object(self, data: ForwardedData, context: CallContext) -> WriteResult:
        self._mesh.require_primary(data.bucket, data.key)
        if not data.upload:
            writer = self._replicated.writer(data.bucket, data.key, size=data.size)
        else:
            upload = self._store.get_upload(data.bucket, data.key, data.upload)
            if upload is None:
                return WriteResult(trouble="upload")
            writer = self._replicated.part_writer(upload, data.number, data.size)
        return await self._result(
            _write_body(writer, data.size, context.iter_body(), _write_context(context))
        )

    async def _result(self, doing: Awaitable[WriteResult]) -> WriteResult:
        """Raises StaleMapError, StoreError, S3Error."""
        try:
            return await doing
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
        except StoreError as error:
            decided = result_of_error(error)
            if decided is None:
                raise
            return decided

    async def _execute(self, asked: ForwardedRequest, context: WriteContext) -> WriteResult:
        """Raises StoreError."""
        replicated = self._replicated
        if isinstance(asked, DeleteRequest):
            return _deletion_result(await self._delete(asked, context))
        if isinstance(asked, AmendRequest):
            record = await replicated.amend(
                asked.bucket, asked.key, asked.version, tags=asked.tags, acl=asked.acl, context=context
            )
            return WriteResult(without_local_fields(record))
        if isinstance(asked, CreateUploadRequest):
            upload = await self._begin_upload(asked.about, context)
            return WriteResult(upload=upload_without_local_fields(upload))
        found = self._store.get_upload(asked.bucket, asked.key, asked.upload_id)
        if found is None:
            raise NoSuchUploadError(f"upload {asked.upload_id} was completed or aborted")
        if isinstance(asked, CompleteUploadRequest):
            record = await replicated.complete_upload(
                found,
                asked.parts,
                asked.meta,
                asked.conditions,
                etags=asked.etags,
                versioning=asked.versioning,
                context=context,
            )
            return WriteResult(without_local_fields(record))
        assert isinstance(asked, AbortUploadRequest)
        return WriteResult(stamp=await replicated.abort_upload(found, context=context))

    async def _delete(self, asked: DeleteRequest, context: WriteContext) -> Removed:
        replicated, bucket, key, conditions = self._replicated, asked.bucket, asked.key, asked.conditions
        if asked.version is None:
            return await replicated.delete(
                bucket, key, conditions=conditions, versioning=asked.versioning, context=context
            )
        return await replicated.delete_version(
            bucket, key, asked.version, conditions=conditions, context=context
        )

    async def _begin_upload(self, about: Upload, context: WriteContext) -> Upload:
        return await self._replicated.create_upload(
            about.bucket,
            about.key,
            headers=about.headers,
            metadata=about.metadata,
            checksum_algorithm=about.checksum_algorithm,
            checksum_type=about.checksum_type,
            owner=about.owner,
            tags=about.tags,
            acl=about.acl,
            born=about.born,
            context=context,
        )


def _write_context(call: CallContext) -> WriteContext:
    """Returns the context of a write that the calling node accepted under its map and forwarded."""
    return WriteContext(call.node_id, call.map_version, forwarded=True)


async def _write_body(
    writer: ObjectWriter, size: int, pieces: AsyncIterator[bytes], context: WriteContext
) -> WriteResult:
    """Writes `size` bytes, then commits by the `WriteSpec` that follows. Raises StoreError, S3Error."""
    try:
        spec = await _receive_body(writer, size, pieces)
        record = await writer.commit(
            spec.meta, conditions=spec.conditions, versioning=spec.versioning, context=context
        )
    except BaseException:
        await writer.abort()
        raise
    return WriteResult(without_local_fields(record))


async def _receive_body(writer: ObjectWriter, size: int, pieces: AsyncIterator[bytes]) -> WriteSpec:
    left, ending = size, bytearray()
    async for piece in pieces:
        data = piece[:left]
        if data:
            await writer.write(data)
            left -= len(data)
        ending += piece[len(data) :]
        if len(ending) > MAX_FACTS_BYTES:
            raise S3Error("EntityTooLarge")
    return decode_message(bytes(ending), _decode_spec)


def _deletion_result(removed: Removed) -> WriteResult:
    record, marker = removed.record, removed.marker
    return WriteResult(
        None if record is None else without_local_fields(record),
        None if marker is None else without_local_fields(marker),
        removed.stamp,
    )
