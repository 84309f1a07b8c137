"""The composition root of one process: store, control state, tables, services, routes.

Law: everything is made here and handed down; nothing below looks anything up. Opened after fork, once.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshd.assembly.catalog import Catalog
from meshd.cluster.replicating import replicated
from meshd.control.buckets import BucketTable
from meshd.control.clustermaps import ClusterMaps
from meshd.control.identities import IdentityTable
from meshd.control.jobs import JobTable
from meshd.control.keyuse import KeyUse
from meshd.control.modules import ModuleTable
from meshd.control.nodesecret import NodeSecret
from meshd.control.opening import open_control
from meshd.control.removals import RemovalTable
from meshd.kit.clock import SystemClock
from meshd.net.peers import Peers
from meshd.runtime.cluster import open_mesh
from meshd.runtime.data import view_kinds, view_makers
from meshd.runtime.jobs import job_desk, output_routes
from meshd.runtime.loglevels import tell_supervisor
from meshd.runtime.meshing import Meshing
from meshd.service.archives.ingesting import Ingest
from meshd.service.archives.reading import Archives
from meshd.service.authorization.access import Access
from meshd.service.authorization.acls import AclService
from meshd.service.authorization.facts import finder
from meshd.service.backed.administering import BackedAdmin
from meshd.service.batches.assets import load_asset
from meshd.service.batches.gathers import GatherService
from meshd.service.batches.optests import OpTests
from meshd.service.buckets.copycounts import CopyCounts
from meshd.service.buckets.settings import SettingService
from meshd.service.caching.freshness import FreshTable
from meshd.service.caching.origins import Origins
from meshd.service.caching.shelf import Shelf
from meshd.service.cluster.administering import ClusterAdmin
from meshd.service.cluster.holdings import Holdings
from meshd.service.cluster.loudness import Loudness
from meshd.service.cluster.residence import Residence
from meshd.service.documents.census import Census
from meshd.service.documents.kept import KeptDocuments
from meshd.service.documents.uses import UseFile
from meshd.service.identities.grants import PolicyAdmin
from meshd.service.identities.revoking import Revoking
from meshd.service.identities.temporary import Sessions
from meshd.service.identities.users import IdentityAdmin
from meshd.service.objects.acls import ObjectAclService
from meshd.service.objects.deleting import Deleter
from meshd.service.objects.listings import ListingService
from meshd.service.objects.members import MemberService
from meshd.service.objects.nearreading import NearReader
from meshd.service.objects.service import ObjectService
from meshd.service.objects.tagging import TaggingService
from meshd.service.objects.uploads import UploadService
from meshd.service.remote.objects import RemoteObjects
from meshd.service.semantics.versions import Versions
from meshd.service.views.definitions import ViewDefinitions
from meshd.service.views.dispatch import ViewReader
from meshd.service.views.making import ViewMaker
from meshd.store.proving import LateProofs
from meshd.store.store import Store
from meshd.telemetry import verbosity
from meshd.transform.userops.modules import MODULES
from meshd.web.admin import AdminEndpoint
from meshd.web.cluster import ClusterEndpoint
from meshd.web.holdings import holding_routes
from meshd.web.jobs import job_routes
from meshd.web.kept import kept_routes
from meshd.web.library import library_routes
from meshd.web.modules import module_routes
from meshd.web.native import build_native
from meshd.web.origins import origin_routes
from meshd.web.peers import PeerGate
from meshd.web.residence import residence_routes
from meshd.web.server import WebDeps
from meshd.web.sessions import SessionEndpoint
from meshd.web.viewdoors import ViewDoors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.cluster.carrying import MoverDoor
    from meshd.cluster.mesh import Mesh
    from meshd.config import NodeSettings
    from meshd.control.interface import ControlStore
    from meshd.kit.clock import Clock
    from meshd.runtime.data import DataServices
    from meshd.service.backed.service import BackedService
    from meshd.service.caching.fetching import Keeper
    from meshd.store.interface import ObjectStore
    from meshd.telemetry.audit import AuditLog
    from meshd.web.handing import Desk
    from meshd.web.server import NativeRoute


CARRIER = "m"
"""The writer of the process that moves data. It answers nobody by a map."""


@dataclass(frozen=True, slots=True)
class Node:
    """What every process of a node has open."""

    settings: NodeSettings
    clock: Clock
    store: Store
    control: ControlStore
    buckets: BucketTable
    identities: IdentityTable
    use: KeyUse
    uses: UseFile
    """Of results of views, and of documents."""
    removals: RemovalTable
    archives: Archives
    mesh: Mesh
    peers: Peers
    objects: RemoteObjects
    shared: ObjectStore
    """What services write to: `store`, and in a mesh every other node that must have it."""
    shelf: Shelf | None = None
    """What is cached of buckets with origins."""
    mover: MoverDoor | None = None
    """The way to the process that moves data; None where there is none, or this is it."""


def _open_shelf(
    settings: NodeSettings, writer: str, buckets: BucketTable, store: Store, mesh: Mesh, stack: ExitStack
) -> Shelf:
    """The cache beside the store."""
    clock = SystemClock()
    cache = Store.open(settings.cache_store, writer=writer, clock=clock)
    stack.callback(cache.close)
    fresh = FreshTable(settings.fresh_path, clock)
    stack.callback(fresh.close)
    shelf = Shelf(cache, buckets, fresh, mesh)
    store.attach(cache, shelf)
    return shelf


@contextmanager
def open_node(settings: NodeSettings, writer: str, mover: MoverDoor | None = None) -> Iterator[Node]:
    """Open the store as `writer` and the control state; close both at the end. Raises MeshdError."""
    clock = SystemClock()
    with ExitStack() as stack:
        control = open_control(settings, clock)
        stack.callback(control.close)
        store = Store.open(settings.store, writer=writer, clock=clock)
        stack.callback(store.close)
        uses = UseFile(settings.uses_path, clock)
        stack.callback(uses.close)
        MODULES.read_from(partial(load_asset, Catalog(store)))
        buckets, identities = BucketTable(control), IdentityTable(control)
        process = int(writer[1:]) + 1 if writer.startswith("w") else None if writer == CARRIER else 0
        mesh = open_mesh(settings, control, buckets, clock, process)
        shelf = _open_shelf(settings, writer, buckets, store, mesh, stack)
        use = KeyUse(control)
        peers = Peers(
            settings.node_id,
            NodeSecret(control).derive,
            clock,
            lambda: mesh.map().version,
            ca=settings.cluster.peer_ca,
        )
        objects = RemoteObjects(store, mesh, peers, buckets)
        archives = Archives(store, uses.note, objects, settings.view_cache_bytes, settings.archive_ratio)
        yield Node(
            settings,
            clock,
            store,
            control,
            buckets,
            identities,
            use,
            uses,
            RemovalTable(control),
            archives,
            mesh,
            peers,
            objects,
            replicated(store, mesh, peers, clock),
            shelf,
            mover,
        )


def node_shelf(node: Node) -> Shelf:
    """The node's cache, of a node that has one."""
    if node.shelf is None:
        raise ValueError("this node was opened without a cache")
    return node.shelf


