"""Wiring of buckets with origins in one process: the service, the reader of samples, and the near cache.

They are constructed before the process has an event loop, because the objects of the mesh are read through
them; `OriginServices.run` starts and ends their background work. A worker also fetches for the other
processes of its node.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from meshd.origins.backed_bucket_service import BackedBucketService
from meshd.origins.cache.cache_manager import CacheManagerClient
from meshd.origins.cache.fetcher import Fetcher
from meshd.origins.cache.near_cache import NearCacheStore
from meshd.origins.cache.peer_cache import PeerCacheClient
from meshd.origins.client.origin_pool import OriginPool
from meshd.origins.listing import BackedListings, WriteMarks
from meshd.origins.read_through import BackedReader, Revalidator
from meshd.origins.sample_source import OriginSampleSource
from meshd.origins.worker_shards import LocalFetchWorker, WorkerShards, serve_fetches
from meshd.origins.write_back import HandoverBarrier, OriginWriter
from meshd.origins.write_back_routing import WriteBackRouter
from meshd.peer_reads.listing import LocalListings, MergedListings
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.config import NodeSettings
    from meshd.datasets.archives.archive_service import LocalArchives
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import StoreWriter
    from meshd.store.store import Store
    from meshd.util.clock import Clock


class OriginServices:
    """What one process reads and writes buckets with origins through. `index` is the number of a worker, None
    in the coordinator; `backed` carries out requests, `samples` reads for datasets and batches; `near_cache`
    exists on a node that caches and stores nothing."""

    def __init__(
        self,
        settings: NodeSettings,
        clock: Clock,
        store: Store,
        replicated: StoreWriter,
        cache_store: CacheStore,
        archives: LocalArchives,
        mesh: ClusterView,
        peers: PeerClient,
        index: int | None,
    ) -> None:
        self._cache_store = cache_store
        self._own_socket = None if index is None else settings.fetch_socket(index)
        self._manager = CacheManagerClient(settings.cache_manager_socket)
        origins = OriginPool(settings.origin_credentials, clock)
        cache_client = PeerCacheClient(mesh, peers, cache_store)
        self._fetcher = Fetcher(origins, cache_store, self._manager, cache_client)
        barrier = HandoverBarrier(mesh, peers, clock)
        writer = OriginWriter(origins, store, replicated, mesh, self._fetcher, barrier)
        self._worker = LocalFetchWorker(self._fetcher, writer)
        sockets = [settings.fetch_socket(each) for each in range(settings.workers)]
        self._shards = WorkerShards(sockets, index, self._worker)
        self._revalidator = Revalidator(self._shards, settings.origin_patience)
        lister = LocalListings(store, mesh, store.list_stored_entries)
        merged = MergedListings(lister, mesh, peers, clock)
        marks = WriteMarks(cache_store, mesh, peers)
        self.backed = BackedBucketService(
            store,
            replicated,
            cache_store,
            self._shards,
            WriteBackRouter(self._shards, cache_store, mesh, peers, clock),
            BackedReader(store, cache_store, self._shards, self._manager, self._revalidator),
            BackedListings(origins, store, cache_store, clock, mesh, merged, marks),
            mesh,
        )
        self.samples = OriginSampleSource(store, self.backed, archives)
        roles = settings.cluster.roles
        is_near_cache = not mesh.standalone and "cache" in roles and "store" not in roles
        self.near_cache = NearCacheStore(cache_store.cache, self._manager) if is_near_cache else None

    def __repr__(self) -> str:
        return f"<OriginServices of {self.backed!r}>"

    @asynccontextmanager
    async def run(self) -> AsyncIterator[BackedBucketService]:
        """Run the background work for the length of the block; yields `backed`."""
        tasks = BackgroundTasks("origins")
        if self._own_socket is not None:
            tasks.spawn(serve_fetches(self._own_socket, self._worker, self._cache_store), "fetches")
        tasks.spawn(self._manager.run(), "notes")
        try:
            yield self.backed
        finally:
            if self.near_cache is not None:
                await self.near_cache.aclose()
            await tasks.aclose()
            await self.backed.aclose()
            await self._revalidator.aclose()
            await self._shards.aclose()
            await self._fetcher.aclose()
