"""Composition root of one process: store, control state, tables, services, routes.

Everything is constructed here and passed down; no module below looks anything up. It is opened once, after
fork.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshd.auth.acls import AclService
from meshd.auth.authorizer import Authorizer
from meshd.auth.identities.named_policies import PolicyAdmin
from meshd.auth.identities.sts_sessions import CredentialService, SessionRevocation
from meshd.auth.identities.users import IdentityAdmin
from meshd.auth.request_facts import record_finder
from meshd.batches.assets import load_asset
from meshd.batches.gather import GatherService
from meshd.batches.op_trials import OpTrials
from meshd.cluster.replication.replicated_store import replicated_store
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.control.factory import open_control
from meshd.control.identities import IdentityTable, KeyLastUsed
from meshd.control.jobs import JobTable
from meshd.control.user_modules import ModuleTable
from meshd.core.document_store import DocumentStore
from meshd.datasets.archives.archive_service import ArchiveService
from meshd.datasets.archives.background_indexer import IndexQueue
from meshd.documents.admin import DocumentAdmin
from meshd.documents.inventory import DocumentInventory, UsageFile
from meshd.objects.buckets.replication_factor import ReplicationFactors
from meshd.objects.buckets.settings import SettingService
from meshd.objects.delete import DeleteService
from meshd.objects.list_objects import ListingService
from meshd.objects.multipart_upload import UploadService
from meshd.objects.object_metadata import ObjectAclService, TaggingService
from meshd.objects.service import ObjectService
from meshd.objects.version_lookup import VersionLookup
from meshd.origins.admin import BackedAdmin
from meshd.origins.cache.cache_store import CacheStore, FreshnessTable
from meshd.origins.cache.residency import CacheResidency
from meshd.origins.client.origin_pool import OriginPool
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.process.log_level import notify_supervisor
from meshd.process.wiring.cluster import PeerServices, open_cluster_view
from meshd.process.wiring.data_services import job_service, output_routes, view_kinds, view_makers
from meshd.reads.archive_members import MemberService
from meshd.reads.near_cache_reader import NearCacheReader
from meshd.reads.peer_handlers import FrameHandlers
from meshd.reads.peer_read_service import PeerReadService
from meshd.rpc.peer_client import PeerClient
from meshd.server.api.admin import AdminEndpoint, StsEndpoint
from meshd.server.api.backed_buckets import backed_bucket_routes, cache_residency_routes
from meshd.server.api.batches import batch_api_routes
from meshd.server.api.cluster import ClusterEndpoint
from meshd.server.api.cluster_admin import ClusterAdmin
from meshd.server.api.documents import document_routes
from meshd.server.api.jobs import job_routes
from meshd.server.api.log_level import LogLevelService
from meshd.server.api.op_catalog import op_catalog_routes, user_module_routes
from meshd.server.http_server import ServerServices
from meshd.server.peer.endpoint import PeerAuthenticator
from meshd.server.peer.routes import peer_routes
from meshd.store.integrity.verification import ExpiringVerifiedExtents
from meshd.store.store import Store
from meshd.telemetry import logs
from meshd.transform.sandbox.user_modules import MODULES
from meshd.util.clock import SystemClock
from meshd.views.definitions import ViewDefinitions
from meshd.views.dispatch import ViewDispatcher
from meshd.views.peer_handlers import ViewResultHandlers
from meshd.views.transform_results import TransformResultMaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.worker import WorkerSocket
    from meshd.config import NodeSettings
    from meshd.control.control_api import ControlStore
    from meshd.origins.cache.fetcher import CacheManagerApi
    from meshd.origins.service import BackedService
    from meshd.process.wiring.data_services import DataServices
    from meshd.server.http_server import HttpRoute
    from meshd.server.local_handover import LocalFrameService
    from meshd.store.api import ObjectStore
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock


REBALANCE_WRITER = "m"
"""The store writer of the rebalance process, which serves no requests by a map."""


@dataclass(frozen=True, slots=True)
class NodeContext:
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
    replicated_store: ObjectStore
    """The store that services write to: `store`, and in a cluster every other node that must store the
    write."""
    cache_store: CacheStore | None = None
    """The cache of buckets with origins."""
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
        objects = RemoteObjects(store, mesh, peers, buckets)
        archives = ArchiveService(
            store, uses.note, objects, settings.view_cache_bytes, settings.archive_ratio
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
            archives,
            mesh,
            peers,
            objects,
            replicated_store(store, mesh, peers, clock),
            cache_store,
            rebalance_socket,
        )


def node_cache_store(node: NodeContext) -> CacheStore:
    """Return the node's cache. Raises ValueError if the node was opened without one."""
    if node.cache_store is None:
        raise ValueError("this node was opened without a cache")
    return node.cache_store


