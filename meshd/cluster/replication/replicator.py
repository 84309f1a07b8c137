"""Replicator: sends changes and data to every node of the write set until all of them have it.

Law: it retries until a node has the change or a newer map no longer requires it; it gives up at once if the
node's disks are full, and reports a node that does not answer as suspect. When all nodes have the change it
reads the map again, for a newer one may name more nodes. Invariant: when `replicate` returns, the change is
durable on the whole write set, the primary included, of one map, which was the newest known here afterwards;
without a primary nothing is acknowledged. A version or part that was replaced or removed here meanwhile
counts as sent only when its successor was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.clock_errors import skew_error
from meshd.cluster.replication.full_nodes import FullNodes, is_full, outcome_unknown
from meshd.rpc.peer_client import PeerClockError, PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import (
    IN_QUERY,
    PREFIX,
    BodyFramingError,
    PeerCall,
    body_with_message,
    encode_message,
)
from meshd.store.errors import (
    ExtentGoneError,
    NodeFullError,
    NotReplicatedError,
)
from meshd.store.integrity.verification import read_chunks
from meshd.store.records import NULL, Record
from meshd.store.replica.changes import (
    Amended,
    Marked,
    PartOf,
    ReplicaAck,
    ReplicaChange,
    ReplicaFacts,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    part_without_local_fields,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.telemetry import metrics
from meshd.util.async_tasks import SingleFlight

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore
    from meshd.store.records import Upload
    from meshd.store.replica.changes import Change
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_log = logging.getLogger(__name__)
INLINE_BYTES: Final = 256 << 10
"""Data up to this size is sent together with its metadata."""
MAX_FACTS_BYTES: Final = 8 << 20
"""Limit of an object's metadata: that of one with 10,000 parts fits."""
WRITE_TIMEOUT: Final = 15.0
"""Seconds after which a write that some replica lacks is given up."""
_ANSWER_TIMEOUT = 4.0
_SYNC_TIMEOUT = 10.0  # seconds after the last byte of large data
_PIECE = 1 << 20
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)
_TRIES = 3  # attempts to read a record whose bytes compaction moves
_LABELS: Final = {
    Marked: "Marked",
    Amended: "Amended",
    VersionGone: "VersionGone",
    UploadBegun: "UploadBegun",
    UploadEnded: "UploadEnded",
    UploadCompleted: "UploadCompleted",
}
"""Labels of `meshd_replication_facts_total`."""
_LOG_INTERVAL = 30.0  # seconds without a failure after which the next one is logged

SendToNode = Callable[["Node"], Awaitable[ReplicaAck]]
"""Sends to one node. May be called again for the same node."""


class ReplicaData(msgspec.Struct, frozen=True):
    """`size` bytes of a name in a body, followed by their `ReplicaFacts`."""

    bucket: str
    key: str
    size: int


class ReplicaObject(msgspec.Struct, frozen=True, array_like=True):
    """A version of a name, with its bytes."""

    key: str
    record: Record
    data: bytes


class ReplicaBatch(msgspec.Struct, frozen=True, array_like=True):
    """New versions of a bucket, committed by their primary under one map version."""

    epoch: int
    bucket: str
    objects: tuple[ReplicaObject, ...]


class ReplicaAcks(msgspec.Struct, frozen=True, array_like=True):
    """A replica's replies to the objects of a batch, in their order."""

    acks: tuple[ReplicaAck, ...]


APPLY_CHANGE: Final = PeerCall(
    f"{PREFIX}replica/change",
    request=ReplicaChange,
    response=ReplicaAck,
    max_bytes=MAX_FACTS_BYTES,
    timeout=_ANSWER_TIMEOUT,
)
RECEIVE_DATA: Final = PeerCall(
    f"{PREFIX}replica/bytes",
    request=ReplicaData,
    response=ReplicaAck,
    target=IN_QUERY,
    max_bytes=None,
    timeout=_ANSWER_TIMEOUT,
)
RECEIVE_BATCH: Final = PeerCall(
    f"{PREFIX}replica/many",
    request=ReplicaBatch,
    response=ReplicaAcks,
    max_bytes=64 << 20,
    timeout=_SYNC_TIMEOUT,
)


