"""Cache residency: which data of a bucket this node has, and eviction of its cached copies.

Only root may use it. It covers this node and asks no other. Durable data is counted, never removed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from meshd.core.api_errors import BatchError
from meshd.origins.cache.cache_store import CHUNK_BYTES, cache_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.store.store import Store

_PAGE: Final = 1000
_MOST: Final = 2_000_000
"""Maximum objects that are counted; the result for more is `partial`, so that a count ends."""


class CacheResidency:
    """Counts and evicts the data of this node. One instance per worker."""

    def __init__(
        self,
        store: Store,
        cache_store: CacheStore,
        buckets: BucketTable,
        mesh: ClusterView,
        manager: CacheManagerClient,
        cache_bytes: int = 0,
    ) -> None:
        self._store, self._cache_store, self._buckets, self._mesh = store, cache_store, buckets, mesh
        self._manager = manager
        self._cache_bytes = cache_bytes  # 0: half of the free space

    async def node_usage(self, identity: Identity) -> dict[str, Any]:
        """Return what the node stores, and its disks in the configured order. Raises BatchError."""
        _require_root(identity)
        own, cached = self._store.stats(), self._cache_store.cache.stats()
        return {
            "node": self._mesh.node_id,
            "objects": own.objects,
            "bytes": own.live_bytes,
            "cached_bytes": cached.live_bytes,
            "disks": [{"path": disk.path, "free": disk.free, "total": disk.total} for disk in own.disks],
        }

    async def count_bucket(self, identity: Identity, name: str, prefix: str) -> dict[str, Any]:
        """Count objects and bytes on this node; with an origin, also recent reads. Raises BatchError."""
        bucket = self._bucket(identity, name)
        objects = size = 0
        async for key, record in self._records(bucket, prefix):
            objects += 1
            size += self._size(bucket, key, record)
        stats = self._cache_store.cache.stats() if bucket.origin is not None else self._store.stats()
        used = stats.live_bytes + stats.dead_bytes
        room = used + sum(disk.free for disk in stats.disks)
        if bucket.origin is not None:
            room = min(room, self._cache_bytes or room // 2)
        return {
            "node": self._mesh.node_id,
            "bucket": name,
            "cached": bucket.origin is not None,
            "objects": objects,
            "bytes": size,
            "partial": objects >= _MOST,
            "used": used,
            "capacity": room,
        } | await self._usage(bucket)

    async def _usage(self, bucket: Bucket) -> dict[str, Any]:
        usage = None if bucket.origin is None else await self._manager.bucket_usage(cache_name(bucket))
        if usage is None:
            return {}
        return {"hits": usage.hits, "misses": usage.misses, "idle_s": round(usage.idle)}

    async def evict_cached(self, identity: Identity, name: str, prefix: str) -> dict[str, Any]:
        """Evict the cached objects of a bucket with an origin. Raises BatchError."""
        bucket = self._bucket(identity, name)
        if bucket.origin is None:
            raise BatchError(
                "BadRequest",
                f"{name} has no origin: its objects are stored in the mesh and cannot be evicted",
            )
        objects = size = 0
        found = [
            (key, self._size(bucket, key, record)) async for key, record in self._records(bucket, prefix)
        ]
        for key, bytes_ in found:
            await self._cache_store.drop_object(bucket, key)
            objects, size = objects + 1, size + bytes_
        return {"node": self._mesh.node_id, "bucket": name, "objects": objects, "bytes": size}

    def _bucket(self, identity: Identity, name: str) -> Bucket:
        _require_root(identity)
        bucket = self._buckets.get(name)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r}")
        return bucket

    async def _records(self, bucket: Bucket, prefix: str) -> AsyncIterator[tuple[str, Record]]:
        store: ObjectStore = self._store
        name = bucket.name
        if bucket.origin is not None:
            store, name = self._cache_store.cache, cache_name(bucket)
        after, seen = "", 0
        while seen < _MOST:
            page = await asyncio.to_thread(store.list, name, prefix=prefix, after=after, limit=_PAGE)
            for key, record in page.entries:
                seen += 1
                yield key, record
            if not page.truncated:
                return
            after = page.next_after

    def _size(self, bucket: Bucket, key: str, record: Record) -> int:
        """Return the bytes of an object on this node; of a large cached object, those of its cached
        chunks."""
        if bucket.origin is None or "size" not in record.tags:
            return record.size
        chunks = range(-(-int(record.tags["size"]) // CHUNK_BYTES))
        there = (
            self._cache_store.cached_chunk(cache_name(bucket), key, record.etag, number) for number in chunks
        )
        return sum(chunk.size for chunk in there if chunk is not None)


def _require_root(identity: Identity) -> None:
    if not identity.root:
        raise BatchError(
            "AccessDenied", "only root may see where data is stored: ask an administrator of the mesh"
        )
