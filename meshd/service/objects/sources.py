"""Sources of copies that other nodes hold: found, judged and read there, stored here.

Law: what a source is (an object, a version, a member of an archive) is decided where it lies; its bytes come
in checked pieces, of exactly the content that was found. Invariant: what changes in the middle makes the copy
fail, never a mixture.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.net.peers import PREFIX, PeerRefusedError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.net.wires import PeerUnreachableError
from meshd.service.semantics.bodies import MAX_PUT_BYTES, check_size
from meshd.service.semantics.copying import checked_source, copied_meta, judge_source, part_range, read_pieces
from meshd.service.semantics.refinding import anew_if_brought
from meshd.service.semantics.translation import store_errors
from meshd.service.views.copies import MadeBody, as_part
from meshd.service.views.kinds import Made
from meshd.store.records import Record
from meshwire.checksums import BodyDigests, BodyVerifier
from meshwire.s3 import operations as ops
from meshwire.s3.errors import CODES, S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.cluster.mesh import Mesh
    from meshd.net.peers import Peers
    from meshd.service.backed.service import BackedService
    from meshd.service.objects.members import MemberService
    from meshd.service.semantics.versions import Versions
    from meshd.store.interface import ObjectStore
    from meshwire.checksums import BodyDigest
    from meshwire.cluster import Node

FIND: Final = f"{PREFIX}sources/find"
READ: Final = f"{PREFIX}sources/read"
STAT: Final = f"{PREFIX}sources/stat"
_SILENCE: Final = 30.0
_ROUNDS: Final = 8
_PAUSE: Final = 0.5  # seconds for a newer map
_LOST: Final = (PeerUnreachableError, PieceError, StaleMapError)

Copy = ops.CopyObject | ops.UploadPartCopy


class SourceAsk(msgspec.Struct, frozen=True, array_like=True):
    """What is to be copied; for reading, the bytes of content `etag`."""

    bucket: str
    key: str
    version: str | None = None
    member: str | None = None
    etag: str = ""
    offset: int = 0
    length: int = 0


class LocalSources:
    """What this node gives others to copy. One a process."""

    def __init__(
        self,
        store: ObjectStore,
        versions: Versions,
        members: MemberService,
        backed: BackedService | None = None,
    ) -> None:
        self._store, self._versions, self._members, self._backed = store, versions, members, backed

    def __repr__(self) -> str:
        return "<LocalSources>"

    def has(self, bucket: str, key: str) -> bool:
        """Whether a name has any version here."""
        return self._store.newest(bucket, key) is not None

    async def find(self, ask: SourceAsk) -> Record:
        """What a copy reads, without what only this node can use. Raises S3Error."""
        record = await self._find(ask)
        return msgspec.structs.replace(record, extents=(), manifest=None)

    async def read(self, ask: SourceAsk) -> AsyncGenerator[bytes, None]:
        """Its bytes. Raises S3Error PreconditionFailed when the content is another one by now."""
        if ask.member is not None:
            body = await self._member(ask)
            async for piece in body.pieces(BodyDigests()):
                yield piece
            return
        record = await anew_if_brought(partial(self._place, ask))
        if isinstance(record, Made):
            body = MadeBody(record, ask.offset, ask.length)
            async for piece in body.pieces(BodyDigests()):
                yield piece
            return
        if record.etag != ask.etag:
            raise S3Error("PreconditionFailed", "The source was replaced while it was copied.")
        async with aclosing(read_pieces(self._store, record, ask.offset, ask.length)) as pieces:
            async for piece in pieces:
                yield piece

    async def _find(self, ask: SourceAsk) -> Record:
        if ask.member is not None:
            return (await self._members.source(_source(ask))).record
        record = await anew_if_brought(partial(self._place, ask))
        return record.record if isinstance(record, Made) else record

    async def _place(self, ask: SourceAsk) -> Made | Record:
        """Where the bytes of a source are: at an origin, or here. Raises S3Error."""
        return await self._made(ask) or self._versions.source(_source(ask))

    async def _made(self, ask: SourceAsk) -> Made | None:
        """What lies at an origin; None for the rest. Raises S3Error."""
        made = None if self._backed is None else await self._backed.made(ask.bucket, ask.key)
        if made is not None and ask.etag and made.record.etag != ask.etag:
            raise S3Error("PreconditionFailed", "The source was replaced while it was copied.")
        return made

    async def _member(self, ask: SourceAsk) -> MadeBody:
        made = await self._members.source(_source(ask))
        if made.record.etag != ask.etag:
            raise S3Error("PreconditionFailed", "The archive was replaced while it was copied from.")
        return MadeBody(made, ask.offset, ask.length)


def _source(ask: SourceAsk) -> ops.CopySource:
    return ops.CopySource(ask.bucket, ask.key, ask.version, ask.member)


class FarSources:
    """What other nodes hold of copies that are made here. One a process."""

    def __init__(self, mesh: Mesh, peers: Peers, versions: Versions, local: LocalSources) -> None:
        self._mesh, self._peers, self._versions, self._local = mesh, peers, versions, local

    def __repr__(self) -> str:
        return f"<FarSources of {self._mesh.node_id}>"

    def is_far(self, source: ops.CopySource) -> bool:
        """Whether other nodes hold a source, and this one does not."""
        return not self._mesh.alone and not self._mesh.is_reader(source.bucket, source.key)

    async def has(self, bucket: str, key: str) -> bool:
        """Whether a name has any version, wherever it is. Raises S3Error SlowDown."""
        found = await self._asked(SourceAsk(bucket, key), STAT)
        return self._local.has(bucket, key) if found is None else bool(found)

    async def find(self, source: ops.CopySource) -> Record:
        """What a copy reads of another node. Raises S3Error, as `Versions.source` does, and SlowDown."""
        ask = SourceAsk(source.bucket, source.key, source.version, source.member)
        found = await self._asked(ask, FIND)
        if found is None:
            with store_errors():
                return await self._local.find(ask)
        return msgspec.msgpack.decode(found, type=Record)

    async def copied(self, operation: ops.CopyObject, record: Record) -> tuple[ops.PutObject, FarBody]:
        """The copy as the upload that it is. Raises S3Error."""
        versioned = bool(self._versions.setting(operation.bucket))
        checked_source(record, operation, MAX_PUT_BYTES, versioned=versioned)
        meta = copied_meta(record, operation, "")
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
        return put, FarBody(self, operation.source, record, 0, record.size)

    async def part_copied(
        self, operation: ops.UploadPartCopy, record: Record
    ) -> tuple[ops.UploadPart, FarBody]:
        """The part as the upload that it is. Raises S3Error."""
        judge_source(operation.source_conditions, record)
        offset, length = part_range(operation.range, record.size)
        check_size(length)
        return as_part(operation), FarBody(self, operation.source, record, offset, length)

    async def pieces(self, ask: SourceAsk) -> AsyncGenerator[bytes, None]:
        """Bytes of a source, from a node that holds it; from the next one while none came. Raises S3Error."""
        search = _Search(self._mesh, ask)
        while (node := await search.holder()) is not None:
            begun = False
            try:
                async with self._peers.call(
                    node, "POST", READ, body=msgspec.msgpack.encode(ask), timeout=_SILENCE
                ) as answer:
                    async for piece in answer.pieces():
                        begun = True
                        yield piece
            except PeerRefusedError as refused:
                raise _refusal(refused) from refused
            except _LOST as lost:
                if begun:
                    why = f"The source cannot be read at present: {lost}. Try again."
                    raise S3Error("SlowDown", why) from lost
                await search.missed(node, lost)
            else:
                return
        with store_errors():
            async with aclosing(self._local.read(ask)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _asked(self, ask: SourceAsk, door: str) -> bytes | None:
        """What a node that holds it answers; None: this one holds it, by now. Raises S3Error."""
        body, search = msgspec.msgpack.encode(ask), _Search(self._mesh, ask)
        while (node := await search.holder()) is not None:
            try:
                async with self._peers.call(node, "POST", door, body=body, timeout=_SILENCE) as answer:
                    return await answer.read()
            except PeerRefusedError as refused:
                raise _refusal(refused) from refused
            except _LOST as lost:
                await search.missed(node, lost)
        return None


class _Search:
    """Who holds a source, by the map of each moment: a change that is completed moves all readers of a name
    at once, this node among them."""

    def __init__(self, mesh: Mesh, ask: SourceAsk) -> None:
        self._mesh, self._ask, self._rounds = mesh, ask, _ROUNDS
        self._version = 0
        self._missed: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<_Search of {self._ask.bucket}/{self._ask.key}, {self._rounds} rounds left>"

    async def holder(self) -> Node | None:
        """The next to be asked; None: this node. Raises S3Error SlowDown when nobody is left."""
        while not self._mesh.is_reader(self._ask.bucket, self._ask.key):
            self._version = self._mesh.map().version
            for node in self._mesh.route(self._ask.bucket, self._ask.key).readers:
                if self._missed.get(node.node_id, -1) < self._version:
                    return node
            if not self._rounds:
                raise _nobody(self._ask)
            self._rounds -= 1
            self._missed.clear()
            await self._mesh.newer_than(self._version, _PAUSE)
        return None

    async def missed(self, node: Node, lost: Exception) -> None:
        """It did not give it: by this map the others are asked first."""
        self._missed[node.node_id] = self._version
        if isinstance(lost, StaleMapError):
            await self._mesh.newer_than(max(lost.version - 1, self._version), _PAUSE)
        else:
            await self._mesh.suspect(node.node_id, self._version)


def _refusal(refused: PeerRefusedError) -> S3Error:
    return S3Error(refused.code if refused.code in CODES else "SlowDown", refused.message)


def _nobody(ask: SourceAsk) -> S3Error:
    return S3Error("SlowDown", f"No node that holds {ask.bucket}/{ask.key[:200]} answers; try again.")


class FarBody:
    """`meshd.service.semantics.bodies.Body` over (a range of) a source that another node holds."""

    def __init__(
        self, far: FarSources, source: ops.CopySource, record: Record, offset: int, length: int
    ) -> None:
        self._ask = SourceAsk(
            source.bucket, source.key, source.version, source.member, record.etag, offset, length
        )
        self._far, self._size = far, length
        self._digest: BodyDigest | None = None

    def __repr__(self) -> str:
        return f"<FarBody of {self._size} bytes>"

    @property
    def size(self) -> int | None:
        return self._size

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(digests, extra=also)
        if self._size:
            async with aclosing(self._far.pieces(self._ask)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(verifier.update, piece)
                    yield piece
        self._digest = verifier.finish()

    def digest(self) -> BodyDigest:
        if self._digest is None or self._digest.size != self._size:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        if self._size > limit:
            raise S3Error("MaxMessageLengthExceeded")
        return b"".join([piece async for piece in self.pieces(digests)])
