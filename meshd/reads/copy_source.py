"""Copy sources on other nodes: look up and read there, store here.

The node that holds a source decides what it is: an object, a version or an archive member. Its bytes
arrive in checksummed pieces of exactly the content that was looked up. A source that changes during the
copy makes the copy fail; a copy never mixes two contents.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.core.api_errors import retry_if_written_back, store_errors
from meshd.core.object_io import check_put_size
from meshd.objects.copy_object import (
    check_copy_source,
    check_source_conditions,
    copy_meta,
    copy_part_range,
    read_chunks,
)
from meshd.peer_reads.replica_selection import ReplicaSearch
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import PeerRefusedError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, BodyFramingError, PeerCall, ResponseStream, handler, stream_handler
from meshd.store.records import Record
from meshd.views.copy_out import AssembledBody, CopyBody, copy_as_upload_part
from meshd.views.view_kind import AssembledObject
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import CODES, S3Error
from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.objects.object_reader import VersionLookup
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.reads.archive_members import MemberService
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import StoreReader
    from meshwire.checksums.body_checksums import BodyVerifier

Response = TypeVar("Response")
_RETRYABLE: Final = (PeerUnreachableError, BodyFramingError, StaleMapError)


class CopySourceRequest(msgspec.Struct, frozen=True, array_like=True):
    """The source of a copy: an object, a version or an archive member. To read it: the content `etag`, and
    `length` bytes at `offset`."""

    bucket: str
    key: str
    version: str | None = None
    member: str | None = None
    etag: str = ""
    offset: int = 0
    length: int = 0


FIND_SOURCE: Final = PeerCall(
    f"{PREFIX}sources/find",
    request=CopySourceRequest,
    response=Record,
    map_wait=1.0,
    malformed_code="BadRequest",
)
READ_SOURCE: Final = PeerCall(
    f"{PREFIX}sources/read",
    request=CopySourceRequest,
    response=ResponseStream,
    map_wait=1.0,
    malformed_code="BadRequest",
)
SOURCE_EXISTS: Final = PeerCall(
    f"{PREFIX}sources/stat",
    request=CopySourceRequest,
    response=bytes,
    map_wait=1.0,
    malformed_code="BadRequest",
)
"""Whether a name has any version: the response is empty if it has none."""


class LocalCopySources:
    """Copy sources of this node, for other nodes. One instance per process."""

    def __init__(
        self,
        store: StoreReader,
        versions: VersionLookup,
        members: MemberService,
        backed: BackedBucketService | None = None,
    ) -> None:
        self._store, self._versions, self._members, self._backed = store, versions, members, backed

    def has_versions(self, bucket: str, key: str) -> bool:
        """Whether a name has any version on this node."""
        return self._store.newest_version(bucket, key) is not None

    async def find_source(self, ask: CopySourceRequest) -> Record:
        """Return the record of the source without the fields that only this node can use. Raises S3Error."""
        found = await self._open(ask)
        record = found.record if isinstance(found, AssembledObject) else found
        return msgspec.structs.replace(record, extents=(), manifest=None)

    async def read_source(self, ask: CopySourceRequest) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the source. Raises S3Error PreconditionFailed if its content has changed."""
        found = await self._open(ask)
        record = found.record if isinstance(found, AssembledObject) else found
        if record.etag != ask.etag:
            raise S3Error("PreconditionFailed", "The source was replaced while it was copied.")
        if isinstance(found, AssembledObject):
            body = AssembledBody(found, ask.offset, ask.length).pieces(BodyDigests())
        else:
            body = read_chunks(self._store, found, ask.offset, ask.length)
        async with aclosing(body) as pieces:
            async for piece in pieces:
                yield piece

    async def _open(self, ask: CopySourceRequest) -> AssembledObject | Record:
        """Return the source: a member, an object of an origin, or a record of this node. Raises S3Error."""
        source = ops.CopySource(ask.bucket, ask.key, ask.version, ask.member)
        if ask.member is not None:
            return await self._members.open_member(source)
        return await retry_if_written_back(partial(self._open_object, source))

    async def _open_object(self, source: ops.CopySource) -> AssembledObject | Record:
        backed = self._backed
        made = None if backed is None else await backed.as_copy_source(source.bucket, source.key)
        return made or self._versions.find_copy_source(source)


class CopySourceHandlers:
    """Handles calls of other nodes for copy sources: only for names that this node reads, else the response
    is 421 with this node's map version. One instance per process."""

    def __init__(self, local: LocalCopySources, mesh: ClusterView) -> None:
        self._local, self._mesh = local, mesh

    @handler(FIND_SOURCE)
    async def find_source(self, request: CopySourceRequest, context: CallContext) -> Record:
        self._require_reader(request)
        return await self._local.find_source(request)

    @handler(SOURCE_EXISTS)
    async def source_exists(self, request: CopySourceRequest, context: CallContext) -> bytes:
        self._require_reader(request)
        return b"1" if self._local.has_versions(request.bucket, request.key) else b""

    @stream_handler(READ_SOURCE)
    async def read_source(
        self, request: CopySourceRequest, context: CallContext
    ) -> AsyncGenerator[bytes, None]:
        self._require_reader(request)
        async with aclosing(self._local.read_source(request)) as pieces:
            async for piece in pieces:
                yield piece

    def _require_reader(self, request: CopySourceRequest) -> None:
        """Raise StaleMapError unless this node is in the read set of the name."""
        if not self._mesh.is_reader(request.bucket, request.key):
            raise StaleMapError(self._mesh.current_map().version)


