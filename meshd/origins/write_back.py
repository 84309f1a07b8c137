"""Write-back: copies committed objects to their origin, and the barrier between old and new primaries.

A write stays in the durable store from its commit until the origin has it. A new primary touches an origin
only after every reachable node has its map and has finished with the name there; a node that is unsure about
its map checks that first. Two reachable nodes never write one name concurrently, so the last write arrives
last.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.read_barrier import ReadBarrier
from meshd.objects.copy_object import read_chunks
from meshd.origins.client.origin_api import ObjectFacts
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, BodyFramingError, PeerCall
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
    NotPrimaryError,
    NotReplicatedError,
)
from meshd.store.records import NULL
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.fetcher import Fetcher
    from meshd.origins.client.origin_pool import OriginPool
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import StoreWriter
    from meshd.store.records import Record, WriteContext
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


TURN: Final = 10.0  # seconds after which a node answers that it has not finished yet
_PATIENCE: Final = 15.0  # seconds for a node that neither answers nor leaves the map
_PAUSE: Final = 0.05
_YOUNG: Final = 600.0  # seconds after a new map during which others are asked: the longest request


class HandoverQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name of which the caller is the primary now."""

    bucket: str
    key: str


IS_FINISHED: Final = PeerCall(
    f"{PREFIX}origins/quiet", request=HandoverQuery, response=bool, max_bytes=16 << 10
)
"""Asks whether a node has finished with a name at its origin."""


