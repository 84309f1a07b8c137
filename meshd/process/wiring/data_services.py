"""Wiring of datasets, views, batches and jobs in one process, shared by the S3 and the native endpoint.

The two tables of view kinds below, and the table of job kinds, are the only places that list kinds.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.auth.dataset_access import DatasetAccess
from meshd.batches.assembly.stored_sequences import StoredSequences
from meshd.batches.assets import AssetService
from meshd.batches.read_ahead.cost_estimator import ReadCostEstimator, StoredCopies
from meshd.batches.read_ahead.default_order import DefaultOrders
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.read_ahead.read_waits import ReadWaitClient
from meshd.batches.read_ahead.scheduler import ReadScheduler
from meshd.batches.read_ahead.shuffle_advice import ShuffleAdvisor
from meshd.batches.read_ahead.window_lookup import WindowLookup
from meshd.batches.service import BatchService
from meshd.batches.user_module_registry import UserModules
from meshd.batches.warm_up.node_task import WarmUpContext
from meshd.cluster.replication.primary_writes import WriteForwarder
from meshd.control.default_orders import DefaultOrderTable
from meshd.control.jobs import JobTable
from meshd.control.user_modules import ModuleTable
from meshd.core.document_store import DocumentStore
from meshd.core.peer_source import LOOKUP_ONLY
from meshd.datasets.archives.background_indexer import IndexQueue
from meshd.datasets.bucket_incarnations import SnapshotIncarnations
from meshd.datasets.service import DatasetService
from meshd.datasets.snapshot_capacity import SnapshotCapacity
from meshd.datasets.snapshot_pages import SnapshotPages
from meshd.jobs.archives.extract import ExtractJob
from meshd.jobs.archives.shard import ShardJob
from meshd.jobs.job_kind import JobServices
from meshd.jobs.job_service import JobService
from meshd.jobs.materialize_view import MaterializeJob
from meshd.jobs.output_store import ClusterOutputStore, JobOutputHandlers, LocalOutputStore
from meshd.jobs.relayout.node_task import RelayoutContext
from meshd.jobs.relayout.relayout_job import RelayoutJob
from meshd.jobs.runner import JobRunner
from meshd.jobs.scratch import PlanStore
from meshd.jobs.source_inventory import SourceInventory
from meshd.jobs.warm_up_job import WarmUpJob
from meshd.jobs.warm_up_nodes import WarmUpNodes
from meshd.objects.object_reader import VersionLookup
from meshd.origins.prefetch_fan_out import PrefetchFanOut
from meshd.origins.prefetch_job import PrefetchJob
from meshd.origins.prefetch_worker import PrefetchWorker
from meshd.process import memory_usage
from meshd.process.transform_process import sandbox_limits
from meshd.server.peer_endpoint import peer_routes
from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.disks.page_loader import PageLoader
from meshd.views.batch_reader import BatchReader, complete_batches
from meshd.views.definitions import complete_transform
from meshd.views.shards.read_ahead import ShardReadAhead
from meshd.views.shards.reader import ShardReader
from meshd.views.transform_reader import TransformReader
from meshd.views.zarr.layout_cache import ZarrLayoutCache, ZarrViewCompleter
from meshd.views.zarr.reader import ZarrReader
from meshwire.views.batch_view import BatchesView
from meshwire.views.shard_view import ShardsView
from meshwire.views.transform_view import TransformView
from meshwire.views.zarr_view import ZarrView

if TYPE_CHECKING:
    from meshd.auth.authorizer import Authorizer
    from meshd.batches.warm_up.node_task import WarmUps
    from meshd.core.frame_address import FrameSource
    from meshd.jobs.job_kind import JobKind
    from meshd.jobs.relayout.node_task import Relayouts
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.wiring.node_context import NodeContext
    from meshd.server.http_route import HttpRoute
    from meshd.transform.decoded_cache.cache import DecodedCache
    from meshd.transform.pool import TransformPool
    from meshd.views.dispatch import ViewDispatcher
    from meshd.views.view_kind import ViewCompleter, ViewKind

_JOB_WINDOW_BYTES: Final = 1 << 30
"""Page cache that the sources of a job take on rotational disks, at most."""


class DataServices(msgspec.Struct, frozen=True):
    """The services for datasets and batches. `frames` is the coordinator's assembler, in this process or
    behind its socket."""

    frames: FrameSource
    catalog: DocumentStore
    dataset_access: DatasetAccess
    datasets: DatasetService
    assets: AssetService
    batches: BatchService
    read_costs: ReadCostEstimator
    orders: DefaultOrders
    user_ops: UserModules


def node_catalog(node: NodeContext) -> DocumentStore:
    """Return the document store, as this process opens it."""
    catalog = DocumentStore(node.store, node.objects.documents, node.last_used, node.removals)
    capacity = SnapshotCapacity(memory_usage.free_memory)
    SnapshotPages(node.store, catalog, node.archives, node.objects, capacity)
    return catalog


def data_services(node: NodeContext, access: Authorizer, frames: FrameSource) -> DataServices:
    """Build the services for snapshots, plans and frames, which check the caller's rights."""
    catalog = node_catalog(node)
    readers = DatasetAccess(access)
    births = SnapshotIncarnations(node.buckets, catalog, node.objects)
    capacity = SnapshotCapacity(memory_usage.free_memory)
    datasets = DatasetService(node.store, catalog, readers, node.archives, node.objects, births, capacity)
    user_ops = UserModules(
        ModuleTable(node.control), node.store, catalog, access, node.clock, sandbox_limits(node.settings)
    )
    assets = AssetService(catalog, readers, user_ops, node.objects)
    read_costs = _read_cost_estimator(node, datasets)
    batches = BatchService(
        node.store, catalog, datasets, readers, frames, assets, node.archives, node.objects,
        stored_sequences(node), ShuffleAdvisor(read_costs),
    )  # fmt: skip
    table = DefaultOrderTable(node.control)
    orders = DefaultOrders(datasets, catalog, read_costs, table, node.mesh, node.peers, node.clock)
    return DataServices(frames, catalog, readers, datasets, assets, batches, read_costs, orders, user_ops)


