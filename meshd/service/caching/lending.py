"""Pieces of objects of origins, from other nodes that have them: a new home of a bucket is filled by those it
has, and its source is not asked.

Law: a node gives what it has cached, of exactly the ETag that is asked for, and fetches nothing for another.
Where nobody has it, or does not answer at once, the origin is asked as ever.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from meshd.errors import MeshdError
from meshd.origin.errors import OriginDownError
from meshd.origin.interface import Facts, Reply  # noqa: TC001  msgspec reads the annotations
from meshd.service.caching.shelf import CHUNK
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.net.peers import Peers
    from meshd.service.caching.shelf import Shelf
    from meshwire.cluster import Node

LEND: Final = "/-/peer/origins/lend"
MAX_ASK_BYTES: Final = 64 << 10
_ASKED: Final = 3  # other homes that are asked for a piece
_GIVEN: Final = 8  # pieces a process gives at a time: so many are in its memory
_STEP: Final = 1 << 20
_PATIENCE: Final = 5.0  # seconds of silence
_REST: Final = 5.0  # seconds a node that failed is not asked
_BROKEN: Final = (MeshdError, msgspec.MsgspecError)


class LendAsk(Struct, frozen=True, forbid_unknown_fields=True):
    """Chunk `number` of an object, or all of a small one. `etag`: empty where every version is the same."""

    bucket: Annotated[str, Meta(max_length=63)]
    created_ms: int
    key: Annotated[str, Meta(max_length=4096)]
    number: Annotated[int, Meta(ge=0)]
    etag: Annotated[str, Meta(max_length=4096)] = ""


class _Lent(Struct, frozen=True, array_like=True):
    """What comes before the bytes."""

    length: int
    facts: Facts


_decode = msgspec.msgpack.Decoder(LendAsk).decode
_encode = msgspec.msgpack.Encoder().encode
_lent = msgspec.msgpack.Decoder(_Lent).decode


def decode_ask(body: bytes) -> LendAsk:
    """Raises msgspec.MsgspecError."""
    return _decode(body)


def _check(lent: _Lent, ask: LendAsk) -> None:
    """Raises msgspec.ValidationError for what is not that piece."""
    facts, start = lent.facts, ask.number * CHUNK
    if (ask.etag and facts.etag != ask.etag) or lent.length != min(CHUNK, facts.size - start):
        raise msgspec.ValidationError("another piece than the one that was asked for")


class Lender:
    """What this node gives. One a process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._slots = shelf, asyncio.Semaphore(_GIVEN)

    def __repr__(self) -> str:
        return f"<Lender of {self._shelf!r}>"

    @asynccontextmanager
    async def given(self, ask: LendAsk) -> AsyncGenerator[Iterator[bytes]]:
        """What the piece is, and its bytes; nothing where it is not here."""
        async with self._slots:
            yield await asyncio.to_thread(self._found, ask)

    def _found(self, ask: LendAsk) -> Iterator[bytes]:
        bucket = self._shelf.backed(ask.bucket)
        if bucket is None or bucket.origin is None or bucket.created_ms != ask.created_ms:
            return iter(())
        facts = self._shelf.held(bucket, ask.key)
        if facts is None or (facts.etag != ask.etag and (ask.etag or not bucket.origin.immutable)):
            return iter(())
        whole = facts.size <= CHUNK
        data = self._shelf.bytes_of(bucket, ask.key, facts, -1 if whole else ask.number)
        if data is None or (whole and ask.number):
            return iter(())
        return _pieces(facts, data)


def _pieces(facts: Facts, data: bytes) -> Iterator[bytes]:
    yield _encode(_Lent(len(data), facts))
    for start in range(0, len(data), _STEP):
        yield data[start : start + _STEP]


class Borrower:
    """What this node asks others for. One a process."""

    def __init__(self, mesh: Mesh, peers: Peers, shelf: Shelf) -> None:
        self._mesh, self._peers, self._shelf = mesh, peers, shelf
        self._resting: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Borrower {self._mesh.node_id}, {len(self._resting)} left alone>"

    async def borrowed(self, bucket: Bucket, key: str, number: int, etag: str) -> Reply | None:
        """A piece from another home of its bucket; None: the origin is to be asked. Its bytes may end with
        OriginDownError."""
        nodes = self._nodes(bucket, key)
        wanted = self._wanted(bucket, key, etag) if nodes else None
        if wanted is None:
            return None
        ask = LendAsk(bucket.name, bucket.created_ms, key, number, wanted)
        for node in nodes:
            found = await self._ask(node, ask)
            metrics.origin_lends.labels("none" if found is None else "given").inc()
            if found is not None:
                return found
        return None

    def _wanted(self, bucket: Bucket, key: str, etag: str) -> str | None:
        """The ETag to ask for; None: what is so now, only the origin can say."""
        held = self._shelf.held(bucket, key)
        if held is not None and etag and held.etag != etag:
            return None
        found = etag or (held.etag if held is not None else "")
        immutable = bucket.origin is not None and bucket.origin.immutable
        return found if found or immutable else None

    def _nodes(self, bucket: Bucket, key: str) -> list[Node]:
        """Some homes, the first one (which a job fills first) among them; and the owner by the map, who may
        have it of the time before there were homes."""
        homes = () if bucket.origin is None or self._mesh.alone else bucket.origin.homes
        if not homes:
            return []
        others = [node for node in self._mesh.route(bucket.name, key).readers if self._asks(node)]
        owners = self._mesh.routes(bucket.name).of(bucket.name, key).readers[:1]
        first = [node for node in others if node.node_id == homes[0]]
        chosen = [*others[:_ASKED], *first, *(node for node in owners if self._asks(node))]
        return list({node.node_id: node for node in chosen}.values())

    def _asks(self, node: Node) -> bool:
        until = self._resting.get(node.node_id, 0.0)
        return node.node_id != self._mesh.node_id and until <= asyncio.get_running_loop().time()

    async def _ask(self, node: Node, ask: LendAsk) -> Reply | None:
        pieces = self._given(node, ask)
        try:
            lent = _lent(await anext(pieces))
            _check(lent, ask)
        except StopAsyncIteration:
            return None
        except _BROKEN:
            self._resting[node.node_id] = asyncio.get_running_loop().time() + _REST
            await pieces.aclose()
            return None
        return Reply(lent.facts, ask.number * CHUNK, lent.length, self._bytes(node, pieces))

    async def _given(self, node: Node, ask: LendAsk) -> AsyncGenerator[bytes, None]:
        async with self._peers.call(node, "POST", LEND, body=_encode(ask), timeout=_PATIENCE) as answer:
            async for piece in answer.pieces():
                yield piece

    async def _bytes(self, node: Node, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    metrics.origin_lent_bytes.inc(len(piece))
                    yield piece
            except MeshdError as error:
                raise OriginDownError(f"{node.node_id} stopped giving what it has") from error
