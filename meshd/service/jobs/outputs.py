"""Where a job's outputs go: to the node that decides about each name.

Law: written whole or not at all, durable on every node that must have it when `write` returns. What nodes do
not answer, or disagree about, is Busy: the job tries again. Seam: `Outputs`; a lone node calls nobody.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

import msgspec

from meshd.assembly.errors import BatchError, busy
from meshd.kit import failpoints
from meshd.net.peers import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.store.errors import NotReplicatedError
from meshd.store.records import NULL, Meta
from meshwire.conditions import Conditions
from meshwire.s3.errors import CODES, S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence

    from meshd.cluster.mesh import Mesh
    from meshd.net.peers import Peers
    from meshd.service.remote.objects import RemoteObjects
    from meshd.service.semantics.found import Stored
    from meshd.service.semantics.versions import Versions
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Page, Record
    from meshwire.cluster import Node

OUTPUT: Final = "/-/peer/outputs/write"
REMOVAL: Final = "/-/peer/outputs/remove"
MAX_FACTS: Final = 64 << 10
_LENGTH: Final = 4
_SILENCE: Final = 90.0
"""Seconds: whoever decides may wait for its replicas before it answers."""
_PATIENCE: Final = 2.0
_AT_ONCE: Final = 64
Lent = bytes | memoryview


class Facts(msgspec.Struct, frozen=True):
    """What is kept of an output, beside its bytes."""

    etag: str
    headers: dict[str, str]
    metadata: dict[str, str]
    checksums: dict[str, str]
    owner: str

    def meta(self) -> Meta:
        return Meta(self.etag, self.headers, self.metadata, self.checksums, "FULL_OBJECT", self.owner)


class Removal(msgspec.Struct, frozen=True):
    """Objects that are to go."""

    bucket: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Target:
    """An object to be written; `size` in bytes where it is known before."""

    bucket: str
    key: str
    size: int | None


class Outputs(Protocol):
    """Who writes them."""

    async def present(self, bucket: str, keys: Sequence[str]) -> Sequence[Record | None]:
        """What is there under these keys."""
        ...

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """A page of what is there under a prefix."""
        ...

    async def write(
        self, target: Target, body: AsyncGenerator[Lent, None], facts: Callable[[], Facts]
    ) -> None:
        """Store the body; `facts` are asked for once it has all been taken. A piece that is a memoryview must
        stay as it is until the one after the next is asked for. Raises BatchError NoSuchBucket, Busy;
        StoreError, S3Error, whatever the body raises."""
        ...

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """Remove objects."""
        ...


class OwnOutputs:
    """What this node decides about. One a process; `store` tells the other nodes, `stored` is told of every
    output."""

    def __init__(self, store: ObjectStore, versions: Versions, stored: Stored) -> None:
        self._store, self._versions, self._stored = store, versions, stored

    def __repr__(self) -> str:
        return f"<OwnOutputs to {self._store!r}>"

    async def present(self, bucket: str, keys: Sequence[str]) -> Sequence[Record | None]:
        """See Outputs."""
        return [self._store.get(bucket, key) for key in keys]

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """See Outputs."""
        return await asyncio.to_thread(self._store.list, bucket, prefix=prefix, after=after, limit=limit)

    async def write(
        self, target: Target, body: AsyncGenerator[Lent, None], facts: Callable[[], Facts]
    ) -> None:
        """See Outputs."""
        writer = self._store.writer(target.bucket, target.key, size=target.size)
        try:
            async for piece in body:
                await (writer.write(piece) if isinstance(piece, bytes) else writer.lend(piece))
            failpoints.hit("jobs.output.written")
            setting = self._versions.setting(target.bucket)
            record = await writer.commit(facts().meta(), versioning=setting)
        except BaseException:
            await writer.abort()
            raise
        failpoints.hit("jobs.output.committed")
        await self._settle(target, record)

    async def _settle(self, target: Target, record: Record) -> None:
        """The bucket may have been deleted meanwhile; then what was written must go again."""
        if not self._versions.has_bucket(target.bucket):
            same = Conditions(if_match=(record.etag,))
            await self._store.delete_version(
                target.bucket, target.key, record.version or NULL, conditions=same
            )
            raise BatchError("NoSuchBucket", f"the bucket {target.bucket!r} was deleted while the job ran")
        await self._stored(target.bucket, target.key, record)

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """See Outputs."""
        await self._store.delete_many(bucket, keys, versioning=self._versions.setting(bucket))


class MeshOutputs:
    """The same on a mesh: each to the node that decides about its name, by one call."""

    def __init__(self, own: OwnOutputs, objects: RemoteObjects, mesh: Mesh, peers: Peers) -> None:
        self._own, self._objects, self._mesh, self._peers = own, objects, mesh, peers

    def __repr__(self) -> str:
        return f"<MeshOutputs of {self._mesh.node_id}>"

    async def present(self, bucket: str, keys: Sequence[str]) -> Sequence[Record | None]:
        """See Outputs. Raises BatchError Busy."""
        if self._mesh.alone:
            return await self._own.present(bucket, keys)
        return await self._objects.many([(bucket, key) for key in keys])

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """See Outputs. Raises BatchError Busy."""
        if self._mesh.alone:
            return await self._own.page(bucket, prefix, after, limit)
        return await self._objects.page(bucket, prefix, after, limit)

    async def write(
        self, target: Target, body: AsyncGenerator[Lent, None], facts: Callable[[], Facts]
    ) -> None:
        """See Outputs."""
        node = self._decider(target.bucket, target.key)
        if node is None:
            await self._own.write(target, body, facts)
            return
        size = -1 if target.size is None else target.size
        query = f"bucket={quote(target.bucket, safe='')}&key={quote(target.key, safe='')}&size={size}"
        await self._call(node, f"{OUTPUT}?{query}", _joined(body, facts))
        failpoints.hit("jobs.output.committed")

    async def remove(self, bucket: str, keys: Sequence[str]) -> None:
        """See Outputs."""
        groups: dict[str, list[str]] = defaultdict(list)
        nodes: dict[str, Node | None] = {}
        for key in keys:
            node = self._decider(bucket, key)
            name = "" if node is None else node.node_id
            nodes[name] = node
            groups[name].append(key)
        async with asyncio.TaskGroup() as group:
            for name, some in groups.items():
                group.create_task(self._remove(nodes[name], bucket, some))

    async def _remove(self, node: Node | None, bucket: str, keys: Sequence[str]) -> None:
        if node is None:
            await self._own.remove(bucket, keys)
            return
        await self._call(node, REMOVAL, msgspec.msgpack.encode(Removal(bucket, list(keys))))

    def _decider(self, bucket: str, key: str) -> Node | None:
        """None: this node. Raises NotReplicatedError."""
        if self._mesh.alone:
            return None
        decider = self._mesh.route(bucket, key).decider
        if decider is None:
            raise NotReplicatedError(f"every node that has the data of {bucket}/{key[:200]} is away")
        return None if decider.node_id == self._mesh.node_id else decider

    async def _call(self, node: Node, target: str, body: bytes | AsyncIterable[bytes]) -> None:
        version = self._mesh.map().version
        try:
            async with self._peers.call(node, "POST", target, body=body, timeout=_SILENCE) as answer:
                await answer.read()
        except StaleMapError as stale:
            await self._mesh.newer_than(max(stale.version - 1, version), _PATIENCE)
            raise busy(f"{node.node_id} does not decide about an output any more") from stale
        except (PeerUnreachableError, PieceError) as lost:
            await self._mesh.suspect(node.node_id, version)
            raise busy(f"an output cannot be written now: {lost}") from lost
        except PeerRefusedError as refused:
            if refused.code == "NoSuchBucket":
                raise BatchError("NoSuchBucket", refused.message) from refused
            code = refused.code if refused.code in CODES else "SlowDown"
            raise S3Error(code, refused.message) from refused


async def _joined(
    body: AsyncGenerator[Lent, None], facts: Callable[[], Facts]
) -> AsyncGenerator[bytes, None]:
    """Bytes, facts, and the facts' length."""
    async with aclosing(body):
        async for piece in body:
            yield bytes(piece)
    told = msgspec.msgpack.encode(facts())
    yield told + len(told).to_bytes(_LENGTH, "big")


class Parted:
    """A body as `write` of MeshOutputs sends it, taken apart as it comes: `pieces`, afterwards `facts`."""

    def __init__(self, source: AsyncIterable[bytes]) -> None:
        self._source, self._ending = source, bytearray()

    def __repr__(self) -> str:
        return f"<Parted, {len(self._ending)} bytes held>"

    async def pieces(self) -> AsyncGenerator[Lent, None]:
        """The output's bytes."""
        kept = MAX_FACTS + _LENGTH
        async for piece in self._source:
            self._ending += piece
            if len(self._ending) > 2 * kept:
                yield bytes(self._ending[:-kept])
                del self._ending[:-kept]
        length = int.from_bytes(self._ending[-_LENGTH:], "big")
        end = len(self._ending) - _LENGTH - length
        if end < 0 or length > MAX_FACTS:
            raise S3Error("InvalidArgument", "an output came without its facts")
        if end:
            yield bytes(self._ending[:end])
        del self._ending[:end]

    def facts(self) -> Facts:
        """Raises S3Error InvalidArgument."""
        try:
            return msgspec.msgpack.decode(bytes(self._ending[:-_LENGTH]), type=Facts)
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"an output's facts say nothing: {error}") from error
