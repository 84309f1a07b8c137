"""Wiring of the routes under `/-/`: the JSON APIs, and the handlers of other nodes' calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from meshd.auth.identities.named_policies import PolicyAdmin
from meshd.auth.identities.roles import RoleAdmin
from meshd.auth.identities.sts_sessions import SessionRevocation
from meshd.auth.identities.users import IdentityAdmin
from meshd.batches.gather import GatherService
from meshd.batches.op_trials import OpTrials
from meshd.batches.row_descriptions import RowDescriptions
from meshd.batches.warm_up.node_task import WarmUpHandlers
from meshd.cluster.scatter_gather import ActivityService, AuditTrail
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.datasets.table_preview import TablePreviews
from meshd.documents.admin import DocumentAdmin
from meshd.jobs.relayout.node_task import RelayoutHandlers
from meshd.objects.buckets.decoded_quota import DecodedQuotas
from meshd.objects.buckets.replication_factor import ReplicationFactors
from meshd.origins.admin import BackedAdmin
from meshd.origins.cache.residency import CacheResidency
from meshd.origins.client.origin_pool import OriginPool
from meshd.process.log_level import notify_supervisor
from meshd.process.wiring.cluster import page_loader
from meshd.process.wiring.data_services import (
    background_loading,
    job_service,
    output_routes,
    read_waits,
    view_makers,
)
from meshd.process.wiring.services import document_inventory, document_references
from meshd.reads.object_read_ahead import ObjectReadAhead
from meshd.reads.peer_read_service import FrameHandlers, PeerReadService
from meshd.server.api.admin import AdminEndpoint, StsEndpoint
from meshd.server.api.backed_buckets import BackedBucketEndpoint, CacheResidencyEndpoint
from meshd.server.api.batches import BatchEndpoint
from meshd.server.api.cluster import ActivityEndpoint, ClusterEndpoint
from meshd.server.api.cluster_admin import ClusterAdmin
from meshd.server.api.datasets import DatasetEndpoint
from meshd.server.api.documents import DocumentEndpoint
from meshd.server.api.jobs import JobEndpoint
from meshd.server.api.json_api import JsonApi
from meshd.server.api.log_level import LogLevelService
from meshd.server.api.op_catalog import OpCatalogEndpoint, UserModuleEndpoint
from meshd.server.api.read_ahead import ReadAheadEndpoint
from meshd.server.api.role_actions import AuditAction, RoleActions
from meshd.server.api.views import ViewEndpoint
from meshd.server.peer_endpoint import peer_routes
from meshd.store.integrity.verification import ExpiringVerifiedExtents
from meshd.telemetry import logs
from meshd.telemetry.activity import ActivityHistory
from meshd.telemetry.audit_tail import AuditTail
from meshd.views.definitions import ViewDefinitions
from meshd.views.transform_results import TransformResultMaker, ViewResultHandlers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.process.wiring.data_services import DataServices
    from meshd.process.wiring.node_context import NodeContext
    from meshd.server.http_route import HttpRoute
    from meshd.server.local_handover import LocalFrameService


def admin_routes(node: NodeContext, sessions: CredentialService) -> list[HttpRoute]:
    """Return the routes of the admin API, temporary credentials and whoami."""
    identities = IdentityAdmin(node.identities, node.key_usage, node.buckets, node.clock)
    revocation = SessionRevocation(node.identities, node.clock)
    own = node.settings
    log_level = LogLevelService(own.node_id, own.log_level, logs.runtime_level, node.clock, notify_supervisor)
    policies = PolicyAdmin(node.identities, node.clock)
    roles = RoleActions(RoleAdmin(node.identities, node.key_usage, node.clock), revocation)
    trail = AuditTrail(node.mesh, node.peers, AuditTail(own.audit_log))
    more_actions = {**roles.table(), **AuditAction(trail).table()}
    admin = AdminEndpoint(identities, policies, revocation, log_level, node.clock, more_actions)
    cluster = ClusterAdmin(
        node.mesh,
        ClusterMapStore(node.control),
        node.control,
        node.buckets,
        node.peers,
        document_inventory(node),
        node.clock,
        down_after=own.cluster.down_after,
    )
    return [
        *admin.routes(),
        *StsEndpoint(sessions, node.clock).routes(),
        *peer_routes(node.mesh, node.clock, trail),
        *ClusterEndpoint(node.mesh, cluster, node.clock).routes(),
    ]


def _document_admin(
    node: NodeContext, access: Authorizer, data: DataServices, announce: Callable[[], Awaitable[None]]
) -> DocumentAdmin:
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
        announce,
    )


def native_routes(
    node: NodeContext,
    access: Authorizer,
    data: DataServices,
    announce: Callable[[], Awaitable[None]],
    manager: CacheManagerClient | None = None,
    frame_service: LocalFrameService | None = None,
) -> list[HttpRoute]:
    """Return the routes of the native protocol. `announce` returns once the other nodes know the buckets and
    deleted documents that this process knows. `manager` is the daemon's cache manager. `frame_service` hands
    frames over to jobs on this host."""
    loading = background_loading(node)
    gathers = GatherService(node.store, node.archives, data.dataset_access, node.objects, *loading)
    definitions = ViewDefinitions(node.buckets, node.clock, access, view_makers(data), announce)
    trials = OpTrials(data.user_ops, data.assets, node.objects, data.dataset_access, data.frames, node.clock)
    previews = TablePreviews(data.dataset_access, node.objects)
    maps, region = ClusterMapStore(node.control), node.settings.region
    origins = OriginPool(node.settings.origin_credentials, node.clock)
    backed = BackedAdmin(node.buckets, origins, node.clock, region)
    copy_counts = ReplicationFactors(node.buckets, node.mesh, maps, node.clock, region)
    api = JsonApi(node.clock, node.mesh, frame_service)
    loader = ObjectReadAhead(node.store, node.objects, data.dataset_access, *loading)
    routes = [
        *DatasetEndpoint(data.datasets, previews, data.read_costs, data.orders, api).routes(),
        *BatchEndpoint(data.batches, gathers, RowDescriptions(data.batches), api).routes(),
        *ReadAheadEndpoint(loader, api).routes(),
        *ViewEndpoint(definitions, api).routes(),
        *JobEndpoint(job_service(node, access), api).routes(),
        *OpCatalogEndpoint(data.user_ops, api).routes(),
        *UserModuleEndpoint(data.user_ops, trials, api).routes(),
        *BackedBucketEndpoint(backed, copy_counts, DecodedQuotas(node.buckets), announce, api).routes(),
        *DocumentEndpoint(_document_admin(node, access, data, announce), api).routes(),
    ]
    if node.cache_store is not None and manager is not None:  # tests may run without one
        residency = CacheResidency(
            node.store, node.cache_store, node.buckets, node.mesh, manager, node.settings.cache_bytes
        )
        routes += CacheResidencyEndpoint(residency, api).routes()
    peer_reads = PeerReadService(
        node.store,
        node.mesh,
        node.archives,
        data.catalog,
        data.datasets.pages,
        data.datasets.tables,
        node.objects,
        document_inventory(node),
        ExpiringVerifiedExtents(node.clock),
        read_waits(node),
        page_loader(node),
    )
    activity = ActivityService(
        node.mesh, node.peers, ActivityHistory(node.settings.activity_file), node.clock
    )
    return [
        *routes,
        *ActivityEndpoint(activity, node.clock).routes(),
        *peer_routes(node.mesh, node.clock, activity),
        *peer_routes(node.mesh, node.clock, data.orders),
        *peer_routes(
            node.mesh,
            node.clock,
            peer_reads,
            FrameHandlers(data.frames),
            ViewResultHandlers(TransformResultMaker(node.store, data.frames, node.objects), node.mesh),
        ),
        *output_routes(node),
        *peer_routes(
            node.mesh,
            node.clock,
            WarmUpHandlers(node.settings.coordinator_socket),
            RelayoutHandlers(node.settings.coordinator_socket),
        ),
    ]