class HandoverBarrier:
    """Waits for earlier primaries. One instance per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock
        self._read_barrier = ReadBarrier(mesh, clock)
        self._seen = (-1, 0.0)  # the newest map that a write has used, and when it was first used

    def __repr__(self) -> str:
        return f"<HandoverBarrier of {self._mesh.node_id}, map {self._seen[0]}>"

    async def wait_until_exclusive(self, bucket: str, key: str) -> None:
        """Return when this node is sure of its map, and no other node uses, or will use, the origin for the
        name under an older map. Raises NotReplicatedError."""
        why = "" if self._mesh.lease_valid else await self._read_barrier.wait_until_current(bucket, key)
        if why:
            raise NotReplicatedError(
                f"this node {why}, and does not change the origin until it knows that its cluster map "
                "is current"
            )
        while not self._mesh.single_node and self._is_young():
            cluster = self._mesh.current_map()
            others = [
                node
                for node in cluster.nodes
                if node.node_id != self._mesh.node_id
                and "store" in node.roles
                and node.state not in ("away", "down")
            ]
            ask = HandoverQuery(bucket, key)
            await asyncio.gather(*[self._wait_until_finished(node, cluster.version, ask) for node in others])
            if self._mesh.current_map().version == cluster.version:
                return

    def _is_young(self) -> bool:
        """Whether a write that began under an older map may still be running."""
        version, now = self._mesh.current_map().version, self._clock.monotonic()
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] < _YOUNG

    async def _wait_until_finished(self, node: Node, version: int, ask: HandoverQuery) -> None:
        """Return when a node has finished with a name, or there is a newer map. Raises NotReplicatedError."""
        deadline = self._clock.monotonic() + _PATIENCE
        while self._mesh.current_map().version == version:
            try:
                if await self._peers.call_typed(node, IS_FINISHED, ask):
                    return
                deadline = self._clock.monotonic() + _PATIENCE
            except PeerUnreachableError:
                await self._mesh.report_suspect(node.node_id, version)
                await self._late(node, version, deadline)
            except (StaleMapError, BodyFramingError, PeerRefusedError):
                await self._late(node, version, deadline)

    async def _late(self, node: Node, version: int, deadline: float) -> None:
        """Pause before the next attempt. Raises NotReplicatedError after the deadline."""
        if self._clock.monotonic() > deadline:
            raise NotReplicatedError(
                f"node {node.node_id} does not report whether it still writes this name to its origin; "
                "try again"
            )
        await self._mesh.wait_for_newer_map(version, _PAUSE)


class OriginWriter:
    """Writes the keys of this process to origins. One instance per worker. `store` is this node's store;
    `shared` also reaches the other owners."""

    def __init__(
        self,
        origins: OriginPool,
        store: Store,
        shared: StoreWriter,
        mesh: ClusterView,
        fetcher: Fetcher,
        succession: HandoverBarrier,
    ) -> None:
        self._origins, self._store, self._fetcher = origins, store, fetcher
        self._shared, self._mesh = shared, mesh
        self._barrier = succession
        self._touched: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    def __repr__(self) -> str:
        return f"<OriginWriter {len(self._locks)} keys under way>"

    async def write_back(self, bucket: Bucket, key: str) -> str:
        """Write the dirty object of a key to the origin; return its ETag there, or "" if nothing was dirty.
        Raises OriginError, StoreError."""
        async with self._exclusive(bucket.name, key):
            etag = ""
            while self._store.get_stored(bucket.name, key) is not None:
                await self._fetcher.forget_object(bucket, key)
                await self._barrier.wait_until_exclusive(bucket.name, key)
                # Another node may have written it back meanwhile.
                record = self._store.get_stored(bucket.name, key)
                if record is not None:
                    with suppress(ExtentGoneError), self._at_origin(bucket, key):  # compaction moved it
                        etag = await self._push(bucket, key, record)
            return etag

    async def _push(self, bucket: Bucket, key: str, record: Record) -> str:
        """Write an object to the origin and remove it from the store, unless it was replaced meanwhile."""
        facts = ObjectFacts(record.size, record.etag, record.modified, record.headers, record.metadata)
        etag = await self._origins.origin_for(bucket).put(key, self._bytes(record), facts)
        await self._fetcher.forget_object(bucket, key)
        same = self._store.get_stored(bucket.name, key)
        if same is not None and same.stamp == record.stamp:
            with suppress(ConditionFailedError, ConditionMissingError):  # replaced or removed meanwhile
                # The ETag is for primaries of an earlier release, which ignore the stamp.
                unchanged = Conditions(if_match=(record.etag,))
                await self._shared.delete_version(
                    bucket.name, key, NULL, conditions=unchanged, stamp=record.stamp
                )
        return etag

    @contextmanager
    def _at_origin(self, bucket: Bucket, key: str) -> Iterator[None]:
        """Mark a name as being changed at its origin. Raises NotPrimaryError: another node may be the primary
        now, and write newer data there."""
        if not self._mesh.is_primary(bucket.name, key):
            raise NotPrimaryError("another node is the primary of this name now, and writes it to its origin")
        name = (bucket.name, key)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._touched[name] = ended
        try:
            yield
        finally:
            del self._touched[name]
            ended.set_result(None)

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        """Whether this process has map `version` or a newer one, and has finished with a name at its origin;
        waits up to `TURN` seconds for each."""
        if not await self._mesh.wait_for_newer_map(version - 1, TURN):
            return False
        ended = self._touched.get((bucket.name, key))
        if ended is not None:
            await asyncio.wait((ended,), timeout=TURN)
        return ended is None or ended.done()

    async def _bytes(self, record: Record) -> AsyncIterator[bytes]:
        async for piece in read_chunks(self._store, record, 0, record.size):
            yield bytes(piece)

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None:
        """Delete an object at its origin, and its dirty copy. Raises OriginError, StoreError."""
        async with self._exclusive(bucket.name, key):
            await self._fetcher.forget_object(bucket, key)
            await self._barrier.wait_until_exclusive(bucket.name, key)
            with self._at_origin(bucket, key):
                await self._origins.origin_for(bucket).delete([key])
                await self._shared.delete(bucket.name, key, context=context)
            await self._fetcher.forget_object(bucket, key)

    @asynccontextmanager
    async def _exclusive(self, bucket: str, key: str) -> AsyncIterator[None]:
        name = (bucket, key)
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)
