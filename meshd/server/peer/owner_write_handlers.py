"""Peer handlers for writes that another node received and this node owns.

Law: only for names that this node owns; otherwise the reply is 421 with this node's map version, and
nothing was changed. The receiving node has already authorized the client and verified the
bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from meshd.cluster.replication.write_forwarding import (
    FORWARD_DATA_PATH,
    FORWARD_PATH,
    AbortUploadRequest,
    AmendRequest,
    CompleteUploadRequest,
    CreateUploadRequest,
    DeleteRequest,
    ForwardedRequest,
    WriteResult,
    WriteSpec,
    accepted_by,
    handling_forwarded_write,
    result_of_error,
)
from meshd.core.error_mapping import to_s3_error
from meshd.rpc.peer_client import StaleMapError
from meshd.server.peer.endpoint import peer_reply, peer_route
from meshd.store.errors import NoSuchUploadError, NotPrimaryError, StoreError
from meshd.store.replica.changes import upload_without_local_fields, without_local_fields
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.cluster_view import ClusterView
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.store.api import ObjectStore, ObjectWriter
    from meshd.store.records import Removed, Upload
    from meshd.util.clock import Clock


T = TypeVar("T")
_MAX_WRITE_MESSAGE: Final = 8 << 20  # a completion of 10,000 parts, and all that is said of it
_WRITE_MAP_WAIT: Final = 1.0  # seconds for the caller's map to arrive here, too
_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ForwardedRequest).decode
_decode_trailer = msgspec.msgpack.Decoder(WriteSpec).decode


class OwnerWriteHandlers:
    """One a process. `store`: the one that tells the other nodes."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<DecisionDoors of {self._mesh.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """The doors."""
        return [
            peer_route("POST", FORWARD_PATH, self.change_name),
            peer_route("POST", FORWARD_DATA_PATH, self.write_object),
        ]

    async def change_name(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        asked = _decode_or_refuse(_decode_request, await call.read_body(request, _MAX_WRITE_MESSAGE))
        await self._require_owner(call, asked.bucket, asked.key)
        return await self._answer(call, self._execute(asked))

    async def write_object(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        try:
            bucket, key, size = query["bucket"], query["key"], int(query["size"])
            upload_id, number = query.get("upload", ""), int(query.get("number", "0"))
        except (KeyError, ValueError) as error:
            raise S3Error("InvalidArgument", "bucket, key and size must be given") from error
        await self._require_owner(call, bucket, key)
        if not upload_id:
            writer = self._store.writer(bucket, key, size=size)
            return await self._answer(call, _write_body(writer, size, call.iter_body(request)))
        upload = self._store.get_upload(bucket, key, upload_id)
        if upload is None:
            return self._reply(WriteResult(trouble="upload"))
        writer = self._store.part_writer(upload, number, size)
        return await self._answer(call, _write_body(writer, size, call.iter_body(request)))

    async def _require_owner(self, call: PeerCaller, bucket: str, key: str) -> None:
        """Raises StaleMapError unless this node decides about a name."""
        if call.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(call.map_version - 1, _WRITE_MAP_WAIT)
        if not self._mesh.is_primary(bucket, key):
            raise StaleMapError(self._mesh.current_map().version)

    async def _answer(self, call: PeerCaller, doing: Awaitable[WriteResult]) -> web.StreamResponse:
        """Raises StaleMapError, S3Error."""
        try:
            with handling_forwarded_write(), accepted_by(call.node_id, call.map_version):
                return self._reply(await doing)
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
        except StoreError as error:
            decided = result_of_error(error)
            if decided is None:
                raise to_s3_error(error) from error
            return self._reply(decided)

    async def _execute(self, asked: ForwardedRequest) -> WriteResult:
        """Raises StoreError."""
        store = self._store
        if isinstance(asked, DeleteRequest):
            return _deletion_result(await self._delete(asked))
        if isinstance(asked, AmendRequest):
            record = await store.amend(asked.bucket, asked.key, asked.version, tags=asked.tags, acl=asked.acl)
            return WriteResult(without_local_fields(record))
        if isinstance(asked, CreateUploadRequest):
            return WriteResult(upload=upload_without_local_fields(await self._begin_upload(asked.about)))
        upload = store.get_upload(asked.bucket, asked.key, asked.upload_id)
        if upload is None:
            raise NoSuchUploadError(f"upload {asked.upload_id} was completed or aborted")
        if isinstance(asked, CompleteUploadRequest):
            record = await store.complete_upload(
                upload,
                asked.parts,
                asked.meta,
                asked.conditions,
                etags=asked.etags,
                versioning=asked.versioning,
            )
            return WriteResult(without_local_fields(record))
        assert isinstance(asked, AbortUploadRequest)
        return WriteResult(stamp=await store.abort_upload(upload))

    async def _delete(self, asked: DeleteRequest) -> Removed:
        store, bucket, key = self._store, asked.bucket, asked.key
        if asked.version is None:
            return await store.delete(bucket, key, conditions=asked.conditions, versioning=asked.versioning)
        return await store.delete_version(bucket, key, asked.version, conditions=asked.conditions)

    async def _begin_upload(self, about: Upload) -> Upload:
        return await self._store.create_upload(
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
        )

    def _reply(self, decided: WriteResult) -> web.StreamResponse:
        return peer_reply(_encode(decided), self._clock.now_ms() // 1000)


async def _write_body(writer: ObjectWriter, size: int, pieces: AsyncIterator[bytes]) -> WriteResult:
    """Bytes, and what is said of them behind. Raises StoreError, S3Error."""
    try:
        said = await _receive_body(writer, size, pieces)
        record = await writer.commit(said.meta, conditions=said.conditions, versioning=said.versioning)
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
        if len(ending) > _MAX_WRITE_MESSAGE:
            raise S3Error("EntityTooLarge")
    return _decode_or_refuse(_decode_trailer, bytes(ending))


def _decode_or_refuse(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error


def _deletion_result(removed: Removed) -> WriteResult:
    record, marker = removed.record, removed.marker
    return WriteResult(
        None if record is None else without_local_fields(record),
        None if marker is None else without_local_fields(marker),
        removed.stamp,
    )
