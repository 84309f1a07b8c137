"""Resumed reads: the rest of a response whose bytes end on this node, read from another replica.

Version, ETag and size must equal those of the response in progress. A replica that fails after it sent
bytes ends the resumed read, because nobody knows whether those bytes are sound. The caller gets exactly
the missing bytes or an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.core.peer_messages import RESUME_READ, ResumeRequest
from meshd.errors import MeshdError
from meshd.rpc.peer_rpc import stream_handler
from meshd.store.errors import DiskFailedError
from meshd.store.integrity.verification import StreamVerifier
from meshd.store.records import NULL
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from meshd.core.object_io import LookupResult
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.cluster import Node

_log = logging.getLogger("meshd.disks")
_PIECE: Final = 1 << 20
ResumeRead = Callable[[str, str, "LookupResult", int], AsyncGenerator[bytes, None]]
"""See `Continuing.rest`."""


class CutShortError(MeshdError):
    """The rest of an answer cannot be had; its connection must be cut."""


class ReadResumer:
    """One a process."""

    def __init__(self, asking: ReplicaSelector) -> None:
        self._asking = asking

    def __repr__(self) -> str:
        return f"<Continuing {self._asking!r}>"

    def resume_response(
        self, bucket: str, key: str, found: LookupResult, sent: int
    ) -> AsyncGenerator[bytes, None]:
        """What is left of an answer of which `sent` bytes are out. Raises CutShortError."""
        offset = found.base + found.offset + sent
        return self.read_from_peers(bucket, key, found.record, offset, found.length - sent)

    async def read_from_peers(
        self, bucket: str, key: str, record: Record, offset: int, length: int
    ) -> AsyncGenerator[bytes, None]:
        """Bytes of this version, as other nodes have them. Raises CutShortError."""
        ask = ResumeRequest(bucket, key, record.version, record.etag, record.size, offset, length)
        why = "no other node holds it"
        for node in self._other_replicas(bucket, key):
            given = 0
            try:
                async with aclosing(self._from(node, ask)) as pieces:
                    async for piece in pieces:
                        given += len(piece)
                        yield piece
            except MeshdError as error:
                metrics.remote_failures.labels(type(error).__name__).inc()
                self._asking.report_unreachable(node, error)
                why = f"{node.node_id}: {error}"
                if given:
                    break
                continue
            if given == ask.length:
                metrics.reads_continued.labels("whole").inc()
                told = {"bucket": bucket, "key": key, "at": offset, "from": node.node_id}
                _log.warning("an answer under way goes on from another node", extra=told)
                return
            why = f"{node.node_id} gave {given} bytes of {ask.length}"
            if given:
                break
        metrics.reads_continued.labels("cut").inc()
        raise CutShortError(f"s3://{bucket}/{key} from byte {offset} on: {why}")

    def _other_replicas(self, bucket: str, key: str) -> list[Node]:
        """The other nodes that hold it and may be read; also what is not at its bucket's origin yet."""
        readers = self._asking.mesh.bucket_routes(bucket).route_of_key(bucket, key).read_set
        return [node for node in readers if node.node_id != self._asking.mesh.node_id]

    async def _from(self, node: Node, ask: ResumeRequest) -> AsyncGenerator[bytes, None]:
        async with self._asking.peers.open_typed(node, RESUME_READ, ask) as answer:
            left = ask.length
            async for piece in answer.iter_body():
                left -= len(piece)
                if left < 0:
                    raise CutShortError(f"{node.node_id} gave more than it was asked for")
                yield piece


class ResumeSource:
    """The answering side: reads this node's own store."""

    def __init__(self, store: ObjectStore, node_id: str) -> None:
        self._store, self._node_id = store, node_id

    def __repr__(self) -> str:
        return f"<Rests of {self._node_id}>"

    @stream_handler(RESUME_READ)
    def read_rest(self, asked: ResumeRequest, context: CallContext) -> AsyncGenerator[bytes, None]:
        """The rest of a response. Raises S3Error NoSuchVersion; while the bytes come, StoreError."""
        record = self._store.get_version(asked.bucket, asked.key, asked.version or NULL)
        same = record is not None and (record.etag, record.size) == (asked.etag, asked.size)
        if record is None or not same or asked.offset + asked.length > record.size:
            raise S3Error("NoSuchVersion", f"{self._node_id} does not hold this version.")
        if record.broken:
            raise S3Error("NoSuchVersion", f"What {self._node_id} has of it is damaged.")
        return self._pieces(record, asked.offset, asked.length)

    async def _pieces(self, record: Record, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        """Extents that pass as a whole are compared with their checksums."""
        passing = StreamVerifier()
        with self._store.open_spans(record, offset, length) as spans:
            for span in spans:
                for start in range(0, span.length, _PIECE):
                    part = span.sub_span(start, min(_PIECE, span.length - start))
                    yield await asyncio.shield(asyncio.to_thread(_read_span, part, passing))


def _read_span(span: Span, passing: StreamVerifier) -> bytes:
    try:
        data = os.pread(span.fd, span.length, span.offset)
    except OSError as error:
        raise DiskFailedError(f"the disk failed: {error.strerror}") from error
    if len(data) != span.length:
        raise DiskFailedError(f"a data file ends {span.length - len(data)} bytes before its extent does")
    passing.verify_chunk(span, data)
    return data
