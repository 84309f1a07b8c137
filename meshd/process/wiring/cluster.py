"""Wiring of the cluster: membership, peer endpoints, the rebalancer, scrubbing and disk checks.

It is constructed from a `NodeContext` like everything else. Endpoints exist in every process; the coordinator
alone runs membership, the failure detector, the rebalancer and the scrub scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from meshd.cluster.data_dir_identity import maintain_generation, read_identity
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.cluster.membership import Membership
from meshd.cluster.peer_checks import domain_mismatches, publish_domains
from meshd.cluster.rebalance.progress import publish_interval
from meshd.cluster.rebalance.rebalancer import Rebalancer, RebalancerDeps
from meshd.cluster.rebalance.sync_source import RebalanceHandlers, RemoteSyncPeer, SyncSource
from meshd.cluster.repair.repairer import Repairer, UnderReplication
from meshd.cluster.repair.scrub_scheduler import RateLimiter, ScrubScheduler, publish_disks
from meshd.cluster.replication.batched_puts import ForwardedPutHandler
from meshd.cluster.replication.forwarded_writes import ForwardedWriteHandlers
from meshd.cluster.replication.primary_handover import HandoverHandler
from meshd.cluster.replication.replica_handlers import ReplicaHandlers
from meshd.cluster.replication.replicated_store import ReplicatedStore
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.control_api import ControlError
from meshd.core.document_store import SHARED_PREFIXES, DocumentStore
from meshd.documents.document_repairer import DocumentRepairer
from meshd.errors import StartupError
from meshd.objects.buckets.service import BucketHandlers, BucketService, ChangeBroadcast, PeerBuckets
from meshd.origins.cache.peer_cache import PeerCacheServer
from meshd.origins.prefetch_worker import PrefetchWorker
from meshd.origins.write_back_routing import WriteBackHandlers
from meshd.peer_reads.listing import LocalListings, MergedListings
from meshd.peer_reads.resume_read import ResumeSource
from meshd.process.wiring.data_services import node_catalog
from meshd.reads.copy_source import CopySourceHandlers, LocalCopySources, RemoteCopySources
from meshd.server.connection_handoff import handoff_routes
from meshd.server.peer_endpoint import peer_routes
from meshd.server.proxy.fan_out import FanOut
from meshd.server.proxy.forwarder import Forwarder
from meshd.server.proxy.hops import BucketRevisions, HopSigner
from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.disks.health_monitor import DiskState
from meshd.store.disks.page_loader import PageLoader
from meshd.store.replica.inventory import HeldName, HeldVersion
from meshd.telemetry import metrics
from meshd.util import shared_counters
from meshd.util.async_tasks import poll_in_thread
from meshd.util.disk_space import measure_disk_space
from meshd.util.shared_counters import InLoopThrottle
from meshwire.cluster import Node as Member
from meshwire.cluster.cluster_map import MAX_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.config import NodeSettings
    from meshd.objects.object_reader import VersionLookup
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.wiring.node_context import NodeContext
    from meshd.reads.archive_members import MemberService
    from meshd.server.http_route import HttpRoute
    from meshd.store.disks.health_monitor import DiskHealthMonitor
    from meshd.store.store import Store
    from meshd.util.async_tasks import BackgroundTasks
    from meshwire.cluster.cluster_map import Role


_MAP_GRACE: Final = 2.0  # seconds for requests that a process began with an earlier map


def sync_source(node: NodeContext, rest: Callable[[int], Awaitable[None]] | None = None) -> SyncSource:
    """Return the data of this node that others compare with; `rest` is awaited between two pieces of work."""
    return SyncSource(
        node.store,
        node.mesh.replica_count,
        rest=rest or InLoopThrottle(node.clock).yield_to_clients,
        loader=page_loader(node),
    )


def page_loader(node: NodeContext) -> PageLoader:
    """Return what reads chunks of this node's rotational disks for background work."""
    return PageLoader(RotationalDisks(node.settings.store.disk_type).includes)


def replica_counts_in_use(node: NodeContext) -> set[int]:
    """Return the replica counts of all buckets, for `routes`."""
    return {node.mesh.replica_count(bucket.name) for bucket in node.buckets.list_all()}


