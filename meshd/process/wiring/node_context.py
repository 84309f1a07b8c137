"""What every process of a node has open: store, control state, tables, the view of the cluster, other nodes.

It is opened once, after fork, and everything else is constructed from it: first the services
(`data_services`, `cluster`, `services`), then the routes (`routes`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from meshd.auth.authorizer import Authorizer
from meshd.auth.request_facts import record_finder
from meshd.batches.assets import load_asset
from meshd.cluster.cluster_view import ClusterView, RetryAfter, single_node_map
from meshd.cluster.failure_detector import NodeStateWriter, SuspectProbe
from meshd.cluster.replication.replicated_store import replicated_store
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.control.factory import open_control
from meshd.control.identities import IdentityTable, KeyLastUsed
from meshd.core.document_store import DocumentStore
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.documents.inventory import UsageFile
from meshd.origins.cache.cache_store import CacheStore, FreshnessTable
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.process.wiring.origin_services import OriginServices
from meshd.rpc.peer_client import PeerClient
from meshd.store.store import Store
from meshd.transform.sandbox.user_op_definitions import MODULES
from meshd.util import shared_counters
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.cluster.rebalance.worker import WorkerSocket
    from meshd.config import NodeSettings
    from meshd.control.control_api import ControlStore
    from meshd.store.api import StoreWriter
    from meshd.util.clock import Clock


REBALANCE_WRITER = "m"
"""The store writer of the rebalance process, which serves no requests by a map."""


class NodeContext(msgspec.Struct, frozen=True):
    """What every process of a node has open."""

    settings: NodeSettings
    clock: Clock
    store: Store
    control: ControlStore
    buckets: BucketTable
    identities: IdentityTable
    key_usage: KeyLastUsed
    last_used: UsageFile
    """When results of views, and documents, were last used."""
    removals: DeletedDocumentTable
    archives: ArchiveService
    mesh: ClusterView
    peers: PeerClient
    objects: RemoteObjects
    replicated_store: StoreWriter
    """What services write to: `store`, and in a cluster every other node that must store the write."""
    cache_store: CacheStore | None = None
    """The cache of buckets with origins."""
    origins: OriginServices | None = None
    """What this process reads and writes these buckets through; None in the rebalance process."""
    rebalance_socket: WorkerSocket | None = None
    """The socket of the rebalance process; None where there is none, or in that process itself."""


def _open_cache(
    settings: NodeSettings,
    writer: str,
    buckets: BucketTable,
    store: Store,
    mesh: ClusterView,
    stack: ExitStack,
) -> CacheStore:
    """Open the cache that belongs to the store."""
    clock = SystemClock()
    cache = Store.open(settings.cache_store, writer=writer, clock=clock)
    stack.callback(cache.close)
    fresh = FreshnessTable(settings.freshness_path, clock)
    stack.callback(fresh.close)
    cache_store = CacheStore(cache, buckets, fresh, mesh)
    store.attach_cache(cache, cache_store)
    return cache_store


@contextmanager
def open_node(
    settings: NodeSettings, writer: str, rebalance_socket: WorkerSocket | None = None
) -> Iterator[NodeContext]:
    """Open the store as `writer`, and the control state; close both at the end. `rebalance_socket` leads to
    the rebalance process. Raises MeshdError."""
    clock = SystemClock()
    with ExitStack() as stack:
        control = open_control(settings, clock)
        stack.callback(control.close)
        store = Store.open(settings.store, writer=writer, clock=clock)
        stack.callback(store.close)
        uses = UsageFile(settings.last_used_path, clock)
        stack.callback(uses.close)
        MODULES.set_loader(partial(load_asset, DocumentStore(store)))
        buckets, identities = BucketTable(control), IdentityTable(control)
        process = int(writer[1:]) + 1 if writer.startswith("w") else None if writer == REBALANCE_WRITER else 0
        mesh = open_cluster_view(settings, control, buckets, clock, process)
        cache_store = _open_cache(settings, writer, buckets, store, mesh, stack)
        use = KeyLastUsed(control)
        peers = PeerClient(
            settings.node_id,
            ClusterSecret(control).derive_key,
            clock,
            lambda: mesh.current_map().version,
            ca=settings.cluster.peer_ca,
        )
        replicated = replicated_store(store, mesh, peers, clock)
        archives = LocalArchives(store, uses.note, settings.view_cache_bytes, settings.archive_ratio)
        origins = None
        if writer != REBALANCE_WRITER:
            index = int(writer[1:]) if writer.startswith("w") else None
            origins = OriginServices(
                settings, clock, store, replicated, cache_store, archives, mesh, peers, index
            )
        objects = RemoteObjects(
            store,
            mesh,
            peers,
            buckets,
            None if origins is None else origins.samples,
            None if origins is None else origins.near_cache,
        )
        yield NodeContext(
            settings,
            clock,
            store,
            control,
            buckets,
            identities,
            use,
            uses,
            DeletedDocumentTable(control),
            ArchiveService(archives, objects),
            mesh,
            peers,
            objects,
            replicated,
            cache_store,
            origins,
            rebalance_socket,
        )


def open_cluster_view(
    settings: NodeSettings, control: ControlStore, buckets: BucketTable, clock: Clock, process: int | None
) -> ClusterView:
    """Return the view of one process; `process` is its number among those that serve requests by a map."""
    if settings.cluster.control is None:
        single_node = single_node_map(settings.node_id, settings.endpoint)
        return ClusterView(
            settings.node_id,
            control,
            buckets.replica_count,
            standalone_map=single_node,
            writes_of=buckets.origin_write_mode,
        )
    marking = NodeStateWriter(control, ClusterMapStore(control))
    look = SuspectProbe(marking, clock, settings.cluster.lease)

    def goes_by(version: int) -> None:
        if process is not None:
            shared_counters.set_map_version(process, version, clock.monotonic())

    def held() -> tuple[int, float]:
        version, until = shared_counters.get_lease()
        return version, until - clock.monotonic()

    return ClusterView(
        settings.node_id,
        control,
        buckets.replica_count,
        probe_suspect=look,
        writes_of=buckets.origin_write_mode,
        homes_of=buckets.origin_home_nodes,
        born_of=buckets.created_at_ms,
        on_map_adopted=goes_by,
        lease_state=held,
        newest=shared_counters.newest_map_version,
        retry_after=RetryAfter(settings.cluster.lease, clock),
    )


def node_cache_store(node: NodeContext) -> CacheStore:
    """Return the node's cache. Raises ValueError if the node was opened without one."""
    if node.cache_store is None:
        raise ValueError("this node was opened without a cache")
    return node.cache_store


def node_origins(node: NodeContext) -> OriginServices:
    """Return the services of buckets with origins. Raises ValueError in the rebalance process."""
    if node.origins is None:
        raise ValueError("this process does not read buckets with origins")
    return node.origins


def node_access(node: NodeContext) -> Authorizer:
    """Return the authorizer."""
    return Authorizer(node.buckets, node.clock, record_finder(node.store))
