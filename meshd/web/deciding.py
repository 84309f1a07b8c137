"""The doors through which a node gets writes that another one received, and that this one decides about.

Law: only for names this node decides; else it says by which map another one does (421), and nothing was
changed. Rights were judged, and bytes verified, by the node that has the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from meshd.cluster.callers import asked_by
from meshd.cluster.ceding import (
    DECIDE,
    WRITE,
    Abortion,
    Amendment,
    Asked,
    Beginning,
    Completion,
    Decided,
    Deletion,
    Written,
    asked_by_another,
    trouble_of,
)
from meshd.net.peers import StaleMapError
from meshd.service.semantics.translation import translate
from meshd.store.changes import bare, bare_upload
from meshd.store.errors import NoSuchUploadError, NotDeciderError, StoreError
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.store.interface import ObjectStore, ObjectWriter
    from meshd.store.records import Removed, Upload
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

T = TypeVar("T")
_MOST: Final = 8 << 20  # a completion of 10,000 parts, and all that is said of it
_PATIENCE: Final = 1.0  # seconds for the caller's map to arrive here, too
_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Asked).decode
_written = msgspec.msgpack.Decoder(Written).decode


class DecisionDoors:
    """One a process. `store`: the one that tells the other nodes."""

    def __init__(self, store: ObjectStore, mesh: Mesh, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<DecisionDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The doors."""
        return [peer_route("POST", DECIDE, self.decide), peer_route("POST", WRITE, self.write)]

    async def decide(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        asked = _read(_asked, await call.read(request, _MOST))
        await self._admit(call, asked.bucket, asked.key)
        return await self._answer(call, self._carry_out(asked))

    async def write(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        try:
            bucket, key, size = query["bucket"], query["key"], int(query["size"])
            upload_id, number = query.get("upload", ""), int(query.get("number", "0"))
        except (KeyError, ValueError) as error:
            raise S3Error("InvalidArgument", "bucket, key and size must be given") from error
        await self._admit(call, bucket, key)
        if not upload_id:
            writer = self._store.writer(bucket, key, size=size)
            return await self._answer(call, _fill(writer, size, call.pieces(request)))
        upload = self._store.get_upload(bucket, key, upload_id)
        if upload is None:
            return self._reply(Decided(trouble="upload"))
        writer = self._store.part_writer(upload, number, size)
        return await self._answer(call, _fill(writer, size, call.pieces(request)))

    async def _admit(self, call: PeerCall, bucket: str, key: str) -> None:
        """Raises StaleMapError unless this node decides about a name."""
        if call.map_version > self._mesh.map().version:
            await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
        if not self._mesh.is_decider(bucket, key):
            raise StaleMapError(self._mesh.map().version)

    async def _answer(self, call: PeerCall, doing: Awaitable[Decided]) -> web.StreamResponse:
        """Raises StaleMapError, S3Error."""
        try:
            with asked_by_another(), asked_by(call.node_id, call.map_version):
                return self._reply(await doing)
        except NotDeciderError as error:
            raise StaleMapError(self._mesh.map().version) from error
        except StoreError as error:
            decided = trouble_of(error)
            if decided is None:
                raise translate(error) from error
            return self._reply(decided)

    async def _carry_out(self, asked: Asked) -> Decided:
        """Raises StoreError."""
        store = self._store
        if isinstance(asked, Deletion):
            return _removed(await self._delete(asked))
        if isinstance(asked, Amendment):
            record = await store.amend(asked.bucket, asked.key, asked.version, tags=asked.tags, acl=asked.acl)
            return Decided(bare(record))
        if isinstance(asked, Beginning):
            return Decided(upload=bare_upload(await self._begin(asked.about)))
        upload = store.get_upload(asked.bucket, asked.key, asked.upload_id)
        if upload is None:
            raise NoSuchUploadError(f"upload {asked.upload_id} was completed or aborted")
        if isinstance(asked, Completion):
            record = await store.complete_upload(
                upload,
                asked.parts,
                asked.meta,
                asked.conditions,
                etags=asked.etags,
                versioning=asked.versioning,
            )
            return Decided(bare(record))
        assert isinstance(asked, Abortion)
        return Decided(stamp=await store.abort_upload(upload))

    async def _delete(self, asked: Deletion) -> Removed:
        store, bucket, key = self._store, asked.bucket, asked.key
        if asked.version is None:
            return await store.delete(bucket, key, conditions=asked.conditions, versioning=asked.versioning)
        return await store.delete_version(bucket, key, asked.version, conditions=asked.conditions)

    async def _begin(self, about: Upload) -> Upload:
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

    def _reply(self, decided: Decided) -> web.StreamResponse:
        return peer_reply(_encode(decided), self._clock.now_ms() // 1000)


async def _fill(writer: ObjectWriter, size: int, pieces: AsyncIterator[bytes]) -> Decided:
    """Bytes, and what is said of them behind. Raises StoreError, S3Error."""
    try:
        said = await _received(writer, size, pieces)
        record = await writer.commit(said.meta, conditions=said.conditions, versioning=said.versioning)
    except BaseException:
        await writer.abort()
        raise
    return Decided(bare(record))


async def _received(writer: ObjectWriter, size: int, pieces: AsyncIterator[bytes]) -> Written:
    left, ending = size, bytearray()
    async for piece in pieces:
        data = piece[:left]
        if data:
            await writer.write(data)
            left -= len(data)
        ending += piece[len(data) :]
        if len(ending) > _MOST:
            raise S3Error("EntityTooLarge")
    return _read(_written, bytes(ending))


def _read(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error


def _removed(removed: Removed) -> Decided:
    record, marker = removed.record, removed.marker
    return Decided(
        None if record is None else bare(record), None if marker is None else bare(marker), removed.stamp
    )
