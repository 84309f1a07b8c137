"""Peer cache fetch: reads pieces of origin objects from the caches of other nodes before asking the origin.

A node returns only what it has cached, with exactly the requested ETag, and fetches nothing on behalf of
another. If no node has the piece, or none answers at once, the origin is read.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from meshd.errors import MeshdError
from meshd.origins.cache.cache_store import CHUNK_BYTES
from meshd.origins.client.origin_api import ObjectFacts, OriginDownError, OriginResponse  # noqa: TC001  msgspec reads the annotations
from meshd.rpc.peer_rpc import PREFIX, PeerCall, ResponseStream, stream_handler
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshwire.cluster import Node

_ASKED: Final = 3  # other homes that are asked for a piece
_GIVEN: Final = 8  # pieces that a process serves concurrently, each in memory
_STEP: Final = 1 << 20
_REST: Final = 5.0  # seconds during which a node that failed is not asked
_BROKEN: Final = (MeshdError, msgspec.MsgspecError)


class PeerCacheRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for chunk `number` of an object, or all of a small one. `etag` is empty if all versions are
    equal."""

    bucket: Annotated[str, Meta(max_length=63)]
    created_ms: int
    key: Annotated[str, Meta(max_length=4096)]
    number: Annotated[int, Meta(ge=0)]
    etag: Annotated[str, Meta(max_length=4096)] = ""


class _PeerCacheHeader(Struct, frozen=True, array_like=True):
    """Precedes the bytes of a response."""

    length: int
    facts: ObjectFacts


FETCH_PIECE: Final = PeerCall(
    f"{PREFIX}origins/lend", request=PeerCacheRequest, response=ResponseStream, timeout=5.0
)
"""Returns the piece's header (`_PeerCacheHeader`), then its bytes; nothing if it is not cached."""
_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_PeerCacheHeader).decode


def _check(lent: _PeerCacheHeader, ask: PeerCacheRequest) -> None:
    """Raise msgspec.ValidationError unless the header belongs to the requested piece."""
    facts, start = lent.facts, ask.number * CHUNK_BYTES
    if (ask.etag and facts.etag != ask.etag) or lent.length != min(CHUNK_BYTES, facts.size - start):
        raise msgspec.ValidationError("the response is for another piece than the requested one")


class PeerCacheServer:
    """Serves cached pieces to other nodes. One instance per process."""

    def __init__(self, cache_store: CacheStore) -> None:
        self._cache_store, self._slots = cache_store, asyncio.Semaphore(_GIVEN)

    def __repr__(self) -> str:
        return f"<PeerCacheServer of {self._cache_store!r}>"

    @stream_handler(FETCH_PIECE)
    async def fetch_piece(self, ask: PeerCacheRequest, context: CallContext) -> AsyncGenerator[bytes, None]:
        async with self._slots:
            for piece in await asyncio.to_thread(self._read_own_piece, ask):
                yield piece

    def _read_own_piece(self, ask: PeerCacheRequest) -> Iterator[bytes]:
        bucket = self._cache_store.backed_bucket(ask.bucket)
        if bucket is None or bucket.origin is None or bucket.created_ms != ask.created_ms:
            return iter(())
        facts = self._cache_store.cached_facts(bucket, ask.key)
        if facts is None or (facts.etag != ask.etag and (ask.etag or not bucket.origin.immutable)):
            return iter(())
        whole = facts.size <= CHUNK_BYTES
        data = self._cache_store.bytes_of(bucket, ask.key, facts, -1 if whole else ask.number)
        if data is None or (whole and ask.number):
            return iter(())
        return _pieces(facts, data)


def _pieces(facts: ObjectFacts, data: bytes) -> Iterator[bytes]:
    yield _encode(_PeerCacheHeader(len(data), facts))
    for start in range(0, len(data), _STEP):
        yield data[start : start + _STEP]


class PeerCacheClient:
    """Fetches pieces from the caches of other nodes. One instance per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, cache_store: CacheStore) -> None:
        self._mesh, self._peers, self._cache_store = mesh, peers, cache_store
        self._resting: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<PeerCacheClient {self._mesh.node_id}, {len(self._resting)} nodes paused>"

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> OriginResponse | None:
        """Fetch a piece from another home of its bucket; None: ask the origin. The bytes may end with
        OriginDownError."""
        nodes = self._nodes(bucket, key)
        wanted = self._etag_to_ask(bucket, key, etag) if nodes else None
        if wanted is None:
            return None
        ask = PeerCacheRequest(bucket.name, bucket.created_ms, key, number, wanted)
        for node in nodes:
            found = await self._ask(node, ask)
            metrics.peer_cache_fetches.labels("miss" if found is None else "hit").inc()
            if found is not None:
                return found
        return None

    def _etag_to_ask(self, bucket: Bucket, key: str, etag: str) -> str | None:
        """Return the ETag to ask for; None if only the origin knows what is current."""
        held = self._cache_store.cached_facts(bucket, key)
        if held is not None and etag and held.etag != etag:
            return None
        found = etag or (held.etag if held is not None else "")
        immutable = bucket.origin is not None and bucket.origin.immutable
        return found if found or immutable else None

    def _nodes(self, bucket: Bucket, key: str) -> list[Node]:
        """Return some homes, including the first one, which a prefetch fills first; and the owner by the map,
        which may have cached the piece before the bucket had homes."""
        homes = () if bucket.origin is None or self._mesh.single_node else bucket.origin.homes
        if not homes:
            return []
        others = [node for node in self._mesh.route_for(bucket.name, key).read_set if self._asks(node)]
        owners = self._mesh.bucket_routes(bucket.name).route_of_key(bucket.name, key).read_set[:1]
        first = [node for node in others if node.node_id == homes[0]]
        chosen = [*others[:_ASKED], *first, *(node for node in owners if self._asks(node))]
        return list({node.node_id: node for node in chosen}.values())

    def _asks(self, node: Node) -> bool:
        until = self._resting.get(node.node_id, 0.0)
        return node.node_id != self._mesh.node_id and until <= asyncio.get_running_loop().time()

    async def _ask(self, node: Node, ask: PeerCacheRequest) -> OriginResponse | None:
        pieces = self._fetch_from(node, ask)
        try:
            lent = _decode_header(await anext(pieces))
            _check(lent, ask)
        except StopAsyncIteration:
            return None
        except _BROKEN:
            self._resting[node.node_id] = asyncio.get_running_loop().time() + _REST
            await pieces.aclose()
            return None
        return OriginResponse(lent.facts, ask.number * CHUNK_BYTES, lent.length, self._bytes(node, pieces))

    async def _fetch_from(self, node: Node, ask: PeerCacheRequest) -> AsyncGenerator[bytes, None]:
        async with self._peers.open_typed(node, FETCH_PIECE, ask) as answer:
            async for piece in answer.iter_body():
                yield piece

    async def _bytes(self, node: Node, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    metrics.peer_cache_bytes.inc(len(piece))
                    yield piece
            except MeshdError as error:
                raise OriginDownError(f"{node.node_id} stopped sending a cached piece") from error
