"""Forwarded writes of the replicated store: messages, sender, and the handlers of the primary.

Law: a forwarded write is carried out only for a name that the receiving node owns: else the response is 421
with its map version, and nothing was changed. The node that received the request from the client has
authorized the client and verified the bytes. See `primary_writes` for when a write is forwarded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, NoReturn, cast

import msgspec

from meshd.cluster.replication.primary_writes import WriteForwarder, WriteNotTakenError
from meshd.cluster.replication.replicator import MAX_FACTS_BYTES
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import (
    IN_QUERY,
    PREFIX,
    PeerCall,
    body_with_message,
    decode_message,
    encode_message,
    handler,
)
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    InvalidPartError,
    NoSuchUploadError,
    NoSuchVersionError,
    NotPrimaryError,
    StoreError,
)
from meshd.store.records import Meta, Record, Removed, Upload, WriteContext  # noqa: TC001  msgspec reads annotations
from meshd.store.replica.changes import upload_without_local_fields, without_local_fields
from meshd.telemetry import metrics
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import Conditions  # noqa: TC001  msgspec reads annotations
from meshwire.s3.bucket_settings import Acl, Versioning  # noqa: TC001  msgspec reads annotations

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import StoreReader, StoreWriter
    from meshd.store.writer_api import ObjectWriter
    from meshwire.cluster import Node

_ANSWER_TIMEOUT: Final = 30.0  # the primary may wait for its own replicas before it answers


class WriteSpec(msgspec.Struct, frozen=True):
    """The metadata of bytes that become an object or a part."""

    meta: Meta
    conditions: Conditions | None = None
    versioning: Versioning = ""


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete"):
    """A forwarded `ObjectStore.delete` or, with a version, `delete_version`."""

    bucket: str
    key: str
    version: str | None = None
    conditions: Conditions | None = None
    versioning: Versioning = ""
    stamp: int | None = None


class AmendRequest(msgspec.Struct, frozen=True, tag="amend"):
    """A forwarded `ObjectStore.amend`."""

    bucket: str
    key: str
    version: str | None
    tags: dict[str, str] | None = None
    acl: Acl | None = None


class CreateUploadRequest(msgspec.Struct, frozen=True, tag="begin"):
    """A forwarded `ObjectStore.create_upload`; `about` has the upload's metadata."""

    about: Upload

    @property
    def bucket(self) -> str:
        return self.about.bucket

    @property
    def key(self) -> str:
        return self.about.key


class CompleteUploadRequest(msgspec.Struct, frozen=True, tag="complete"):
    """A forwarded `ObjectStore.complete_upload`."""

    bucket: str
    key: str
    upload_id: str
    parts: tuple[int, ...]
    meta: Meta
    conditions: Conditions | None
    etags: tuple[str, ...]
    versioning: Versioning


class AbortUploadRequest(msgspec.Struct, frozen=True, tag="abort"):
    """A forwarded `ObjectStore.abort_upload`."""

    bucket: str
    key: str
    upload_id: str


ForwardedRequest = (
    DeleteRequest | AmendRequest | CreateUploadRequest | CompleteUploadRequest | AbortUploadRequest
)
WriteErrorKind = Literal["", "failed", "missing", "upload", "version", "part"]


class WriteResult(msgspec.Struct, frozen=True):
    """The result of a forwarded write: the fields that the operation returns, or the error in `trouble` with
    the part `number` or the failed `condition`."""

    record: Record | None = None
    marker: Record | None = None
    stamp: int = 0
    upload: Upload | None = None
    trouble: WriteErrorKind = ""
    number: int = 0
    condition: str = ""

    def raise_error(self) -> None:
        """Raises the error that answers the request, if there is one."""
        if self.trouble == "part":
            raise InvalidPartError(self.number)
        if self.trouble == "failed":
            raise ConditionFailedError(_CHANGED, self.condition)
        if self.trouble:
            kind, text = _ERRORS[self.trouble]
            raise kind(text)

    def require_record(self) -> Record:
        """Returns the version that was created or changed."""
        assert self.record is not None
        return self.record

    def require_upload(self) -> Upload:
        """Returns the upload that was created."""
        assert self.upload is not None
        return self.upload

    def as_removed(self) -> Removed:
        """Returns the result of a deletion."""
        return Removed(self.record, self.marker, self.stamp)

    def end_stamp(self) -> int:
        """Returns the stamp of an upload's end."""
        return self.stamp


class ForwardedData(msgspec.Struct, frozen=True, omit_defaults=True):
    """`size` bytes of a body, followed by a `WriteSpec`, that become an object, or a part of an upload."""

    bucket: str
    key: str
    size: int
    upload: str = ""
    number: int = 0


FORWARD_REQUEST: Final = PeerCall(
    f"{PREFIX}replica/decide",
    request=cast("type[ForwardedRequest]", ForwardedRequest),
    response=WriteResult,
    max_bytes=8 << 20,  # a completion of 10,000 parts, and all that is said of it
    timeout=_ANSWER_TIMEOUT,
    map_wait=1.0,
)
FORWARD_WRITE: Final = PeerCall(
    f"{PREFIX}replica/write",
    request=ForwardedData,
    response=WriteResult,
    target=IN_QUERY,
    max_bytes=None,
    timeout=_ANSWER_TIMEOUT,
    map_wait=1.0,
)
_CHANGED: Final = "the object was changed or already exists; read it again"
_ERRORS: Final[dict[WriteErrorKind, tuple[type[StoreError], str]]] = {
    "missing": (ConditionMissingError, "If-Match was given, but no object has this key"),
    "upload": (NoSuchUploadError, "the upload was completed or aborted"),
    "version": (NoSuchVersionError, "the version does not exist"),
}
_decode_spec: Final = msgspec.msgpack.Decoder(WriteSpec).decode