def rebalance_routes(node: NodeContext) -> list[HttpRoute]:
    """Return the endpoints for nodes that compare themselves with this one."""
    sockets = local_rebalance_routes(node, sync_source(node))
    return sockets if node.rebalance_socket is None else handoff_routes(sockets, node.rebalance_socket)


def local_rebalance_routes(node: NodeContext, given: SyncSource) -> list[HttpRoute]:
    """Return the same endpoints, served in this process."""
    return peer_routes(node.mesh, node.clock, RebalanceHandlers(given, node.mesh))


def rebalancer(node: NodeContext) -> Rebalancer:
    """Return this node's rebalancer, which runs in its coordinator."""
    sources = RebalancerDeps(
        partial(RemoteSyncPeer, node.peers),
        lambda: replica_counts_in_use(node),
        InLoopThrottle(node.clock).yield_to_clients,
        lambda: shared_counters.oldest_map_version(node.clock.monotonic(), _MAP_GRACE),
        (SHARED_PREFIXES, node_catalog(node).ensure_local_copies),
    )
    maps = ClusterMapStore(node.control)
    return Rebalancer(
        node.store,
        sync_source(node),
        node.mesh,
        maps,
        node.control,
        sources,
        node.clock,
        repair_every=node.settings.cluster.repair_interval,
        worker_socket=node.rebalance_socket,
    )


class PeerServices:
    """The services that span the cluster, one of each per process."""

    def __init__(
        self,
        node: NodeContext,
        versions: VersionLookup,
        members: MemberService,
        backed: BackedBucketService | None,
    ) -> None:
        self._node, self._backed = node, backed
        self.lister = LocalListings(node.store, node.mesh, node.store.list_stored_entries)
        self.merged = MergedListings(self.lister, node.mesh, node.peers, node.clock)
        self.broadcast = ChangeBroadcast(node.control, node.mesh, node.peers, node.settings.workers)
        everywhere = PeerBuckets(node.mesh, node.peers, self.merged, self.broadcast)
        self.buckets = BucketService(node.buckets, node.store, node.clock, node.settings.region, everywhere)
        self.sources = LocalCopySources(node.store, versions, members, backed)
        self.remote_sources = RemoteCopySources(node.mesh, node.peers, versions, self.sources)
        self.forwarder = Forwarder(
            node.mesh,
            node.peers,
            HopSigner(ClusterSecret(node.control).derive_key, node.clock),
            node.clock,
            BucketRevisions(node.control),
            node.settings.http.body_timeout,
        )
        self.fan_out = FanOut(
            self.forwarder, self.remote_sources, self.merged, node.mesh, node.peers, node.clock
        )

    def __repr__(self) -> str:
        return f"<PeerServices of {self._node.settings.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes that other nodes call."""
        node, backed = self._node, self._backed
        replicated, handover = node.replicated_store, list[object]()
        if isinstance(replicated, ReplicatedStore):
            replicator = replicated.primary.replicator
            handover = [HandoverHandler(node.store, node.mesh, replicator, node.clock)]
        origins: list[object] = []
        if backed is not None:
            origins = [
                PrefetchWorker(backed, node.mesh),
                PeerCacheServer(backed.cache_store),
                backed.listings.write_marks,
                WriteBackHandlers(backed.write_back_router, node.mesh),
            ]
        return [
            *peer_routes(
                node.mesh,
                node.clock,
                self.lister,
                BucketHandlers(self.buckets, self.broadcast),
                CopySourceHandlers(self.sources, node.mesh),
                ResumeSource(node.store, node.settings.node_id),
                ReplicaHandlers(node.store, node.mesh),
                ForwardedWriteHandlers(node.store, replicated, node.mesh),
                ForwardedPutHandler(replicated, node.mesh),
                *handover,
                *origins,
            ),
            *rebalance_routes(node),
        ]


_log = logging.getLogger("meshd.cluster")
_GIB: Final = 1 << 30


def own_member(settings: NodeSettings) -> Member:
    """Return the node's own entry for the cluster map."""
    wanted = settings.cluster
    roles = cast("tuple[Role, ...]", wanted.roles)
    weight = wanted.weight or _gibibytes(settings)
    return Member(settings.node_id, settings.endpoint, wanted.zone, wanted.rack, weight, roles)


