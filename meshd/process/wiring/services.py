"""Wiring of the services behind the S3 endpoint, and of what spans the nodes of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.auth.acls import AclService
from meshd.auth.identities.console_sessions import ConsoleSessions
from meshd.auth.identities.sts_sessions import CredentialService
from meshd.auth.web_identity.exchange import WebIdentityExchange
from meshd.auth.web_identity.key_cache import KeyCache
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.jobs import JobTable
from meshd.control.user_modules import ModuleTable
from meshd.datasets.archives.background_indexer import IndexQueue
from meshd.documents.inventory import DocumentInventory
from meshd.objects.archive_upload import ArchiveUploads
from meshd.objects.buckets.settings import SettingService
from meshd.objects.delete import DeleteService
from meshd.objects.list_objects import ListingService
from meshd.objects.multipart_upload import UploadService
from meshd.objects.object_metadata import ObjectAclService, TaggingService
from meshd.objects.object_reader import ObjectReader, VersionLookup
from meshd.objects.service import ObjectService
from meshd.process import memory_usage
from meshd.process.wiring.cluster import PeerServices
from meshd.process.wiring.data_services import view_kinds
from meshd.process.wiring.node_context import node_access
from meshd.reads.archive_members import MemberService
from meshd.reads.near_cache_reader import NearCacheReader
from meshd.server.console.oidc_sign_in import OidcSignIn
from meshd.server.peer_endpoint import PeerAuthenticator
from meshd.server.services import ServerServices
from meshd.store.disks.cold_reads import ColdReader
from meshd.store.disks.disk_type import RotationalDisks
from meshd.views.definitions import ViewDefinitions
from meshd.views.dispatch import ViewDispatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.auth.authorizer import Authorizer
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.wiring.data_services import DataServices
    from meshd.process.wiring.node_context import NodeContext
    from meshd.telemetry.audit_log import AuditLog


def view_reader(node: NodeContext, access: Authorizer, data: DataServices) -> ViewDispatcher:
    """Return the reader of views of every kind."""
    return ViewDispatcher(
        node.store, ViewDefinitions(node.buckets, node.clock, access), view_kinds(node, data)
    )


def peer_services(node: NodeContext, backed: BackedBucketService | None = None) -> PeerServices:
    """Return the services that span the cluster, for clients and for other nodes."""
    versions = VersionLookup(node.store, node.buckets)
    definitions = ViewDefinitions(node.buckets, node.clock, node_access(node))
    members = MemberService(
        node.store, versions, node.archives, lambda bucket: definitions.find_view(bucket) is not None
    )
    return PeerServices(node, versions, members, backed)


def server_services(
    node: NodeContext,
    access: Authorizer,
    data: DataServices,
    mesh: PeerServices,
    audit: AuditLog | None = None,
    backed: BackedBucketService | None = None,
) -> ServerServices:
    """Return the services of the S3 endpoint. `mesh`: see `peer_services`."""
    versions = VersionLookup(node.store, node.buckets)
    objects = ObjectService(
        node.store,
        node.replicated_store,
        versions,
        IndexQueue(node.store).enqueue,
        backed,
        node.store if node.replicated_store is node.store else None,
    )
    acls = AclService(node.buckets, node.identities)
    views = view_reader(node, access, data)
    secret = ClusterSecret(node.control)
    sessions = CredentialService(node.identities, secret, node.key_usage, node.clock)
    web_identity = WebIdentityExchange(node.identities.roles, sessions, KeyCache(node.clock), node.clock)
    console_sessions = None
    if node.settings.http.console:
        console_sessions = ConsoleSessions(sessions, secret.derive_key, node.clock)
    return ServerServices(
        access=access,
        sessions=sessions,
        web_identity=web_identity,
        buckets=mesh.buckets,
        bucket_table=node.buckets,
        reader=ObjectReader(node.store, versions),
        objects=objects,
        archive_uploads=ArchiveUploads(node.replicated_store, versions, objects, backed),
        uploads=UploadService(node.store, node.replicated_store, objects, versions, acls.owner_of),
        listings=ListingService(node.store, node.identities, node.buckets, mesh.merged),
        versions=versions,
        deleter=DeleteService(node.replicated_store, versions, backed),
        tagging=TaggingService(node.replicated_store, versions),
        settings=SettingService(node.buckets, acls),
        acls=acls,
        views=views,
        members=MemberService(node.store, versions, node.archives, views.is_view),
        object_acls=ObjectAclService(node.replicated_store, node.buckets, versions, acls),
        clock=node.clock,
        mesh=node.mesh,
        control_snapshot=node.control.pin_revisions,
        audit=audit,
        http=node.settings.http,
        backed=backed,
        nearby_reader=NearCacheReader(node.objects, versions),
        resume_read=node.objects.resumer.resume_response,
        peer_authenticator=PeerAuthenticator(secret.derive_key, node.clock),
        console_sessions=console_sessions,
        console_oidc=None
        if console_sessions is None or node.settings.http.console_oidc is None
        else OidcSignIn(
            node.settings.http.console_oidc,
            node.identities.roles,
            web_identity,
            console_sessions,
            secret.derive_key,
            node.clock,
        ),
        cold_reader=cold_reader(node),
        region=node.settings.region,
        forwarder=mesh.forwarder,
        fan_out=mesh.fan_out,
        copy_sources=mesh.remote_sources,
        bucket_changes=mesh.broadcast,
    )


def cold_reader(node: NodeContext) -> ColdReader | None:
    """Build what reads large responses from disks; None if the node has no rotational disk. All processes may
    have a sixteenth of the free memory for it."""
    disks = RotationalDisks(node.settings.store.disk_type)
    if not disks.any_of(node.settings.store.disks):
        return None
    return ColdReader(disks, (memory_usage.free_memory() or 0) // 16 // node.settings.workers)


def document_inventory(node: NodeContext) -> DocumentInventory:
    """Return the inventory of documents, on this node and on the others."""
    return DocumentInventory(node.store, node.last_used, node.objects.documents.list_inventories)


def document_references(node: NodeContext) -> Iterator[tuple[str, str]]:
    """Yield what names plans, snapshots and assets: views, jobs, pushed modules; each with its text."""
    yield from ((f"view {bucket.name}", bucket.view) for bucket in node.buckets.list_all() if bucket.view)
    yield from ((f"job {name}", job.spec) for name, job in JobTable(node.control).list_all().items())
    for name, module in ModuleTable(node.control).list_all().items():
        yield from ((f"module {name}", build.version) for build in module.builds)
