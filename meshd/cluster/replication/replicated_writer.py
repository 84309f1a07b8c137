"""Replicated writer: writes an object or a part locally and streams it to the other owners as bytes arrive.

Law: large bodies of known size stream to the other owners while they come in; small ones, and whatever a
node missed, are sent after the local commit. A slow or absent node delays a write only briefly: its
stream is dropped and the data is sent again after the commit. Invariant: memory per stream is a few
chunks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.cluster.replication.replicator import INLINE_BYTES, ReplicaData
from meshd.cluster.replication.write_forwarding import WriteSpec
from meshd.errors import MeshdError
from meshd.rpc.peer_rpc import encode_message
from meshd.store.errors import ConditionFailedError, ConditionMissingError
from meshd.store.replica.changes import ReplicaFacts, without_local_fields
from meshd.store.write_context import INTERNAL_WRITE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.cluster.replication.primary_writes import PrimaryWrites
    from meshd.cluster.replication.replicator import Replicator
    from meshd.store.api import Buffer, ObjectWriter
    from meshd.store.records import Meta, Record, Upload
    from meshd.store.replica.changes import ReplicaAck
    from meshd.store.write_context import WriteContext
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning

_QUEUE_LENGTH: Final = 4  # chunks queued per node
_STALL_TIMEOUT: Final = 5.0  # seconds that a slow node may delay a writer


class ReplicaStream:
    """Streams bytes to one node, followed by their metadata."""

    def __init__(self, replicator: Replicator, node: Node, data: ReplicaData) -> None:
        self.node = node
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_LENGTH)
        self._facts: asyncio.Future[ReplicaFacts] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(replicator.send_stream(node, data, self._body()))
        self._task.add_done_callback(_retrieve_exception)

    def __repr__(self) -> str:
        return f"<Stream to {self.node.node_id}, {'over' if self._task.done() else 'open'}>"

    async def _body(self) -> AsyncGenerator[bytes, None]:
        while (piece := await self._queue.get()) is not None:
            yield piece
        yield encode_message(await self._facts)

    async def put_chunk(self, piece: bytes | None) -> None:
        """Queues more bytes; None ends them."""
        if self._task.done():
            return
        try:
            self._queue.put_nowait(piece)
        except asyncio.QueueFull:
            await self._wait_for_room(piece)

    async def _wait_for_room(self, piece: bytes | None) -> None:
        room = asyncio.ensure_future(self._queue.put(piece))
        await asyncio.wait((room, self._task), timeout=_STALL_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not room.done():
            room.cancel()
            self._task.cancel()

    async def send_metadata(self, facts: ReplicaFacts) -> ReplicaAck | None:
        """Sends the metadata; returns the node's reply, or None if it did not accept the data."""
        if not self._facts.done():
            self._facts.set_result(facts)
        try:
            return await self._task
        except (MeshdError, asyncio.CancelledError):
            if not self._task.done():
                raise
            return None

    async def abort(self) -> None:
        """Cancels the stream; the node discards what it received."""
        self._task.cancel()
        with suppress(asyncio.CancelledError, MeshdError):
            await self._task


def _retrieve_exception(task: asyncio.Task[ReplicaAck]) -> None:
    if not task.cancelled():
        task.exception()


class ReplicatedWriter:
    """Writes locally and streams to the other owners; see ObjectWriter. `part`: the upload and part number,
    for a part."""

    def __init__(
        self,
        primary: PrimaryWrites,
        local: ObjectWriter,
        bucket: str,
        key: str,
        size: int | None,
        part: tuple[Upload, int] | None = None,
    ) -> None:
        self._primary, self._local, self._part = primary, local, part
        self._bucket, self._key = bucket, key
        self._streams: list[ReplicaStream] = []
        self._total = 0
        if size is not None and size > INLINE_BYTES:
            data = ReplicaData(bucket, key, size)
            self._streams = [
                ReplicaStream(primary.replicator, node, data) for node in primary.other_replicas(bucket, key)
            ]

    def __repr__(self) -> str:
        return f"<ReplicatedWriter of {self._local!r} to {self._streams}>"

    async def write(self, data: Buffer) -> None:
        self._total += len(data)
        if not self._streams:
            await self._local.write(data)
            return
        piece = data if type(data) is bytes else bytes(data)
        await self._local.write(piece)
        for stream in self._streams:
            await stream.put_chunk(piece)

    async def write_borrowed(self, data: memoryview) -> None:
        if self._streams:
            await self.write(data)
            return
        self._total += len(data)
        await self._local.write_borrowed(data)

    async def commit(
        self,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        spec = WriteSpec(meta, conditions, versioning)
        return await self._primary.run_to_completion(self._commit(spec, context))

    def read_back(self) -> AsyncGenerator[bytes, None]:
        return self._local.read_back()

    async def abort(self) -> None:
        await self._abort_streams()
        await self._local.abort()

    async def _abort_streams(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.abort()

    async def _commit(self, spec: WriteSpec, context: WriteContext) -> Record:
        try:
            await asyncio.gather(*[stream.put_chunk(None) for stream in self._streams])
            record, epoch = await self._primary.forwarder.run_on_primary(
                self._bucket,
                self._key,
                partial(self._commit_locally, spec, context),
                partial(self._commit_on_primary, spec, context),
                context,
            )
        except BaseException:
            await self.abort()
            raise
        if not epoch:
            await self.abort()  # the primary has the bytes
            return record
        return await self._replicate(record, epoch)

    async def _commit_locally(self, spec: WriteSpec, context: WriteContext) -> tuple[Record, int]:
        """Commits locally; returns the record and the map version. Raises StoreError."""

        async def commit(fenced: WriteContext) -> tuple[Record, int]:
            record = await self._local.commit(
                spec.meta, conditions=spec.conditions, versioning=spec.versioning, context=fenced
            )
            return record, fenced.epoch

        try:
            return await self._primary.run_as_primary(self._bucket, self._key, commit, context)
        except (ConditionFailedError, ConditionMissingError):
            await self._abort_streams()
            await self._primary.confirm_newest(self._bucket, self._key)
            raise

    async def _commit_on_primary(
        self, spec: WriteSpec, context: WriteContext, node: Node
    ) -> tuple[Record, int]:
        """Forwards the write to the node that is primary now; returns its record, and 0. Raises StoreError,
        WriteNotTakenError."""
        await self._abort_streams()
        part = None if self._part is None else (self._part[0].upload_id, self._part[1])
        name = (self._bucket, self._key)
        record = await self._primary.forwarder.forward_write(
            node, name, self._total, self._local.read_back(), spec, context, part
        )
        return record, 0

    async def _replicate(self, record: Record, epoch: int) -> Record:
        primary, part = self._primary, None
        if self._part is not None:
            part = primary.committed_part(*self._part, record)
            if part is None:  # replaced, or the upload has ended: the other nodes must get that instead
                await self._abort_streams()
                await primary.replicate_part(*self._part)
                return record
        facts = ReplicaFacts(epoch, without_local_fields(record), part)
        answers = await asyncio.gather(*[stream.send_metadata(facts) for stream in self._streams])
        accepted = [
            (stream.node.node_id, ack)
            for stream, ack in zip(self._streams, answers, strict=True)
            if ack is not None and ack.trouble != "lacks"
        ]
        self._streams = []
        had, newest = (
            [node_id for node_id, _ in accepted],
            max([ack.newest for _, ack in accepted], default=0),
        )
        if self._part is not None:
            await primary.replicate_part(*self._part, had)
            return record
        return await primary.replicate_and_restamp(self._bucket, self._key, record, had, newest)
