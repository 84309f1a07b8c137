"""Many small objects in one request: the primaries of their names commit them, then they are replicated.

Law: what one node is primary of is one commit there, all or nothing; each object is acknowledged as a single
write is, once every node of its write set has it. Sending a batch to a replica only saves round trips: the
replicator then makes sure of each object, and sends what the batch did not bring about. With nodes of an
earlier release, which know no batches, objects are written one by one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.primary_writes import WriteNotTakenError, write_failed
from meshd.cluster.replication.replicator import ReplicaBatch, ReplicaObject
from meshd.cluster.replication.unconfirmed_writes import PARALLEL_CHANGES
from meshd.errors import MeshdError
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, handler
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.store.records import NewObject, Record, WriteContext  # noqa: TC001  msgspec reads annotations
from meshd.store.replica.changes import without_local_fields
from meshd.telemetry import metrics
from meshwire.s3.bucket_settings import Versioning  # noqa: TC001  msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.forwarded_writes import StoreForwarder
    from meshd.cluster.replication.primary_writes import PrimaryWrites
    from meshd.rpc.peer_client import PeerRefusedError
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore, StoreWriter
    from meshd.store.errors import StoreError
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_PATIENCE: Final = 15.0  # seconds for which objects without a primary are tried
_PAUSE: Final = 0.05
_ANSWER_TIMEOUT: Final = 30.0  # the primary may wait for its own replicas before it answers
_UNKNOWN_CALL: Final = frozenset({404, 405, 501})


class ForwardedPuts(msgspec.Struct, frozen=True):
    """Objects of which the receiving node is the primary."""

    bucket: str
    objects: tuple[NewObject, ...]
    versioning: Versioning = ""


class StoredRecords(msgspec.Struct, frozen=True):
    """The records of forwarded objects, in the same order."""

    records: tuple[Record, ...]


FORWARD_PUTS: Final = PeerCall(
    f"{PREFIX}replica/write-many",
    request=ForwardedPuts,
    response=StoredRecords,
    max_bytes=64 << 20,
    timeout=_ANSWER_TIMEOUT,
    map_wait=1.0,
)


class _UnknownCallError(MeshdError):
    """The node is of a release that knows no batches."""


class BatchedPuts:
    """`put_many` of the replicated store. `store`: this node's own; `single`: writes one object."""

    def __init__(
        self,
        store: ObjectStore,
        single: StoreWriter,
        mesh: ClusterView,
        clock: Clock,
        primary: PrimaryWrites,
        forwarder: StoreForwarder,
    ) -> None:
        self._store, self._single, self._mesh, self._clock = store, single, mesh, clock
        self._primary, self._forwarder = primary, forwarder

    async def put(
        self, bucket: str, objects: Sequence[NewObject], versioning: Versioning, context: WriteContext
    ) -> list[Record]:
        """See `StoreWriter.put_many`. Raises NotReplicatedError too, and NotPrimaryError for objects that
        were forwarded to this node."""
        done, left = dict[str, Record](), list(objects)
        deadline = self._clock.monotonic() + _PATIENCE
        while left:
            version = self._mesh.current_map().version
            groups = self._by_primary(bucket, left)
            if context.forwarded and any(node is not None for node, _ in groups):
                raise NotPrimaryError("another node is the primary of some of these names now")
            results = await asyncio.gather(
                *[self._put_group(bucket, node, some, versioning, context) for node, some in groups],
                return_exceptions=True,
            )
            left, why = [], None
            for (_, some), result in zip(groups, results, strict=True):
                if isinstance(result, NotPrimaryError | WriteNotTakenError):  # nothing was changed
                    left, why = left + some, result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    done.update(zip([new.key for new in some], result, strict=True))
            if why is not None:
                if context.forwarded:
                    raise NotPrimaryError(str(why)) from why
                if self._clock.monotonic() > deadline:
                    raise NotReplicatedError(f"no node acted as primary of all names: {why}") from why
                await self._mesh.wait_for_newer_map(version, _PAUSE)
        return [done[new.key] for new in objects]

    def _by_primary(
        self, bucket: str, objects: Sequence[NewObject]
    ) -> list[tuple[Node | None, list[NewObject]]]:
        """Group objects by their primary; None is this node. Raises NotReplicatedError."""
        groups: dict[str, tuple[Node | None, list[NewObject]]] = {}
        for new in objects:
            node = self._mesh.other_primary(bucket, new.key)
            groups.setdefault("" if node is None else node.node_id, (node, []))[1].append(new)
        return list(groups.values())

    async def _put_group(
        self,
        bucket: str,
        node: Node | None,
        objects: Sequence[NewObject],
        versioning: Versioning,
        context: WriteContext,
    ) -> Sequence[Record]:
        if node is None:
            return await self._put_here(bucket, objects, versioning, context)
        asked = ForwardedPuts(bucket, tuple(objects), versioning)
        try:
            stored = await self._forwarder.send(node, FORWARD_PUTS, asked, context, refused=_refusal)
        except _UnknownCallError:
            return [await self._put_one(bucket, new, versioning, context) for new in objects]
        metrics.replication_writes_forwarded.labels("done").inc(len(objects))
        return stored.records

    async def _put_one(
        self, bucket: str, new: NewObject, versioning: Versioning, context: WriteContext
    ) -> Record:
        writer = self._single.writer(bucket, new.key, size=len(new.data))
        try:
            await writer.write(new.data)
            return await writer.commit(new.meta, versioning=versioning, context=context)
        finally:
            await writer.abort()

    async def _put_here(
        self, bucket: str, objects: Sequence[NewObject], versioning: Versioning, context: WriteContext
    ) -> Sequence[Record]:
        async def commit(fenced: WriteContext) -> tuple[Sequence[Record], int]:
            for new in objects:
                self._primary.replicator.reject_if_full(bucket, new.key, len(new.data))
            records = await self._store.put_many(bucket, objects, versioning=versioning, context=fenced)
            return records, fenced.epoch

        keys = [new.key for new in objects]
        records, epoch = await self._primary.run_all_as_primary(bucket, keys, commit, context)
        if self._mesh.single_node:
            return records
        sent = [
            ReplicaObject(new.key, without_local_fields(record), new.data)
            for new, record in zip(objects, records, strict=True)
        ]
        return self._primary.acknowledge(await self._replicate(bucket, sent, records, epoch), context)

    async def _replicate(
        self, bucket: str, sent: Sequence[ReplicaObject], records: Sequence[Record], epoch: int
    ) -> list[Record]:
        wanted: dict[str, tuple[Node, list[int]]] = {}
        for number, new in enumerate(sent):
            for node in self._mesh.route_for(bucket, new.key).write_set:
                if node.node_id != self._mesh.node_id:
                    wanted.setdefault(node.node_id, (node, []))[1].append(number)
        had: list[set[str]] = [set() for _ in sent]
        newest = [0] * len(sent)

        async def send(node: Node, numbers: Sequence[int]) -> None:
            batch = ReplicaBatch(epoch, bucket, tuple(sent[number] for number in numbers))
            with suppress(MeshdError):  # the replicator sends what is missing
                acks = await self._primary.replicator.send_batch(node, batch)
                for number, ack in zip(numbers, acks, strict=True):
                    if not ack.trouble:
                        had[number].add(node.node_id)
                        newest[number] = max(newest[number], ack.newest)

        await asyncio.gather(*[send(*each) for each in wanted.values()])
        confirmed: list[Record] = []
        for start in range(0, len(sent), PARALLEL_CHANGES):
            some = range(start, min(start + PARALLEL_CHANGES, len(sent)))
            confirm = partial(self._primary.replicate_and_restamp, bucket)
            confirmed += await asyncio.gather(
                *[confirm(sent[n].key, records[n], had[n], newest[n]) for n in some]
            )
        return confirmed


def _refusal(node: Node, error: PeerRefusedError) -> StoreError | _UnknownCallError:
    if error.status in _UNKNOWN_CALL:
        return _UnknownCallError(error.message)
    return write_failed(node, error)


class ForwardedPutHandler:
    """One per process. `replicated`: the store that commits writes as the primary."""

    def __init__(self, replicated: StoreWriter, mesh: ClusterView) -> None:
        self._replicated, self._mesh = replicated, mesh

    @handler(FORWARD_PUTS)
    async def write_many(self, request: ForwardedPuts, context: CallContext) -> StoredRecords:
        for new in request.objects:
            self._mesh.require_primary(request.bucket, new.key)
        accepted = WriteContext(context.node_id, context.map_version, forwarded=True)
        try:
            records = await self._replicated.put_many(
                request.bucket, request.objects, versioning=request.versioning, context=accepted
            )
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
        return StoredRecords(tuple(without_local_fields(record) for record in records))
