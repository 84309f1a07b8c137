"""Replicated store: the StoreWriter to which the services of a cluster node write.

Law: the primary checks and commits a write locally, under the fence of the map version by which it is
primary, then replicates it with the same stamp. The caller gets its answer when every node of the write
set has the write durably. So a read takes the local store and asks no other node. This also holds on a
node that is alone in its cluster: another node may join before a write in progress commits.
Large bodies of known size stream to the other owners while they come in; small ones, and whatever a node
missed, are sent after the local commit. A slow or absent node delays a write only briefly: its stream is
dropped and the data is sent again after the commit. Memory per stream is a few chunks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from meshd.cluster.replication.batched_puts import BatchedPuts
from meshd.cluster.replication.forwarded_writes import AmendRequest, DeleteRequest, WriteResult, WriteSpec
from meshd.cluster.replication.full_nodes import nothing_changed
from meshd.cluster.replication.replica_streams import ReplicaStream
from meshd.cluster.replication.replicated_uploads import ReplicatedUploads
from meshd.cluster.replication.replicator import INLINE_BYTES, ReplicaData
from meshd.cluster.replication.unconfirmed_writes import PARALLEL_CHANGES
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    DiskFullError,
    NoSuchUploadError,
    NotPrimaryError,
    StaleEpochError,
)
from meshd.store.records import INTERNAL_WRITE, NULL, Removed
from meshd.store.replica.changes import Marked, ReplicaFacts, VersionGone, without_local_fields

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.primary_writes import WriteAction
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore, StoreWriter
    from meshd.store.records import Meta, NewObject, Record, Upload, WriteContext
    from meshd.store.writer_api import Buffer, ObjectWriter
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning


class ReplicatedStore(ReplicatedUploads):
    """Writes to `store`, this node's own, and replicates to the other owners; see StoreWriter. One per
    process."""

    def __repr__(self) -> str:
        return f"<ReplicatedStore of {self._store!r} in {self._mesh!r}>"

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        return ReplicatedWriter(self, self._store.writer(bucket, key, size=size), bucket, key, size)

    async def put_many(
        self,
        bucket: str,
        objects: Sequence[NewObject],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Sequence[Record]:
        batch = BatchedPuts(self._store, self, self._mesh, self._clock, self.primary, self.forwarder)
        return await self.primary.run_to_completion(batch.put(bucket, objects, versioning, context))

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        own = self._store.part_writer(upload, number, size)
        return ReplicatedWriter(self, own, upload.bucket, upload.key, size, (upload, number))

    @property
    def node_id(self) -> str:
        """This node's."""
        return self._mesh.node_id

    def other_replicas(self, bucket: str, key: str) -> list[Node]:
        """Returns the other nodes that must have a name in the current map, if this node is its primary."""
        route = self._mesh.route_for(bucket, key)
        if route.primary is None or route.primary.node_id != self._mesh.node_id:
            return []
        return [node for node in route.write_set if node.node_id != self._mesh.node_id]

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        if not self._mesh.single_node:
            await self.primary.run_to_completion(self._wait_replicated(bucket, key, record))

    async def _wait_replicated(self, bucket: str, key: str, record: Record | None) -> None:
        await self.primary.ensure_lease_valid(bucket, key)
        if record is not None and record.version:  # newer versions do not replace it
            await self.primary.unconfirmed.confirm_version(bucket, key, record)
        await self.primary.unconfirmed.confirm_newest(bucket, key)

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        act = partial(self._check_now, bucket, key, conditions)
        try:
            await act(context)
        except (ConditionFailedError, ConditionMissingError):
            if self._mesh.single_node:
                raise
            with suppress(NotPrimaryError):  # the primary checks them when it commits
                await self.primary.run_to_completion(self.primary.run_checked(bucket, key, act, context))

    async def _check_now(self, bucket: str, key: str, conditions: Conditions, context: WriteContext) -> None:
        try:
            await self._store.check_conditions(bucket, key, conditions, context=context)
        except (ConditionFailedError, ConditionMissingError) as error:
            if context.is_past_deadline(self._clock.stamp()):
                raise StaleEpochError(context.epoch) from error
            raise

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        def act(fenced: WriteContext) -> Awaitable[Removed]:
            return self._store.delete(
                bucket, key, conditions=conditions, versioning=versioning, context=fenced
            )

        request = DeleteRequest(bucket, key, None, conditions, versioning)
        here = partial(self._delete, bucket, key, act, context)
        return await self._run_on_primary(request, here, WriteResult.as_removed, context)

    async def _delete(
        self, bucket: str, key: str, act: WriteAction[Removed], context: WriteContext, version: str = NULL
    ) -> Removed:
        removed = await self.primary.run_checked(bucket, key, act, context)
        version = "" if version == NULL else version
        if removed.marker is not None:
            newest = await self.primary.replicator.replicate_change(
                Marked(bucket, key, without_local_fields(removed.marker)), bucket, key
            )
            marker = await self.primary.unconfirmed.restamp_if_behind(bucket, key, removed.marker, newest)
            return Removed(removed.record, marker)
        await self.primary.unconfirmed.confirm_next(bucket, key)
        if removed.record is not None:
            gone = VersionGone(bucket, key, removed.record.version, removed.stamp)
            await self.primary.unconfirmed.restamp_removal(
                gone, await self.primary.replicator.replicate_change(gone, bucket, key)
            )
        else:
            await self.primary.unconfirmed.replicate_tombstone(bucket, key, version)
        return removed

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        unique, removed = tuple(dict.fromkeys(keys)), dict[str, Removed]()
        for start in range(0, len(unique), PARALLEL_CHANGES):
            some = unique[start : start + PARALLEL_CHANGES]
            done = await asyncio.gather(
                *[self.delete(bucket, key, versioning=versioning, context=context) for key in some]
            )
            removed.update(zip(some, done, strict=True))
        return removed

    async def delete_version(
        self,
        bucket: str,
        key: str,
        version: str,
        *,
        conditions: Conditions | None = None,
        stamp: int | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        def act(fenced: WriteContext) -> Awaitable[Removed]:
            return self._store.delete_version(
                bucket, key, version, conditions=conditions, stamp=stamp, context=fenced
            )

        request = DeleteRequest(bucket, key, version, conditions, stamp=stamp)
        here = partial(self._delete, bucket, key, act, context, version)
        return await self._run_on_primary(request, here, WriteResult.as_removed, context)

    async def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        def act(fenced: WriteContext) -> Awaitable[Record]:
            return self._store.amend(bucket, key, version, tags=tags, acl=acl, context=fenced)

        request = AmendRequest(bucket, key, version, tags, acl)
        here = partial(self._amend, bucket, key, act, context)
        return await self._run_on_primary(request, here, WriteResult.require_record, context)

    async def _amend(self, bucket: str, key: str, act: WriteAction[Record], context: WriteContext) -> Record:
        record = await self.primary.run_as_primary(bucket, key, act, context)
        return await self.primary.unconfirmed.replicate_amendment(bucket, key, record)

    async def link(
        self,
        bucket: str,
        key: str,
        source: Record,
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        def act(fenced: WriteContext) -> Awaitable[Record]:
            self.primary.replicator.reject_if_full(bucket, key, source.size)
            return self._store.link(
                bucket, key, source, meta, conditions, versioning=versioning, context=fenced
            )

        forward = partial(
            self._link_on_primary, (bucket, key), source, WriteSpec(meta, conditions, versioning), context
        )
        here = partial(self._link, bucket, key, act, context)
        return await self.primary.run_to_completion(
            self.forwarder.run_on_primary(bucket, key, here, forward, context)
        )

    async def _link_on_primary(
        self, name: tuple[str, str], source: Record, written: WriteSpec, context: WriteContext, node: Node
    ) -> Record:
        """Sends a copy as data to the primary, with the parts in which the source was uploaded."""
        meta = msgspec.structs.replace(written.meta, parts=source.parts)
        written = msgspec.structs.replace(written, meta=meta)
        return await self.forwarder.forward_write(
            node, name, source.size, self.primary.replicator.read_chunks(source), written, context
        )

    async def _link(self, bucket: str, key: str, act: WriteAction[Record], context: WriteContext) -> Record:
        record = await self.primary.run_checked(bucket, key, act, context)
        record = await self.primary.replicate_and_restamp(bucket, key, record)
        return self.primary.acknowledge(record, context)


class ReplicatedWriter:
    """Writes locally and streams to the other owners; see ObjectWriter. `part`: the upload and part number,
    for a part."""

    def __init__(
        self,
        store: ReplicatedStore,
        local: ObjectWriter,
        bucket: str,
        key: str,
        size: int | None,
        part: tuple[Upload, int] | None = None,
    ) -> None:
        self._store, self._local, self._part = store, local, part
        self._bucket, self._key = bucket, key
        self._streams: list[ReplicaStream] = []
        self._total = 0
        if size is not None and size > INLINE_BYTES:
            data = ReplicaData(bucket, key, size)
            self._streams = [
                ReplicaStream(store.primary.replicator, node, data)
                for node in store.other_replicas(bucket, key)
            ]

    def __repr__(self) -> str:
        return f"<ReplicatedWriter of {self._local!r} to {self._streams}>"

    async def write(self, data: Buffer) -> None:
        self._total += len(data)
        if not self._streams:
            await self._local.write(data)
            return
        piece = data if type(data) is bytes else bytes(data)
        try:
            await self._local.write(piece)
        except DiskFullError as error:
            raise nothing_changed(self._store.node_id, error) from error
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
        return await self._store.primary.run_to_completion(self._commit(spec, context))

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
            record, epoch = await self._store.forwarder.run_on_primary(
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
        return self._store.primary.acknowledge(await self._replicate(record, epoch), context)

    async def _commit_locally(self, spec: WriteSpec, context: WriteContext) -> tuple[Record, int]:
        """Commits locally; returns the record and the map version. Raises StoreError."""

        async def commit(fenced: WriteContext) -> tuple[Record, int]:
            self._store.primary.replicator.reject_if_full(self._bucket, self._key, self._total)
            record = await self._local.commit(
                spec.meta, conditions=spec.conditions, versioning=spec.versioning, context=fenced
            )
            return record, fenced.epoch

        try:
            return await self._store.primary.run_as_primary(self._bucket, self._key, commit, context)
        except (ConditionFailedError, ConditionMissingError):
            await self._abort_streams()
            await self._store.primary.unconfirmed.confirm_newest(self._bucket, self._key)
            raise
        except NoSuchUploadError:
            await self._abort_streams()
            if self._part is not None:
                await self._store.replicate_upload_end(self._part[0])
            raise

    async def _commit_on_primary(
        self, spec: WriteSpec, context: WriteContext, node: Node
    ) -> tuple[Record, int]:
        """Forwards the write to the node that is primary now; returns its record, and 0. Raises StoreError,
        WriteNotTakenError."""
        await self._abort_streams()
        part = None if self._part is None else (self._part[0].upload_id, self._part[1])
        name = (self._bucket, self._key)
        record = await self._store.forwarder.forward_write(
            node, name, self._total, self._local.read_back(), spec, context, part
        )
        return record, 0

    async def _replicate(self, record: Record, epoch: int) -> Record:
        store, part = self._store, None
        if self._part is not None:
            part = store.committed_part(*self._part, record)
            if part is None:  # replaced, or the upload has ended: the other nodes must get that instead
                await self._abort_streams()
                await store.replicate_part(*self._part, epoch)
                return record
        facts = ReplicaFacts(epoch, without_local_fields(record), part)
        answers = await asyncio.gather(*[stream.send_metadata(facts) for stream in self._streams])
        had = {
            stream.node.node_id: ack
            for stream, ack in zip(self._streams, answers, strict=True)
            if ack is not None and ack.trouble != "lacks"
        }
        self._streams = []
        if self._part is not None:
            await store.replicate_part(*self._part, epoch, had, record.size)
            return record
        newest = max([ack.newest for ack in had.values()], default=0)
        return await store.primary.replicate_and_restamp(self._bucket, self._key, record, had, newest)


def replicated_store(store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> StoreWriter:
    """Returns the store for services to write to: the given store itself on a standalone node."""
    return store if mesh.standalone else ReplicatedStore(store, mesh, peers, clock)


if TYPE_CHECKING:

    def _is_a_store(replicated: ReplicatedStore) -> StoreWriter:
        return replicated  # a type check only