def node_access(node: NodeContext) -> Authorizer:
    """Return the authorizer."""
    return Authorizer(node.buckets, node.clock, record_finder(node.store))


def view_reader(node: NodeContext, access: Authorizer, data: DataServices) -> ViewDispatcher:
    """Return the reader of views of every kind."""
    return ViewDispatcher(
        node.store, ViewDefinitions(node.buckets, node.clock, access), view_kinds(node, data)
    )


def peer_services(node: NodeContext, backed: BackedService | None = None) -> PeerServices:
    """Return the services that span the cluster, for `web_deps` and for other nodes."""
    versions = VersionLookup(node.store, node.buckets)
    definitions = ViewDefinitions(node.buckets, node.clock, node_access(node))
    members = MemberService(
        node.store, versions, node.archives, lambda bucket: definitions.find_view(bucket) is not None
    )
    return PeerServices(node, versions, members, backed)


def web_deps(
    node: NodeContext,
    access: Authorizer,
    data: DataServices,
    audit: AuditLog | None = None,
    backed: BackedService | None = None,
) -> ServerServices:
    """Return the services of the S3 endpoint."""
    versions = VersionLookup(node.replicated_store, node.buckets)
    objects = ObjectService(node.replicated_store, versions, IndexQueue(node.store).enqueue, backed)
    acls = AclService(node.buckets, node.identities)
    views = view_reader(node, access, data)
    secret, mesh = ClusterSecret(node.control), peer_services(node, backed)
    return ServerServices(
        access=access,
        sessions=CredentialService(node.identities, secret, node.key_usage, node.clock),
        buckets=mesh.buckets,
        objects=objects,
        uploads=UploadService(node.replicated_store, objects, versions, acls.owner_of),
        listings=ListingService(node.store, node.identities, node.buckets, mesh.merged),
        versions=versions,
        deleter=DeleteService(node.replicated_store, versions, backed),
        tagging=TaggingService(node.replicated_store, versions),
        settings=SettingService(node.buckets, acls),
        acls=acls,
        views=views,
        members=MemberService(node.replicated_store, versions, node.archives, views.is_view),
        object_acls=ObjectAclService(node.replicated_store, node.buckets, versions, acls),
        clock=node.clock,
        mesh=node.mesh,
        control_snapshot=node.control.pin_revisions,
        audit=audit,
        http=node.settings.http,
        backed=backed,
        nearby_reader=NearCacheReader(node.objects, versions),
        resume_read=node.objects.resume_response,
        peer_authenticator=PeerAuthenticator(secret.derive_key, node.clock),
        forwarder=mesh.forwarder,
        fan_out=mesh.fan_out,
        copy_sources=mesh.remote_sources,
        bucket_changes=mesh.broadcast,
    )