def result_of_error(error: StoreError) -> WriteResult | None:
    """Returns the result for an error that answers the request; None for any other error."""
    if isinstance(error, InvalidPartError):
        return WriteResult(trouble="part", number=error.number)
    if isinstance(error, ConditionFailedError):
        return WriteResult(trouble="failed", condition=error.condition)
    found = [trouble for trouble, (kind, _) in _ERRORS.items() if isinstance(error, kind)]
    return WriteResult(trouble=found[0]) if found else None


class StoreForwarder(WriteForwarder):
    """Forwards writes of the replicated store. One per process."""

    async def forward_request(
        self, node: Node, request: ForwardedRequest, context: WriteContext
    ) -> WriteResult:
        """Forwards a write without data; see `send`. Raises the error that the primary met."""
        with _counting():
            decided = await self.send(node, FORWARD_REQUEST, request, context)
        decided.raise_error()
        return decided

    async def forward_write(
        self,
        node: Node,
        name: tuple[str, str],
        size: int,
        pieces: AsyncGenerator[bytes, None],
        written: WriteSpec,
        context: WriteContext,
        part: tuple[str, int] | None = None,
    ) -> Record:
        """Forwards `size` bytes that become the object of this bucket and key, or the part with this upload
        id and number; see `send`. Raises the error that the primary met."""
        asked = ForwardedData(*name, size, *(part or ()))
        body = body_with_message(pieces, encode_message(written))
        with _counting():
            decided = await self.send(node, FORWARD_WRITE, asked, context, body)
        decided.raise_error()
        return decided.require_record()


@contextmanager
def _counting() -> Iterator[None]:
    try:
        yield
    except WriteNotTakenError:
        metrics.replication_writes_forwarded.labels("retry").inc()
        raise
    metrics.replication_writes_forwarded.labels("done").inc()


class ForwardedWriteHandlers:
    """One per process. `store`: this node's own; `replicated`: the store that commits writes as the
    primary."""

    def __init__(self, store: StoreReader, replicated: StoreWriter, mesh: ClusterView) -> None:
        self._store, self._replicated, self._mesh = store, replicated, mesh

    @handler(FORWARD_REQUEST)
    async def change_name(self, request: ForwardedRequest, context: CallContext) -> WriteResult:
        self._mesh.require_primary(request.bucket, request.key)
        return await self._result(self._execute(request, _write_context(context)))

    @handler(FORWARD_WRITE)
    async def write_object(self, data: ForwardedData, context: CallContext) -> WriteResult:
        self._mesh.require_primary(data.bucket, data.key)
        if not data.upload:
            writer = self._replicated.writer(data.bucket, data.key, size=data.size)
        else:
            upload = self._store.get_upload(data.bucket, data.key, data.upload)
            if upload is None:
                return await self._result(self._raise_ended(data.bucket, data.key, data.upload))
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

    async def _execute(self, request: ForwardedRequest, context: WriteContext) -> WriteResult:
        """Raises StoreError."""
        replicated = self._replicated
        if isinstance(request, DeleteRequest):
            return _deletion_result(await self._delete(request, context))
        if isinstance(request, AmendRequest):
            record = await replicated.amend(
                request.bucket,
                request.key,
                request.version,
                tags=request.tags,
                acl=request.acl,
                context=context,
            )
            return WriteResult(without_local_fields(record))
        if isinstance(request, CreateUploadRequest):
            upload = await replicated.create_upload(request.about, context=context)
            return WriteResult(upload=upload_without_local_fields(upload))
        found = self._store.get_upload(request.bucket, request.key, request.upload_id)
        if found is None:
            return await self._raise_ended(request.bucket, request.key, request.upload_id)
        if isinstance(request, CompleteUploadRequest):
            record = await replicated.complete_upload(
                found,
                request.parts,
                request.meta,
                request.conditions,
                etags=request.etags,
                versioning=request.versioning,
                context=context,
            )
            return WriteResult(without_local_fields(record))
        assert isinstance(request, AbortUploadRequest)
        return WriteResult(stamp=await replicated.abort_upload(found, context=context))

    async def _raise_ended(self, bucket: str, key: str, upload_id: str) -> NoReturn:
        """Raises NoSuchUploadError once every node of the write set has the end of this upload."""
        await self._replicated.wait_upload_end_replicated(bucket, key, upload_id)
        raise NoSuchUploadError(f"upload {upload_id} was completed or aborted")

    async def _delete(self, request: DeleteRequest, context: WriteContext) -> Removed:
        replicated, bucket, key, conditions = (
            self._replicated,
            request.bucket,
            request.key,
            request.conditions,
        )
        if request.version is None:
            return await replicated.delete(
                bucket, key, conditions=conditions, versioning=request.versioning, context=context
            )
        return await replicated.delete_version(
            bucket, key, request.version, conditions=conditions, stamp=request.stamp, context=context
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