class RemoteCopySources:
    """Copy sources of other nodes, for copies that this node makes. One instance per process."""

    def __init__(
        self, mesh: ClusterView, peers: PeerClient, versions: VersionLookup, local: LocalCopySources
    ) -> None:
        self._mesh, self._peers, self._versions, self._local = mesh, peers, versions, local

    def __repr__(self) -> str:
        return f"<RemoteCopySources of {self._mesh.node_id}>"

    def is_remote(self, source: ops.CopySource) -> bool:
        """Whether other nodes hold a source and this node does not."""
        return not self._mesh.single_node and not self._mesh.is_reader(source.bucket, source.key)

    async def has_versions(self, bucket: str, key: str) -> bool:
        """Whether a name has any version on any node. Raises S3Error SlowDown."""
        found = await self._ask_holder(CopySourceRequest(bucket, key), SOURCE_EXISTS)
        return self._local.has_versions(bucket, key) if found is None else bool(found)

    async def find_source(self, source: ops.CopySource) -> Record:
        """Return the record of a source on another node. Raises S3Error as `VersionLookup.find_copy_source`
        does, and SlowDown."""
        ask = CopySourceRequest(source.bucket, source.key, source.version, source.member)
        found = await self._ask_holder(ask, FIND_SOURCE)
        if found is None:
            with store_errors():
                return await self._local.find_source(ask)
        return found

    async def copy_as_upload(
        self, operation: ops.CopyObject, record: Record
    ) -> tuple[ops.PutObject, RemoteSourceBody]:
        """Turn the copy into an upload. Raises S3Error."""
        versioned = bool(self._versions.versioning_of(operation.bucket))
        check_copy_source(record, operation, versioned=versioned)
        meta = copy_meta(record, operation, "")
        algorithm = operation.checksum_algorithm or next(iter(record.checksums), None)
        put = ops.PutObject(
            operation.bucket,
            operation.key,
            ops.ObjectHeaders(meta.headers, meta.metadata),
            BodyDigests(wanted=() if algorithm is None else (algorithm,)),
            operation.conditions,
            meta.tags,
            operation.acl,
        )
        return put, RemoteSourceBody(self, operation.source, record, 0, record.size)

    async def copy_as_part(
        self, operation: ops.UploadPartCopy, record: Record
    ) -> tuple[ops.UploadPart, RemoteSourceBody]:
        """Turn the part into an uploaded part. Raises S3Error."""
        check_source_conditions(operation.source_conditions, record)
        offset, length = copy_part_range(operation.range, record.size)
        check_put_size(length)
        return copy_as_upload_part(operation), RemoteSourceBody(
            self, operation.source, record, offset, length
        )

    async def read_source(self, ask: CopySourceRequest) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a source from a node that holds it; if none came, from the next one. Raises
        S3Error."""
        search = ReplicaSearch(self._mesh, ask.bucket, ask.key)
        while (node := await search.next_replica()) is not None:
            begun = False
            try:
                async with self._peers.open_typed(node, READ_SOURCE, ask) as answer:
                    async for piece in answer.iter_body():
                        begun = True
                        yield piece
            except PeerRefusedError as refused:
                raise _refusal(refused) from refused
            except _RETRYABLE as lost:
                if begun:
                    why = f"The source cannot be read at present: {lost}. Try again."
                    raise S3Error("SlowDown", why) from lost
                await search.mark_failed(node, lost)
            else:
                return
        with store_errors():
            async with aclosing(self._local.read_source(ask)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _ask_holder(
        self, ask: CopySourceRequest, call: PeerCall[CopySourceRequest, Response]
    ) -> Response | None:
        """Return the response of a node that holds the source; None if this node has come to hold it. Raises
        S3Error."""
        search = ReplicaSearch(self._mesh, ask.bucket, ask.key)
        while (node := await search.next_replica()) is not None:
            try:
                return await self._peers.call_typed(node, call, ask)
            except PeerRefusedError as refused:
                raise _refusal(refused) from refused
            except _RETRYABLE as lost:
                await search.mark_failed(node, lost)
        return None


def _refusal(refused: PeerRefusedError) -> S3Error:
    return S3Error(refused.code if refused.code in CODES else "SlowDown", refused.message)


class RemoteSourceBody(CopyBody):
    """A source that another node holds, or a range of it."""

    def __init__(
        self, far: RemoteCopySources, source: ops.CopySource, record: Record, offset: int, length: int
    ) -> None:
        super().__init__(length)
        self._far = far
        self._ask = CopySourceRequest(
            source.bucket, source.key, source.version, source.member, record.etag, offset, length
        )

    async def read_verified(self, verifier: BodyVerifier) -> AsyncGenerator[bytes, None]:
        if self._size:
            async with aclosing(self._far.read_source(self._ask)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(verifier.update, piece)
                    yield piece
