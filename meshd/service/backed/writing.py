"""What is written to a backed bucket, brought to its origin.

Law: a write lies in the durable store (in a mesh: of every owner) from its commit until the origin has it, so
a crash loses nothing; one worker of the node that decides brings a key's writes there, one after the other.
Invariant: the last write of a key is the last to arrive, whoever decides about it meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from meshd.origin.interface import Facts
from meshd.service.backed.succeeding import TURN
from meshd.service.semantics.copying import read_pieces
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
    NotDeciderError,
)
from meshd.store.records import NULL
from meshwire.conditions import Conditions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.service.backed.succeeding import Succession
    from meshd.service.caching.fetching import Fetcher
    from meshd.service.caching.origins import Origins
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshd.store.store import Store


class OriginWriter:
    """Writes what belongs to this process. One a worker. `shared`: where all owners have it, `store` where
    this node has."""

    def __init__(
        self,
        origins: Origins,
        store: Store,
        shared: ObjectStore,
        mesh: Mesh,
        fetcher: Fetcher,
        succession: Succession,
    ) -> None:
        self._origins, self._store, self._fetcher = origins, store, fetcher
        self._shared, self._mesh = shared, mesh
        self._succession = succession
        self._touched: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    def __repr__(self) -> str:
        return f"<OriginWriter {len(self._locks)} keys under way>"

    async def push(self, bucket: Bucket, key: str) -> str:
        """Bring what is dirty under a key to the origin; its ETag there, "" when nothing was. Raises
        OriginError, StoreError."""
        async with self._alone(bucket.name, key):
            etag = ""
            while self._store.own(bucket.name, key) is not None:
                await self._fetcher.forget(bucket, key)
                await self._succession.settled(bucket.name, key)
                record = self._store.own(bucket.name, key)  # another node may have brought it there meanwhile
                if record is not None:
                    with suppress(ExtentGoneError), self._at_origin(bucket, key):  # compaction moved it
                        etag = await self._push(bucket, key, record)
            return etag

    async def _push(self, bucket: Bucket, key: str, record: Record) -> str:
        """The origin has it, and it goes from the store; but not what is newer."""
        facts = Facts(record.size, record.etag, record.modified, record.headers, record.metadata)
        etag = await self._origins.of(bucket).put(key, self._bytes(record), facts)
        await self._fetcher.forget(bucket, key)
        same = self._store.own(bucket.name, key)
        if same is not None and same.stamp == record.stamp:
            with suppress(ConditionFailedError, ConditionMissingError):  # replaced or removed meanwhile
                await self._shared.delete_version(
                    bucket.name, key, NULL, conditions=Conditions(if_match=(record.etag,))
                )
        return etag

    @contextmanager
    def _at_origin(self, bucket: Bucket, key: str) -> Iterator[None]:
        """Within it an origin is changed, by the node that decides. Raises NotDeciderError: another one may
        have taken over, and bring newer writes there."""
        if not self._mesh.is_decider(bucket.name, key):
            raise NotDeciderError("another node decides about this name now; it brings it to its origin")
        name = (bucket.name, key)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._touched[name] = ended
        try:
            yield
        finally:
            del self._touched[name]
            ended.set_result(None)

    async def quiet(self, bucket: Bucket, key: str, version: int) -> bool:
        """Whether this process goes by map `version` or a newer one, and is done with a name at its origin;
        waits a moment for both."""
        if not await self._mesh.newer_than(version - 1, TURN):
            return False
        ended = self._touched.get((bucket.name, key))
        if ended is not None:
            await asyncio.wait((ended,), timeout=TURN)
        return ended is None or ended.done()

    async def _bytes(self, record: Record) -> AsyncIterator[bytes]:
        async for piece in read_pieces(self._store, record, 0, record.size):
            yield bytes(piece)

    async def remove(self, bucket: Bucket, key: str) -> None:
        """Delete an object at its origin, and what is dirty of it. Raises OriginError, StoreError."""
        async with self._alone(bucket.name, key):
            await self._fetcher.forget(bucket, key)
            await self._succession.settled(bucket.name, key)
            with self._at_origin(bucket, key):
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