def node_access(node: Node) -> Access:
    """Who may do what."""
    return Access(node.buckets, node.clock, finder(node.store))


def view_reader(node: Node, access: Access, data: DataServices) -> ViewReader:
    """Views of every kind, read."""
    return ViewReader(node.store, ViewDefinitions(node.buckets, node.clock, access), view_kinds(node, data))


def meshing(node: Node, backed: BackedService | None = None) -> Meshing:
    """What answers for the whole mesh, for `web_deps` and for other nodes."""
    versions = Versions(node.store, node.buckets)
    definitions = ViewDefinitions(node.buckets, node.clock, node_access(node))
    members = MemberService(
        node.store, versions, node.archives, lambda bucket: definitions.find(bucket) is not None
    )
    return Meshing(node, versions, members, backed)


def web_deps(
    node: Node,
    access: Access,
    data: DataServices,
    audit: AuditLog | None = None,
    backed: BackedService | None = None,
) -> WebDeps:
    """The services of the S3 endpoint."""
    versions = Versions(node.shared, node.buckets)
    objects = ObjectService(node.shared, versions, Ingest(node.store).note, backed)
    acls = AclService(node.buckets, node.identities)
    views = view_reader(node, access, data)
    secret, mesh = NodeSecret(node.control), meshing(node, backed)
    return WebDeps(
        access=access,
        sessions=Sessions(node.identities, secret, node.use, node.clock),
        buckets=mesh.buckets,
        objects=objects,
        uploads=UploadService(node.shared, objects, versions, acls.owner),
        listings=ListingService(node.store, node.identities, node.buckets, mesh.merged),
        versions=versions,
        deleter=Deleter(node.shared, versions, backed),
        tagging=TaggingService(node.shared, versions),
        settings=SettingService(node.buckets, acls),
        acls=acls,
        views=views,
        members=MemberService(node.shared, versions, node.archives, views.is_view),
        object_acls=ObjectAclService(node.shared, node.buckets, versions, acls),
        clock=node.clock,
        mesh=node.mesh,
        still=node.control.still,
        audit=audit,
        http=node.settings.http,
        backed=backed,
        near=NearReader(node.objects, versions),
        rest=node.objects.rest,
        gate=PeerGate(secret.derive, node.clock),
        forwarder=mesh.forwarder,
        scatterer=mesh.scatterer,
        far=mesh.far,
        news=mesh.news,
    )


