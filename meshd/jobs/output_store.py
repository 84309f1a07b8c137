"""Output store: stores, finds and removes the outputs of jobs at the primary of each key, on any node.

Law: an output is written completely or not at all, under the current settings of the target. When a write or
a lookup returns, the output that it wrote or found is durable on every required replica. Unreachable or
disagreeing nodes raise Busy, and the job retries. A node accepts calls only for names whose primary it is;
otherwise it answers 421 with its map version and changes nothing. The node that runs the job has authorized
it. A write that is cancelled before its commit leaves nothing; a commit or removal in progress ends before
the cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from types import NoneType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from meshd.cluster.replication.primary_writes import WriteNotTakenError
from meshd.core.api_errors import BatchError, busy
from meshd.rpc.peer_rpc import PREFIX, PeerCall, QueryTarget, decode_message, handler
from meshd.store.errors import CorruptExtentError
from meshd.store.records import INTERNAL_WRITE, NULL, Meta
from meshd.util import failpoints
from meshd.util.async_tasks import finish_before_cancel
from meshwire.errors import CODES, S3Error
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.primary_writes import WriteForwarder
    from meshd.core.object_io import StoredCallback
    from meshd.objects.object_reader import VersionLookup
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.rpc.peer_client import PeerRefusedError
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import StoreReader, StoreWriter
    from meshd.store.records import Page, Record
    from meshd.store.writer_api import ObjectWriter
    from meshwire.cluster import Node


_log = logging.getLogger("meshd.jobs")
MAX_METADATA_BYTES: Final = 64 << 10
_LENGTH_BYTES: Final = 4
_TIMEOUT: Final = 90.0
"""Seconds of silence: the primary of a name may wait for its replicas before it answers."""
COMMIT_SECONDS: Final = _TIMEOUT + 10.0
"""Seconds for which a cancelled run waits for its commits in progress: longer than these wait for a node."""
BodyPiece = bytes | memoryview
UserMetadata = dict[str, str]
Request = TypeVar("Request")
Response = TypeVar("Response")


class OutputMetadata(msgspec.Struct, frozen=True):
    """The metadata that is stored with the bytes of an output."""

    etag: str
    headers: dict[str, str]
    metadata: dict[str, str]
    checksums: dict[str, str]
    owner: str

    def meta(self) -> Meta:
        return Meta(self.etag, self.headers, self.metadata, self.checksums, "FULL_OBJECT", self.owner)


_decode_metadata: Final = msgspec.msgpack.Decoder(OutputMetadata).decode


class RemoveOutputs(msgspec.Struct, frozen=True):
    """The objects to remove."""

    bucket: str
    keys: list[str]


class LookupOutputs(msgspec.Struct, frozen=True):
    """The objects to look for."""

    bucket: str
    keys: list[str]


class OutputName(msgspec.Struct, frozen=True):
    """An object whose bytes and `OutputMetadata` follow in the body; `size` is -1 if unknown."""

    bucket: str
    key: str
    size: int


LOOKUP_OUTPUTS: Final = PeerCall(
    f"{PREFIX}outputs/lookup",
    request=LookupOutputs,
    response=list[UserMetadata | None],
    max_bytes=16 << 20,
    timeout=_TIMEOUT,
    map_wait=1.0,
)
WRITE_OUTPUT: Final = PeerCall(
    f"{PREFIX}outputs/write",
    request=OutputName,
    response=NoneType,
    target=QueryTarget(quote),
    max_bytes=None,
    timeout=_TIMEOUT,
    map_wait=1.0,
)
REMOVE_OUTPUTS: Final = PeerCall(
    f"{PREFIX}outputs/remove",
    request=RemoveOutputs,
    response=NoneType,
    max_bytes=16 << 20,
    timeout=_TIMEOUT,
    map_wait=1.0,
)


class OutputTarget(msgspec.Struct, frozen=True):
    """An object to write; `size` in bytes if it is known in advance."""

    bucket: str
    key: str
    size: int | None


class OutputStore(Protocol):
    """Stores the outputs of jobs."""

    async def lookup_outputs(self, bucket: str, keys: Sequence[str]) -> Sequence[UserMetadata | None]:
        """Return the user metadata of the objects with these keys, None for a key without an object.

        Every object that is found is on every required replica when this returns, even if its write was
        interrupted before it had reached all of them. Raises NotReplicatedError.
        """
        ...

    async def list_outputs(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """Return a page of the objects under a prefix."""
        ...

    async def write_output(
        self, target: OutputTarget, body: AsyncGenerator[BodyPiece, None], facts: Callable[[], OutputMetadata]
    ) -> None:
        """Store the body. `facts` is called once the body has been consumed.

        A piece that is a memoryview must not change until the second piece after it is requested. Raises
        BatchError NoSuchBucket, Busy; StoreError, S3Error, and the body's errors.
        """
        ...

    async def remove_outputs(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove objects."""
        ...