class Replicator:
    """Sends changes and data to the replicas. One per process."""

    def __init__(
        self,
        mesh: ClusterView,
        peers: PeerClient,
        store: ObjectStore,
        clock: Clock,
    ) -> None:
        self._mesh, self._peers, self._store, self._clock = mesh, peers, store, clock
        self.timeout = WRITE_TIMEOUT
        self.full = FullNodes(clock)
        self._failed: dict[tuple[str, str], float] = {}  # (node, why) → time of the last failure (monotonic)
        # by node, bucket, key and successor's stamp, so that no caller joins a transfer of an older one
        self._successors: SingleFlight[tuple[str, str, str, int], ReplicaAck] = SingleFlight()

    def __repr__(self) -> str:
        return f"<Replicator of {self._mesh.node_id}>"

    def reject_if_full(self, bucket: str, key: str, size: int) -> None:
        """Raises NodeFullError if a node of the write set has just refused so many bytes."""
        if self.full:
            self.full.reject(self._mesh.route_for(bucket, key).write_set, size)

    async def replicate(
        self,
        bucket: str,
        key: str,
        send: SendToNode,
        had: Iterable[str] = (),
        newest: int = 0,
        size: int | None = None,
    ) -> int:
        """Sends to every node of the write set except those in `had`; returns the newest stamp that they know
        of the name. `size`: of the bytes that are sent, if any. Raises NotReplicatedError, NodeFullError."""
        if self._mesh.single_node:
            return newest  # a node that joins later compares and finds the commit
        began = self._clock.monotonic()
        done = {self._mesh.node_id, *had}
        metrics.replication_behind.inc()
        try:
            newest = max(newest, await self._send_to_all(bucket, key, send, done, began, size))
        except (NotReplicatedError, NodeFullError):
            metrics.replication_refused.inc()
            raise
        finally:
            metrics.replication_behind.dec()
        metrics.replication_seconds.observe(self._clock.monotonic() - began)
        return newest

    async def replicate_change(self, change: Change, bucket: str, key: str) -> int:
        """Replicates a change of this node; returns the newest stamp that the others know of the name."""
        return await self.replicate(bucket, key, lambda node: self.send_change(node, change))

    async def replicate_version(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> int:
        """Replicates a version of this node to the nodes that lack it; returns the newest stamp that they
        know of the name."""
        return await self.replicate(
            bucket, key, lambda node: self.send_version(node, bucket, key, record), had, newest, record.size
        )

    async def _send_to_all(
        self, bucket: str, key: str, send: SendToNode, done: set[str], began: float, size: int | None
    ) -> int:
        newest = tries = 0
        while True:
            version, route = self._mesh.current_map().version, self._mesh.route_for(bucket, key)
            left = [node for node in route.write_set if node.node_id not in done]
            if not left and route.primary is not None and route.primary.node_id in done:
                return newest  # no await since the map was read
            answers = await asyncio.gather(*[self._try_send(node, send, version) for node in left])
            for node, taken in zip(left, answers, strict=True):
                if isinstance(taken, ReplicaAck):
                    done.add(node.node_id)
                    newest = max(newest, taken.newest)
                elif is_full(taken):
                    if size is not None:
                        self.full.record(node.node_id, size, taken)
                    if self._mesh.current_map().version == version:
                        raise outcome_unknown(node.node_id, taken) from taken
            if left and all(isinstance(taken, ReplicaAck) for taken in answers):
                continue
            skew = skew_error(answers, "the write may or may not have taken effect")
            late = self._clock.monotonic() - began > self.timeout
            if skew and (late or (tries and self._mesh.current_map().version == version)):
                raise skew  # waiting sets no clock
            if late:
                missing = ", ".join(
                    n.node_id for n, taken in zip(left, answers, strict=True) if taken is None
                )
                raise NotReplicatedError(
                    f"{missing or 'no node'} did not store the write within {self.timeout:g} s and is not "
                    "known to be away; the write may or may not have taken effect; try again"
                )
            await self._mesh.wait_for_newer_map(version, _PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    async def _try_send(
        self, node: Node, send: SendToNode, version: int
    ) -> ReplicaAck | PeerRefusedError | None:
        """Tries once; returns None or PeerClockError if the node must be tried again, another
        PeerRefusedError if it is full."""
        try:
            return await send(node)
        except StaleMapError as error:
            self._record_failure(node, "map", error)
            if error.version > version:
                await self._mesh.wait_for_newer_map(version, 1.0)
        except (PeerUnreachableError, BodyFramingError) as error:
            self._record_failure(node, "silent", error)
            await self._mesh.report_suspect(node.node_id, version)
        except PeerRefusedError as error:
            if is_full(error):
                return error
            self._record_failure(node, "refused", error)
            return error if isinstance(error, PeerClockError) else None
        return None

    def _record_failure(self, node: Node, why: str, error: Exception) -> None:
        """Counts every failure, but logs only the first of a series, however many writes wait."""
        metrics.replication_retries.labels(why).inc()
        now, place = self._clock.monotonic(), (node.node_id, why)
        goes_on = now - self._failed.get(place, -_LOG_INTERVAL) < _LOG_INTERVAL
        self._failed[place] = now
        level = logging.DEBUG if goes_on else logging.INFO
        _log.log(level, "sending a write to node %s failed and will be retried (%s): %s", *place, error)

    # sending ------------------------------------------------------------------------------------------------

    async def send_change(self, node: Node, change: Change) -> ReplicaAck:
        """Sends a change; a node that lacks the bytes it refers to gets the whole version. Raises the errors
        of the peer call."""
        taken = await self._call(node, change)
        if taken.trouble != "lacks":
            return taken
        assert isinstance(change, Amended | UploadCompleted)
        taken = await self.send_version(node, change.bucket, change.key, change.record)
        if isinstance(change, UploadCompleted):
            ended = UploadEnded(change.bucket, change.key, change.upload_id, change.record.stamp)
            await self.send_change(node, ended)
        return taken

    async def _call(self, node: Node, change: Change) -> ReplicaAck:
        message = ReplicaChange(self._mesh.current_map().version, change)
        taken = await self._peers.call_typed(node, APPLY_CHANGE, message)
        metrics.replication_facts.labels(_LABELS[type(change)]).inc()
        return taken

    async def send_version(self, node: Node, bucket: str, key: str, record: Record) -> ReplicaAck:
        """Sends a whole version of this node, or its successor if it was replaced. Raises the errors of the
        peer call."""
        for _ in range(_TRIES):
            found = self._store.get_version(bucket, key, record.version or NULL)
            if found is None or found.stamp != record.stamp:
                return await self._send_successor(node, bucket, key, record)
            if found.marker:
                return await self.send_change(node, Marked(bucket, key, without_local_fields(found)))
            try:
                taken = await self.send_data(
                    node,
                    bucket,
                    key,
                    ReplicaFacts(self._mesh.current_map().version, without_local_fields(found)),
                    self.read_chunks(found),
                    found.size,
                )
            except ExtentGoneError:
                continue  # moved or removed meanwhile
            if taken.trouble != "lacks":  # else it lost the version between look-up and commit
                return taken
        raise PeerRefusedError(
            503, "Moving", f"{bucket}/{key} is moved by compaction faster than it can be sent"
        )

    async def ensure_version(self, node: Node, bucket: str, key: str, record: Record) -> ReplicaAck:
        """Returns when a node has a version or its successor. The request that committed the version also
        sends it; so it is not sent if the node has it, and a large version only if that takes too long.
        Raises the errors of the peer call."""
        for pause in _PAUSES if record.size > INLINE_BYTES else (0,):
            taken = await self._call(node, self.confirmation_of(bucket, key, record))
            if taken.trouble != "lacks":
                return taken
            await asyncio.sleep(pause)
        return await self.send_version(node, bucket, key, record)

    async def _send_successor(self, node: Node, bucket: str, key: str, record: Record) -> ReplicaAck:
        """Sends what replaced or removed a version here, once for all callers that wait for it."""
        successor = self._find_successor(bucket, key, record)
        if successor is None:  # dropped or forgotten here: only the other node knows
            taken = await self._call(node, Amended(bucket, key, without_local_fields(record)))
            if taken.trouble == "lacks":
                raise PeerRefusedError(
                    503, "Lacking", f"{bucket}/{key} exists neither on that node nor on this one"
                )
            return taken
        if isinstance(successor, VersionGone):
            send = partial(self.send_change, node, successor)
        else:
            send = partial(self.ensure_version, node, bucket, key, successor)
        taken, _ = await self._successors.run((node.node_id, bucket, key, successor.stamp), send)
        return taken

    def _find_successor(self, bucket: str, key: str, record: Record) -> Record | VersionGone | None:
        """Returns the newer null version or the deletion that replaced a version here, if known."""
        if not record.version:
            found = self._store.get_version(bucket, key, NULL)
            if found is not None and found.stamp > record.stamp:
                return found
        tombstone = self._store.tombstone_stamp(bucket, key, record.version)
        if tombstone and (record.version or tombstone > record.stamp):
            return VersionGone(bucket, key, record.version, tombstone)
        return None

    def confirmation_of(self, bucket: str, key: str, record: Record) -> Change:
        """Returns a change that ensures that the node has a version."""
        made = Marked if record.marker else Amended
        return made(bucket, key, without_local_fields(record))

    async def send_data(
        self,
        node: Node,
        bucket: str,
        key: str,
        facts: ReplicaFacts,
        pieces: AsyncGenerator[bytes, None] | bytes,
        size: int,
    ) -> ReplicaAck:
        """Sends bytes and their metadata. Raises the errors of the peer call and of reading the pieces."""
        data, ending = ReplicaData(bucket, key, size), encode_message(facts)
        if not isinstance(pieces, bytes):
            if size > INLINE_BYTES:
                return await self.send_stream(node, data, body_with_message(pieces, ending))
            pieces = b"".join([piece async for piece in pieces])
        taken = await self._peers.call_typed(node, RECEIVE_DATA, data, body=pieces + ending)
        return _count_bytes(taken, size)

    async def send_batch(self, node: Node, batch: ReplicaBatch) -> tuple[ReplicaAck, ...]:
        """Sends small versions with their bytes; returns a reply to each. Raises the errors of the peer
        call."""
        acks = (await self._peers.call_typed(node, RECEIVE_BATCH, batch)).acks
        if len(acks) != len(batch.objects):
            raise PeerRefusedError(502, "BadReply", "a batch was answered by another number of replies")
        for ack, new in zip(acks, batch.objects, strict=True):
            _count_bytes(ack, len(new.data))
        return acks

    async def send_stream(
        self, node: Node, data: ReplicaData, body: AsyncGenerator[bytes, None]
    ) -> ReplicaAck:
        """Streams bytes, followed by their metadata. Raises the errors of the peer call."""
        async with aclosing(body):
            taken = await self._peers.call_typed(node, RECEIVE_DATA, data, body=body, timeout=_SYNC_TIMEOUT)
            return _count_bytes(taken, data.size)

    async def send_part(self, node: Node, upload: Upload, number: int) -> ReplicaAck:
        """Sends the current part of this number; returns `ended` if the upload has ended. Raises the errors
        of the peer call."""
        for _ in range(_TRIES):
            part = next(iter(self._store.list_parts(upload, number - 1, 1).parts), None)
            if part is None or part.number != number:
                return ReplicaAck(trouble="ended")
            record = Record(part.size, part.etag, part.stamp, part.modified, part.extents)
            facts = ReplicaFacts(
                self._mesh.current_map().version,
                without_local_fields(record),
                PartOf(upload_without_local_fields(upload), part_without_local_fields(part)),
            )
            try:
                return await self.send_data(
                    node, upload.bucket, upload.key, facts, self.read_chunks(record), part.size
                )
            except ExtentGoneError:
                continue  # moved, replaced or removed
        raise PeerRefusedError(
            503, "Moving", f"part {number} of {upload.key} is moved by compaction faster than it can be sent"
        )

    async def read_chunks(self, record: Record) -> AsyncGenerator[bytes, None]:
        """Yields the verified bytes of a record. Raises ExtentGoneError, CorruptExtentError."""
        with self._store.open_spans(record, 0, record.size) as spans:
            async for piece in read_chunks(spans, _PIECE):
                yield piece


def _count_bytes(taken: ReplicaAck, size: int) -> ReplicaAck:
    metrics.replication_facts.labels("Bytes").inc()
    metrics.replication_bytes.inc(size)
    return taken