def admin_routes(node: Node, sessions: Sessions) -> list[NativeRoute]:
    """The admin API, temporary credentials, whoami."""
    identities = IdentityAdmin(node.identities, node.use, node.buckets, node.clock)
    revoking = Revoking(node.identities, node.clock)
    own = node.settings
    loudness = Loudness(own.node_id, own.log_level, verbosity.shared, node.clock, tell_supervisor)
    policies = PolicyAdmin(node.identities, node.clock)
    admin = AdminEndpoint(identities, policies, revoking, loudness, node.clock)
    maps, census = ClusterMaps(node.control), node_census(node)
    cluster = ClusterAdmin(node.mesh, maps, node.control, node.buckets, node.peers, census, node.clock)
    return [
        *admin.routes(),
        *SessionEndpoint(sessions, node.clock).routes(),
        *ClusterEndpoint(node.mesh, cluster, node.clock).routes(),
    ]


def node_census(node: Node) -> Census:
    """What documents there are, here and on the other nodes."""
    return Census(node.store, node.uses, node.objects.kept)


def _backed_admin(node: Node) -> BackedAdmin:
    origins = Origins(node.settings.origin_credentials, node.clock)
    return BackedAdmin(node.buckets, origins, node.clock, node.settings.region)


def naming(node: Node) -> Iterator[tuple[str, str]]:
    """What names plans, snapshots and assets: views, jobs, pushed modules; each with its text."""
    yield from ((f"view {bucket.name}", bucket.view) for bucket in node.buckets.list_all() if bucket.view)
    yield from ((f"job {name}", job.spec) for name, job in JobTable(node.control).list_all().items())
    for name, module in ModuleTable(node.control).list_all().items():
        yield from ((f"module {name}", build.version) for build in module.builds)


def _copy_counts(node: Node) -> CopyCounts:
    maps, settings = ClusterMaps(node.control), node.settings
    return CopyCounts(node.buckets, node.mesh, maps, node.clock, settings.region)


def _kept_documents(node: Node, access: Access, data: DataServices) -> KeptDocuments:
    return KeptDocuments(
        node.store,
        data.catalog,
        node_census(node),
        node.removals,
        access,
        partial(naming, node),
        node.clock,
        node.settings.keep_documents_days,
        data.datasets.births.recorded,
    )


def native_routes(
    node: Node,
    access: Access,
    data: DataServices,
    keeper: Keeper | None = None,
    desk: Desk | None = None,
) -> list[NativeRoute]:
    """The native protocol. `keeper`: of the cache, a daemon's; `desk`: of a worker that hands frames over."""
    gathers = GatherService(node.store, node.archives, data.readers, node.objects)
    definitions = ViewDefinitions(node.buckets, node.clock, access, view_makers(data))
    tests = OpTests(data.user_ops, data.assets, node.objects, data.readers, data.frames, node.clock)
    also = [
        job_routes(job_desk(node, access)),
        library_routes(data.user_ops, node.clock),
        module_routes(data.user_ops, tests),
        origin_routes(_backed_admin(node), _copy_counts(node)),
        kept_routes(_kept_documents(node, access, data)),
    ]
    if node.shelf is not None and keeper is not None:  # tests may have none
        room = node.settings.cache_bytes
        residence = Residence(node.store, node.shelf, node.buckets, node.mesh, keeper, room)
        also.append(residence_routes(residence))
    holdings = Holdings(
        node.store,
        node.mesh,
        node.archives,
        data.catalog,
        data.datasets.lines,
        data.datasets.tfrecords,
        data.datasets.parquets,
        node.objects,
        node_census(node),
        LateProofs(node.clock),
    )
    return [
        *build_native(data.datasets, data.batches, gathers, definitions, node.clock, also, node.mesh, desk),
        *holding_routes(holdings, data.frames, node.clock),
        *output_routes(node),
        *ViewDoors(ViewMaker(node.store, data.frames, node.objects), node.mesh, node.clock).routes(),
    ]
