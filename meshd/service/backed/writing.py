"""What is written to a backed bucket, brought to its origin.

Law: a write lies in the durable store (in a mesh: of every owner) from its commit until the origin has it, so
a crash loses nothing; one worker of the node that decides brings a key's writes there, one after the other.
Invariant: the last write of a key is the last to arrive, as long as one node decides about it.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from meshd.origin.interface import Facts
from meshd.service.semantics.copying import read_pieces
from meshd.store.errors import ExtentGoneError, NotReplicatedError
from meshd.store.records import NULL
from meshwire.conditions import Conditions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.service.caching.fetching import Fetcher
    from meshd.service.caching.origins import Origins
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshd.store.store import Store


class OriginWriter:
    """Writes what belongs to this process. One a worker. `shared`: where all owners have it, `store` where
    this node has."""

    def __init__(
        self, origins: Origins, store: Store, shared: ObjectStore, mesh: Mesh, fetcher: Fetcher
    ) -> None:
        self._origins, self._store, self._fetcher = origins, store, fetcher
        self._shared, self._mesh = shared, mesh
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    def __repr__(self) -> str:
        return f"<OriginWriter {len(self._locks)} keys under way>"

    async def push(self, bucket: Bucket, key: str) -> str:
        """Bring what is dirty under a key to the origin; its ETag there, "" when nothing was. Raises
        OriginError, StoreError."""
        async with self._alone(bucket.name, key):
            record = self._store.own(bucket.name, key)
            return "" if record is None else await self._push(bucket, key, record)

    async def _push(self, bucket: Bucket, key: str, record: Record) -> str:
        while True:
            self._require_decider(bucket, key)
            await self._fetcher.forget(bucket, key)
            facts = Facts(record.size, record.etag, record.modified, record.headers, record.metadata)
            try:
                etag = await self._origins.of(bucket).put(key, self._bytes(record), facts)
            except ExtentGoneError:  # compaction moved it
                record = self._store.own(bucket.name, key) or record
                continue
            await self._fetcher.forget(bucket, key)
            same = self._store.own(bucket.name, key)
            if same is None:
                return etag
            if same.stamp != record.stamp:
                record = same
                continue
            await self._shared.delete_version(
                bucket.name, key, NULL, conditions=Conditions(if_match=(record.etag,))
            )
            return etag

    def _require_decider(self, bucket: Bucket, key: str) -> None:
        """Another node may have taken over, and bring newer writes there."""
        if not self._mesh.is_decider(bucket.name, key):
            raise NotReplicatedError("another node decides about this name now; it brings it to its origin")

    async def _bytes(self, record: Record) -> AsyncIterator[bytes]:
        async for piece in read_pieces(self._store, record, 0, record.size):
            yield bytes(piece)

    async def remove(self, bucket: Bucket, key: str) -> None:
        """Delete an object at its origin, and what is dirty of it. Raises OriginError, StoreError."""
        async with self._alone(bucket.name, key):
            self._require_decider(bucket, key)
            await self._fetcher.forget(bucket, key)
            await self._origins.of(bucket).delete([key])
            await self._shared.delete(bucket.name, key)
            await self._fetcher.forget(bucket, key)

    @asynccontextmanager
    async def _alone(self, bucket: str, key: str) -> AsyncIterator[None]:
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
