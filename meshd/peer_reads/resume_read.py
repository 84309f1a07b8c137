"""Resumed reads: the rest of a response whose bytes end on this node, read from another replica.

Version, ETag and size must equal those of the response in progress. A replica that fails after it sent
bytes ends the read, because those bytes may be damaged. The caller gets exactly the missing
bytes or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshd.core.peer_messages import RESUME_READ, ResumeRequest
from meshd.core.read_source import FailoverRead, ReadLostError, ReadSource, memory_spans
from meshd.errors import MeshdError
from meshd.rpc.peer_rpc import stream_handler
from meshd.store.integrity.verification import read_chunks
from meshd.store.records import NULL
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.core.object_io import LookupResult
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import StoreReader
    from meshd.store.records import Record, Span
    from meshwire.cluster import Node

ResumeRead = Callable[[str, str, "LookupResult", int], FailoverRead]
"""The signature of `ReadResumer.resume_response`."""


class _NoBytesError(MeshdError):
    """A replica sent no byte; another one may."""


class ReplicaSource(ReadSource):
    """A ReadSource: one version of an object on another node."""

    failures = (_NoBytesError,)

    def __init__(self, selector: ReplicaSelector, node: Node, bucket: str, key: str, record: Record) -> None:
        self._selector, self._node, self._bucket, self._key = selector, node, bucket, key
        self._record = record

    def __repr__(self) -> str:
        return f"<ReplicaSource {self._node.node_id}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        record, node_id, given = self._record, self._node.node_id, 0
        ask = ResumeRequest(self._bucket, self._key, record.version, record.etag, record.size, offset, length)
        try:
            async with self._selector.peers.open_typed(self._node, RESUME_READ, ask) as answer:
                async for piece in answer.iter_body():
                    given += len(piece)
                    if given > length:
                        raise ReadLostError("it sent more than was requested")
                    with memory_spans(piece) as spans:
                        yield spans
        except MeshdError as error:
            metrics.remote_failures.labels(type(error).__name__).inc()
            self._selector.report_unreachable(self._node, error)
            if given:
                raise ReadLostError(f"{node_id}: {error}") from error
            raise _NoBytesError(f"{node_id}: {error}") from error
        if 0 < given < length:
            raise ReadLostError(f"{node_id} sent {given} bytes of {length}")


class ReadResumer:
    """Reads of versions that this node cannot read itself. One per process."""

    def __init__(self, selector: ReplicaSelector) -> None:
        self._selector = selector

    def __repr__(self) -> str:
        return f"<ReadResumer {self._selector!r}>"

    def resume_response(self, bucket: str, key: str, found: LookupResult, sent: int) -> FailoverRead:
        """Return a read of the rest of a response after `sent` bytes."""
        offset = found.base + found.offset + sent
        return self.read_from_peers(bucket, key, found.record, offset, found.length - sent)

    def read_from_peers(
        self, bucket: str, key: str, record: Record, offset: int, length: int, *, counted: bool = True
    ) -> FailoverRead:
        """Return a read of this version from the other nodes of the read set, even if the object is not at
        its bucket's origin yet. The read raises ReadLostError. `counted` is false for a part of a read that
        is counted itself."""
        mesh = self._selector.mesh
        readers = mesh.bucket_routes(bucket).route_of_key(bucket, key).read_set
        others = [node for node in readers if node.node_id != mesh.node_id]
        sources = [ReplicaSource(self._selector, node, bucket, key, record) for node in others]
        name = f"s3://{bucket}/{key}" if counted else ""
        return FailoverRead(sources, offset, length, name, resumed=True)


class ResumeSource:
    """Handler of resumed reads: reads this node's own store."""

    def __init__(self, store: StoreReader, node_id: str) -> None:
        self._store, self._node_id = store, node_id

    def __repr__(self) -> str:
        return f"<ResumeSource of {self._node_id}>"

    @stream_handler(RESUME_READ)
    def read_rest(self, request: ResumeRequest, context: CallContext) -> AsyncGenerator[bytes, None]:
        """Return the rest of a response. Raises S3Error NoSuchVersion; StoreError while bytes are read."""
        record = self._store.get_version(request.bucket, request.key, request.version or NULL)
        same = record is not None and (record.etag, record.size) == (request.etag, request.size)
        if record is None or not same or request.offset + request.length > record.size:
            raise S3Error("NoSuchVersion", f"{self._node_id} does not hold this version.")
        if record.broken:
            raise S3Error("NoSuchVersion", f"The copy of {self._node_id} is damaged.")
        return self._pieces(record, request.offset, request.length)

    async def _pieces(self, record: Record, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes; whole extents are verified against their checksums."""
        with self._store.open_spans(record, offset, length) as spans:
            async for piece in read_chunks(spans):
                yield piece