def admin_routes(node: NodeContext, sessions: CredentialService) -> list[HttpRoute]:
    """Return the routes of the admin API, temporary credentials and whoami."""
    identities = IdentityAdmin(node.identities, node.key_usage, node.buckets, node.clock)
    revoking = SessionRevocation(node.identities, node.clock)
    own = node.settings
    loudness = LogLevelService(own.node_id, own.log_level, logs.runtime_level, node.clock, notify_supervisor)
    policies = PolicyAdmin(node.identities, node.clock)
    admin = AdminEndpoint(identities, policies, revoking, loudness, node.clock)
    maps, census = ClusterMapStore(node.control), document_inventory(node)
    cluster = ClusterAdmin(node.mesh, maps, node.control, node.buckets, node.peers, census, node.clock)
    return [
        *admin.routes(),
        *StsEndpoint(sessions, node.clock).routes(),
        *ClusterEndpoint(node.mesh, cluster, node.clock).routes(),
    ]


def document_inventory(node: NodeContext) -> DocumentInventory:
    """Return the inventory of documents, on this node and on the others."""
    return DocumentInventory(node.store, node.last_used, node.objects.list_inventories)


def _backed_admin(node: NodeContext) -> BackedAdmin:
    origins = OriginPool(node.settings.origin_credentials, node.clock)
    return BackedAdmin(node.buckets, origins, node.clock, node.settings.region)


def document_references(node: NodeContext) -> Iterator[tuple[str, str]]:
    """Yield what names plans, snapshots and assets: views, jobs, pushed modules; each with its text."""
    yield from ((f"view {bucket.name}", bucket.view) for bucket in node.buckets.list_all() if bucket.view)
    yield from ((f"job {name}", job.spec) for name, job in JobTable(node.control).list_all().items())
    for name, module in ModuleTable(node.control).list_all().items():
        yield from ((f"module {name}", build.version) for build in module.builds)


def _copy_counts(node: NodeContext) -> ReplicationFactors:
    maps, settings = ClusterMapStore(node.control), node.settings
    return ReplicationFactors(node.buckets, node.mesh, maps, node.clock, settings.region)


def _document_admin(node: NodeContext, access: Authorizer, data: DataServices) -> DocumentAdmin:
    return DocumentAdmin(
        node.store,
        data.catalog,
        document_inventory(node),
        node.removals,
        access,
        partial(document_references, node),
        node.clock,
        node.settings.keep_documents_days,
        data.datasets.births.is_recorded,
    )


def native_routes(
    node: NodeContext,
    access: Authorizer,
    data: DataServices,
    manager: CacheManagerApi | None = None,
    frame_service: LocalFrameService | None = None,
) -> list[HttpRoute]:
    """Return the routes of the native protocol. `manager`: the cache manager of a daemon; `frame_service`:
    the service with which a worker hands frames over locally."""
    gathers = GatherService(node.store, node.archives, data.dataset_access, node.objects)
    definitions = ViewDefinitions(node.buckets, node.clock, access, view_makers(data))
    tests = OpTrials(data.user_ops, data.assets, node.objects, data.dataset_access, data.frames, node.clock)
    also = [
        job_routes(job_service(node, access)),
        op_catalog_routes(data.user_ops, node.clock),
        user_module_routes(data.user_ops, tests),
        backed_bucket_routes(_backed_admin(node), _copy_counts(node)),
        document_routes(_document_admin(node, access, data)),
    ]
    if node.cache_store is not None and manager is not None:  # tests may run without one
        room = node.settings.cache_bytes
        residence = CacheResidency(node.store, node.cache_store, node.buckets, node.mesh, manager, room)
        also.append(cache_residency_routes(residence))
    holdings = PeerReadService(
        node.store,
        node.mesh,
        node.archives,
        data.catalog,
        data.datasets.lines,
        data.datasets.tfrecords,
        data.datasets.parquets,
        node.objects,
        document_inventory(node),
        ExpiringVerifiedExtents(node.clock),
    )
    return [
        *batch_api_routes(
            data.datasets, data.batches, gathers, definitions, node.clock, also, node.mesh, frame_service
        ),
        *peer_routes(
            node.mesh,
            node.clock,
            holdings,
            FrameHandlers(data.frames),
            ViewResultHandlers(TransformResultMaker(node.store, data.frames, node.objects), node.mesh),
        ),
        *output_routes(node),
    ]