class LocalOutputStore:
    """Stores outputs whose primary is this node. One per process.

    `replicated` also sends writes to the other replicas; `stored` is called for every output.
    """

    def __init__(
        self, store: StoreReader, replicated: StoreWriter, versions: VersionLookup, stored: StoredCallback
    ) -> None:
        self._store, self._replicated, self._versions, self._stored = store, replicated, versions, stored

    def __repr__(self) -> str:
        return f"<LocalOutputStore to {self._replicated!r}>"

    async def lookup_outputs(self, bucket: str, keys: Sequence[str]) -> Sequence[UserMetadata | None]:
        """See `OutputStore.lookup_outputs`."""
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(self._lookup(bucket, key)) for key in keys]
        return [each.result() for each in found]

    async def _lookup(self, bucket: str, key: str) -> UserMetadata | None:
        """Return an output's metadata. Returns None if its bytes are damaged, too, so that the job writes it
        again."""
        record = self._store.get(bucket, key)
        if record is None or record.broken:
            return None
        try:
            await self._replicated.wait_replicated(bucket, key, record)
        except CorruptExtentError as error:
            _log.warning("a damaged output is written again", extra={"key": key, "why": str(error)})
            return None
        return dict(record.metadata)

    async def list_outputs(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """See `OutputStore.list_outputs`."""
        return await asyncio.to_thread(self._store.list, bucket, prefix=prefix, after=after, limit=limit)

    async def write_output(
        self, target: OutputTarget, body: AsyncGenerator[BodyPiece, None], facts: Callable[[], OutputMetadata]
    ) -> None:
        """See `OutputStore.write_output`."""
        writer = self._replicated.writer(target.bucket, target.key, size=target.size)
        try:
            async for piece in body:
                await (writer.write(piece) if isinstance(piece, bytes) else writer.write_borrowed(piece))
            failpoints.hit("jobs.output.written")
            await finish_before_cancel(self._commit(target, writer, facts().meta()), COMMIT_SECONDS)
        except BaseException:
            await writer.abort()
            raise

    async def _commit(self, target: OutputTarget, writer: ObjectWriter, meta: Meta) -> None:
        setting = self._versions.versioning_of(target.bucket)
        try:
            record = await writer.commit(meta, versioning=setting)
        except CorruptExtentError as error:  # found when it was read to send it to the other nodes
            raise busy(f"an output is damaged and will be written again: {error}") from error
        failpoints.hit("jobs.output.committed")
        await self._settle(target, record)

    async def _settle(self, target: OutputTarget, record: Record) -> None:
        """Finish a write; if the bucket was deleted in the meantime, delete the output again."""
        if not self._versions.has_bucket(target.bucket):
            same = Conditions(if_match=(record.etag,))
            await self._replicated.delete_version(
                target.bucket, target.key, record.version or NULL, conditions=same
            )
            raise BatchError("NoSuchBucket", f"the bucket {target.bucket!r} was deleted while the job ran")
        steps = self._stored(target.bucket, target.key, record)
        if steps is not None:
            await steps

    async def remove_outputs(self, bucket: str, keys: Sequence[str]) -> None:
        """See `OutputStore.remove_outputs`."""
        setting = self._versions.versioning_of(bucket)
        removal = self._replicated.delete_many(bucket, keys, versioning=setting)
        await finish_before_cancel(removal, COMMIT_SECONDS)


class ClusterOutputStore:
    """Stores outputs in a cluster: sends each to the primary of its name, in one call."""

    def __init__(
        self, own: LocalOutputStore, objects: RemoteObjects, mesh: ClusterView, forwarder: WriteForwarder
    ) -> None:
        self._own, self._objects, self._mesh, self._forwarder = own, objects, mesh, forwarder

    def __repr__(self) -> str:
        return f"<ClusterOutputStore of {self._mesh.node_id}>"

    async def lookup_outputs(self, bucket: str, keys: Sequence[str]) -> Sequence[UserMetadata | None]:
        """See `OutputStore.lookup_outputs`. Raises BatchError Busy."""
        if self._mesh.single_node:
            return await self._own.lookup_outputs(bucket, keys)
        found: dict[str, UserMetadata | None] = {}
        async with asyncio.TaskGroup() as group:
            for node, some in self._by_primary(bucket, keys):
                group.create_task(self._lookup(node, bucket, some, found))
        return [found[key] for key in keys]

    async def _lookup(
        self, node: Node | None, bucket: str, keys: Sequence[str], found: dict[str, UserMetadata | None]
    ) -> None:
        if node is None:
            found.update(zip(keys, await self._own.lookup_outputs(bucket, keys), strict=True))
        else:
            theirs = await self._send(node, LOOKUP_OUTPUTS, LookupOutputs(bucket, list(keys)))
            found.update(zip(keys, theirs, strict=True))

    async def list_outputs(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """See `OutputStore.list_outputs`. Raises BatchError Busy."""
        if self._mesh.single_node:
            return await self._own.list_outputs(bucket, prefix, after, limit)
        return await self._objects.list_page(bucket, prefix, after, limit)

    async def write_output(
        self, target: OutputTarget, body: AsyncGenerator[BodyPiece, None], facts: Callable[[], OutputMetadata]
    ) -> None:
        """See `OutputStore.write_output`."""
        node = self._mesh.other_primary(target.bucket, target.key)
        if node is None:
            await self._own.write_output(target, body, facts)
            return
        name = OutputName(target.bucket, target.key, -1 if target.size is None else target.size)
        sent = asyncio.Event()  # the whole body: from then on, the other node may commit
        send = self._send(node, WRITE_OUTPUT, name, _body_with_metadata(body, facts, sent))
        await finish_before_cancel(send, COMMIT_SECONDS, sent.is_set)
        failpoints.hit("jobs.output.committed")

    async def remove_outputs(self, bucket: str, keys: Sequence[str]) -> None:
        """See `OutputStore.remove_outputs`."""
        async with asyncio.TaskGroup() as group:
            for node, some in self._by_primary(bucket, keys):
                group.create_task(self._remove(node, bucket, some))

    def _by_primary(self, bucket: str, keys: Sequence[str]) -> Iterable[tuple[Node | None, list[str]]]:
        """Group the keys by the primary of their names, None for this node."""
        groups: dict[str, tuple[Node | None, list[str]]] = {}
        for key in keys:
            node = self._mesh.other_primary(bucket, key)
            groups.setdefault("" if node is None else node.node_id, (node, []))[1].append(key)
        return groups.values()

    async def _remove(self, node: Node | None, bucket: str, keys: Sequence[str]) -> None:
        if node is None:
            await self._own.remove_outputs(bucket, keys)
            return
        removal = self._send(node, REMOVE_OUTPUTS, RemoveOutputs(bucket, list(keys)))
        await finish_before_cancel(removal, COMMIT_SECONDS)

    async def _send(
        self,
        node: Node,
        call: PeerCall[Request, Response],
        request: Request,
        body: AsyncGenerator[bytes, None] | None = None,
    ) -> Response:
        """Send a call. Raises BatchError Busy if the node did not act: the job then sends the same output
        again. Also raises as `WriteForwarder.send` does."""
        try:
            return await self._forwarder.send(
                node, call, request, INTERNAL_WRITE, body, repeatable=True, refused=_refusal
            )
        except WriteNotTakenError as error:
            raise busy(f"an output cannot be written now: {error}") from error


def _refusal(_: Node, refused: PeerRefusedError) -> Exception:
    if refused.code == "NoSuchBucket":
        return BatchError("NoSuchBucket", refused.message)
    return S3Error(refused.code if refused.code in CODES else "SlowDown", refused.message)


async def _body_with_metadata(
    body: AsyncGenerator[BodyPiece, None], facts: Callable[[], OutputMetadata], sent: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes, the encoded metadata, and its length. Sets `sent` before the last two."""
    async with aclosing(body):
        async for piece in body:
            yield bytes(piece)
    metadata = msgspec.msgpack.encode(facts())
    sent.set()
    yield metadata + len(metadata).to_bytes(_LENGTH_BYTES, "big")


class OutputBodyParser:
    """Parses a body that `ClusterOutputStore.write_output` sent: read `pieces` first, then `metadata`."""

    def __init__(self, source: AsyncIterable[bytes]) -> None:
        self._source, self._ending = source, bytearray()

    def __repr__(self) -> str:
        return f"<OutputBodyParser, {len(self._ending)} bytes held>"

    async def pieces(self) -> AsyncGenerator[BodyPiece, None]:
        """Yield the bytes of the output."""
        kept = MAX_METADATA_BYTES + _LENGTH_BYTES  # the last bytes, which may be metadata
        async for piece in self._source:
            self._ending += piece
            if len(self._ending) > 2 * kept:
                yield bytes(self._ending[:-kept])
                del self._ending[:-kept]
        length = int.from_bytes(self._ending[-_LENGTH_BYTES:], "big")
        end = len(self._ending) - _LENGTH_BYTES - length
        if end < 0 or length > MAX_METADATA_BYTES:
            raise S3Error("InvalidArgument", "an output was received without its metadata")
        if end:
            yield bytes(self._ending[:end])
        del self._ending[:end]

    def metadata(self) -> OutputMetadata:
        """Return the metadata at the end of the body. Raises S3Error InvalidArgument."""
        return decode_message(bytes(self._ending[:-_LENGTH_BYTES]), _decode_metadata)


class JobOutputHandlers:
    """Handles the calls of other nodes. One per process."""

    def __init__(self, own: LocalOutputStore, mesh: ClusterView) -> None:
        self._own, self._mesh = own, mesh

    @handler(LOOKUP_OUTPUTS)
    async def lookup_outputs(self, request: LookupOutputs, context: CallContext) -> list[UserMetadata | None]:
        for key in request.keys:
            self._mesh.require_primary(request.bucket, key)
        return [*await self._own.lookup_outputs(request.bucket, request.keys)]

    @handler(WRITE_OUTPUT)
    async def write_output(self, name: OutputName, context: CallContext) -> None:
        self._mesh.require_primary(name.bucket, name.key)
        target = OutputTarget(name.bucket, name.key, None if name.size < 0 else name.size)
        body = OutputBodyParser(context.iter_body())
        async with aclosing(body.pieces()) as pieces:
            await self._own.write_output(target, pieces, body.metadata)

    @handler(REMOVE_OUTPUTS)
    async def remove_outputs(self, request: RemoveOutputs, context: CallContext) -> None:
        for key in request.keys:
            self._mesh.require_primary(request.bucket, key)
        await self._own.remove_outputs(request.bucket, request.keys)