def stored_sequences(node: NodeContext) -> StoredSequences:
    """Return the node's stored sequences, for one process."""
    return StoredSequences(node.store, node.last_used.note, node.settings.view_cache_bytes)


def read_scheduler(node: NodeContext, decoded: DecodedCache | None) -> ReadScheduler | None:
    """Build the scheduler of reads ahead; None if the node has no rotational disk."""
    disks = RotationalDisks(node.settings.store.disk_type)
    if not disks.any_of(node.settings.store.disks):
        return None
    lookup = WindowLookup(node.store, node.archives, disks, node.objects)
    own = OwnSampleFinder(node.objects)
    return ReadScheduler(lookup, node.clock, _read_ahead_budget(node), decoded, own)


def read_waits(node: NodeContext) -> ReadWaitClient | None:
    """Return what reads for other nodes wait for; None if the node has no rotational disk."""
    disks = RotationalDisks(node.settings.store.disk_type)
    rotational = disks.any_of(node.settings.store.disks)
    return ReadWaitClient(node.settings.coordinator_socket) if rotational else None


def warm_up_context(
    node: NodeContext, pool: TransformPool, decoded: DecodedCache | None, read_ahead: ReadScheduler | None
) -> WarmUpContext:
    """Return what the coordinator's warm-ups work with."""
    catalog = node_catalog(node)
    return WarmUpContext(node.store, pool, node.archives, catalog, decoded, read_ahead, node.objects)


def relayout_context(node: NodeContext) -> RelayoutContext:
    """Return what the coordinator's relayouts work with."""
    disks = RotationalDisks(node.settings.store.disk_type)
    return RelayoutContext(node.store.rewriter, disks, node.objects, node.clock)


def _read_cost_estimator(node: NodeContext, datasets: DatasetService) -> ReadCostEstimator:
    """Build the estimator of what an order would cost this node's disks."""
    disks = RotationalDisks(node.settings.store.disk_type)
    lookup = None
    if disks.any_of(node.settings.store.disks):
        lookup = WindowLookup(node.store, StoredCopies(node.store), disks, LOOKUP_ONLY)
    budget = _read_ahead_budget(node)
    return ReadCostEstimator(datasets, lookup, node.settings.node_id, budget, OwnSampleFinder(node.objects))