def _gibibytes(settings: NodeSettings) -> int:
    """Return the size of the disks in GiB; each file system counts once."""
    sizes = {}
    for disk in settings.store.disks:
        with suppress(OSError):  # the disk fails, and the node runs without it
            sizes[os.stat(disk).st_dev] = measure_disk_space(disk).total
    return min(max(1, sum(sizes.values()) // _GIB), MAX_WEIGHT)


async def join_and_maintain(node: NodeContext, tasks: BackgroundTasks) -> Rebalancer | None:
    """Join the cluster map, then maintain membership and watch the other nodes; returns the rebalancer. Does
    nothing on a single node. Raises StartupError, ControlError."""
    settings, control, clock = node.settings, node.control, node.clock
    if settings.cluster.control is None:
        return None
    identity = read_identity(settings.store.data_dir)
    if identity is None:
        raise StartupError(f"{settings.store.data_dir} belongs to no mesh; start the node again")
    maps = ClusterMapStore(control)

    def fewest_copies() -> int:
        cluster = node.mesh.current_map()
        return node.buckets.min_replica_count(cluster.copies, cluster.counts)

    membership = Membership(
        control,
        maps,
        own_member(settings),
        identity.lease_holder,
        clock,
        settings.cluster,
        hanging=lambda: disk_silence(node) >= settings.hang_timeout / 2,
        fewest_copies=fewest_copies,
    )
    await membership.join()
    await publish_domains(control, settings.node_id, settings.http.domains)
    for node_id, why in domain_mismatches(control, node.mesh.current_map()).items():
        _log.warning(
            "a node is configured with other virtual-host domains", extra={"node": node_id, "why": why}
        )
    detector = FailureDetector(
        node.mesh,
        control,
        NodeStateWriter(control, maps),
        fewest_copies,
        clock,
        ttl=settings.cluster.lease,
        down_after=settings.cluster.down_after,
    )
    tasks.spawn(membership.run(), "membership")
    tasks.spawn(detector.run(), "failure detector")
    tasks.spawn(maintain_generation(control, settings.store.data_dir, identity), "directory")
    moving = rebalancer(node)
    tasks.spawn(moving.run(), "rebalancer")
    return moving


_disk_log = logging.getLogger("meshd.disks")
_DISK_PROBES: Final = 4  # further probes of a disk that failed one, before the next round
_PROBE_INTERVAL: Final = 1.0  # seconds between two of them
_PRESENCE_INTERVAL: Final = 0.5  # seconds between two looks whether disks are still there
_REPORT_TIMEOUT: Final = 5.0  # seconds for the report to the control store


def scrub_scheduler(node: NodeContext, own_rebalancer: Rebalancer | None) -> ScrubScheduler:
    """Return this node's scrub scheduler, which runs in its coordinator."""
    rest = InLoopThrottle(node.clock).yield_to_clients
    repairer = Repairer(node.store, sync_source(node), node.mesh, partial(RemoteSyncPeer, node.peers), rest)
    documents = DocumentStore(node.store, node.objects.documents, removals=node.removals)
    document_repairer = DocumentRepairer(node.store, documents, node.mesh)

    async def repair(count: Callable[[int], None]) -> None:
        await repairer.repair_quarantined(count)
        await document_repairer.repair_quarantined(count)

    return ScrubScheduler(
        node.settings.node_id,
        node.store,
        node.control,
        node.clock,
        repair=repair,
        compare=_no_peers if own_rebalancer is None else own_rebalancer.wait_until_compared,
        throttle=RateLimiter(node.clock, rest, node.settings.scrub_rate).throttle,
        every=node.settings.scrub_interval,
        count_under_replicated=UnderReplication(
            node.mesh, sync_source(node), lambda: replica_counts_in_use(node), node.clock
        ).refresh_count,
        publish_interval=lambda: publish_interval(len(node.mesh.current_map().nodes)),
    )


async def _no_peers() -> None:
    """Do nothing: a single node has no peers to compare with."""


async def watch_disks(node: NodeContext) -> None:
    """Take failing disks out of service. A node of a cluster stops when all of its disks, or the device
    of its index, have failed, so that the other nodes take over its share."""
    disks = node.store.disk_health
    for _ in range(_DISK_PROBES):
        if not any([await each.probe_disks() for each in _disk_monitors(node)]):
            break
        await asyncio.sleep(_PROBE_INTERVAL)
    metrics.store_disk_silent.set(disk_silence(node))
    if node.settings.cluster.control is None or (disks.has_disk and not disks.index_failed):
        return
    if disks.index_failed:
        _disk_log.critical(
            "the device of this node's index has failed: the node stops, and the other nodes take over "
            "its share",
            extra={"disk": str(node.settings.store.index_dir), "why": disks.index_failed},
        )
    else:
        _disk_log.critical(
            "every disk of this node has failed: the node stops, and the other nodes take over its share"
        )
    await _stop_node(node, [disks.index_state()] if disks.index_failed else disks.disk_states())


async def stop_after_lost_sync(node: NodeContext, error: OSError) -> None:
    """End the node, whose next start goes back to the last checkpoint: what has been acknowledged since may
    not be on disk, whatever later syncs say."""
    _disk_log.critical(
        "a sync failed: the node stops, and goes back to its last checkpoint when it is started again",
        extra={"why": str(error)},
    )
    why = f"a sync failed ({error.strerror}): the node has stopped; start it again"
    await _stop_node(node, [DiskState(str(error.filename), False, why)])


async def _stop_node(node: NodeContext, states: Sequence[DiskState]) -> None:
    """Report the disks to the control store, if the node has one in common with others, and end the node."""
    if node.settings.cluster.control is not None:
        try:
            await asyncio.wait_for(
                publish_disks(node.control, node.settings.node_id, tuple(states)), _REPORT_TIMEOUT
            )
        except (ControlError, TimeoutError) as error:
            _disk_log.warning(
                "the disk failure could not be reported to the control store", extra={"why": str(error)}
            )
    os.kill(os.getppid(), signal.SIGTERM)


async def replace_disks(node: NodeContext) -> None:
    """Wait until disks were emptied, removed or exchanged, or are out of service. Take those emptied or
    removed out of service, and put empty ones into service. If one was exchanged for another with files, end
    the node: this one is not written any more, and the next start finds which disk is where."""
    monitors = _disk_monitors(node)
    await poll_in_thread(lambda: any(each.misses_disks() for each in monitors), _PRESENCE_INTERVAL)
    exchanged = await asyncio.to_thread(node.store.disk_health.exchanged_disks)
    if exchanged:
        _disk_log.critical(
            "another disk was mounted in the place of one in use: the node stops; mount the right one, and "
            "start it again",
            extra={"disk": ", ".join(state.path for state in exchanged)},
        )
        await _stop_node(node, exchanged)
        return
    for monitor in monitors:
        await monitor.check_missing_disks()


def disk_silence(node: NodeContext) -> float:
    """Return the seconds for which the disk that is silent longest has not answered; 0 if all do."""
    return max(each.silent_seconds() for each in _disk_monitors(node))


def _disk_monitors(node: NodeContext) -> list[DiskHealthMonitor]:
    own = node.store.disk_health
    return [own] if node.cache_store is None else [own, node.cache_store.cache.disk_health]


async def quarantine_damaged(node: NodeContext) -> None:
    """Quarantine what readers of this process found damaged; damaged cache entries are removed. Also take
    disks out of service that the coordinator found failing."""
    node.store.disk_health.apply_published_changes()
    await node.store.quarantine.process_damage_reports()
    if node.cache_store is None:
        return
    node.cache_store.cache.disk_health.apply_published_changes()
    if (
        await node.cache_store.cache.quarantine.process_damage_reports()
        or node.cache_store.cache.disk_health.take_data_lost_flag()
    ):
        await _evict_damaged(node.cache_store.cache)


async def _evict_damaged(cache: Store) -> None:
    after = None
    while found := cache.quarantine.entries(after=after):
        records = [(name, stamp, cache.version_at(name, stamp)) for name, stamp, _ in found]
        await cache.inventory.drop_unowned(
            [HeldName(name, (HeldVersion(each.version, stamp),)) for name, stamp, each in records if each]
        )
        after = found[-1][:2]
    await cache.quarantine.prune()