def background_loading(node: NodeContext) -> tuple[PageLoader, int]:
    """Return what loads the sources of jobs and of copies from rotational disks, and how many bytes at a
    time."""
    disks = RotationalDisks(node.settings.store.disk_type)
    window = min(_JOB_WINDOW_BYTES, _read_ahead_budget(node) // 4)
    return PageLoader(disks.includes), window if disks.any_of(node.settings.store.disks) else 0


def _read_ahead_budget(node: NodeContext) -> int:
    """Return the bytes of page cache that windows may use: as configured, or by the memory free now."""
    return node.settings.read_ahead_bytes or (memory_usage.free_memory() or 0) // 4


def view_kinds(node: NodeContext, data: DataServices) -> dict[type, ViewKind[Any]]:
    """Return the reader of each kind of view."""
    pages, window_bytes = background_loading(node)
    read_ahead = ShardReadAhead(pages, node.objects, window_bytes) if window_bytes else None
    layouts = ZarrLayoutCache(node.store, node.clock, data.catalog, data.datasets, data.batches, node.objects)
    return {
        TransformView: TransformReader(node.store, data.frames, node.last_used, node.objects),
        ShardsView: ShardReader(node.store, node.clock, node.archives, node.objects, read_ahead),
        ZarrView: ZarrReader(node.store, layouts, data.frames, node.last_used, node.objects),
        BatchesView: BatchReader(
            node.store, data.catalog, data.batches, data.frames, node.last_used, node.objects
        ),
    }


def view_makers(data: DataServices) -> dict[type, ViewCompleter]:
    """Return what completes a view before it is stored; kinds that need nothing are not listed."""
    return {
        TransformView: partial(complete_transform, data.assets),
        ZarrView: ZarrViewCompleter(data.datasets, data.batches),
        BatchesView: partial(complete_batches, data.batches),
    }


def job_service(node: NodeContext, access: Authorizer) -> JobService:
    """Return the job service of a worker."""
    return JobService(JobTable(node.control), node.control, node.buckets, access, node.clock, node.mesh)


def local_outputs(node: NodeContext) -> LocalOutputStore:
    """Return the store for job outputs of which this node is the primary."""
    return LocalOutputStore(
        node.store,
        node.replicated_store,
        VersionLookup(node.store, node.buckets),
        IndexQueue(node.store).enqueue,
    )


def output_routes(node: NodeContext) -> list[HttpRoute]:
    """Return the routes that nodes call when their jobs write outputs."""
    return peer_routes(node.mesh, node.clock, JobOutputHandlers(local_outputs(node), node.mesh))


def job_runner(
    node: NodeContext,
    access: Authorizer,
    views: ViewDispatcher,
    backed: BackedBucketService,
    warm_up: WarmUps,
    relayout: Relayouts,
) -> JobRunner:
    """Return the coordinator's job runner."""
    catalog = node_catalog(node)
    outputs = ClusterOutputStore(
        local_outputs(node),
        node.objects,
        node.mesh,
        WriteForwarder(node.mesh, node.peers, node.clock),
    )
    versions = VersionLookup(node.store, node.buckets)
    tools = JobServices(
        node.store, node.objects, node.archives, versions, access, outputs, *background_loading(node)
    )
    inventories = SourceInventory(node.store, catalog, node.archives, node.objects)
    plan_store = PlanStore(node.store, catalog)
    spreading = PrefetchFanOut(node.mesh, node.peers, PrefetchWorker(backed, node.mesh))
    sharding = ShardJob(tools, inventories, plan_store)
    kinds: dict[str, JobKind] = {
        "shard": sharding,
        "reshard": sharding,
        "extract": ExtractJob(tools, inventories, plan_store),
        "materialize": MaterializeJob(tools, views),
        "warm": WarmUpJob(
            DatasetAccess(access),
            catalog,
            SnapshotIncarnations(node.buckets, catalog, node.objects),
            WarmUpNodes(node.mesh, node.peers, warm_up),
        ),
        "relayout": RelayoutJob(node.mesh, node.peers, relayout),
        "prefetch": PrefetchJob(
            access,
            backed,
            catalog,
            node.buckets,
            node.objects,
            spreading,
            SnapshotIncarnations(node.buckets, catalog, node.objects),
        ),
    }
    return JobRunner(
        JobTable(node.control),
        node.control,
        node.identities,
        node.buckets,
        kinds,
        plan_store,
        node.clock,
        node.mesh,
        None if node.settings.store.durability == "commit" else partial(_sync_stores, node),
    )


async def _sync_stores(node: NodeContext) -> None:
    """Make what the mesh has stored until now durable: here at once, elsewhere by waiting."""
    if not node.mesh.single_node:
        await asyncio.sleep(node.settings.store.sync_seconds)
    await asyncio.to_thread(node.store.checkpointer.take)
