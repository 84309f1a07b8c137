"""Jobs, put together: the desk of a worker, the runner of the steward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.control.jobs import JobTable
from meshd.runtime.data import node_catalog
from meshd.service.archives.ingesting import Ingest
from meshd.service.backed.prefetching import Prefetching
from meshd.service.backed.spreading import Spreading
from meshd.service.backed.warming import Warmer
from meshd.service.datasets.births import SnapshotBirths
from meshd.service.jobs.archives.extracting import Extracting
from meshd.service.jobs.archives.sharding import Sharding
from meshd.service.jobs.desk import JobDesk
from meshd.service.jobs.inventories import Inventories
from meshd.service.jobs.kinds import Tools
from meshd.service.jobs.materializing import Materializing
from meshd.service.jobs.outputs import MeshOutputs, OwnOutputs
from meshd.service.jobs.plans import PlanShelf
from meshd.service.jobs.running import JobRunner
from meshd.service.semantics.versions import Versions
from meshd.web.outputs import OutputDoors

if TYPE_CHECKING:
    from meshd.runtime.node import Node
    from meshd.service.authorization.access import Access
    from meshd.service.backed.service import BackedService
    from meshd.service.jobs.kinds import JobKind
    from meshd.service.views.dispatch import ViewReader
    from meshd.web.server import NativeRoute


def job_desk(node: Node, access: Access) -> JobDesk:
    """What a worker needs."""
    return JobDesk(JobTable(node.control), node.control, node.buckets, access, node.clock, node.mesh)


def own_outputs(node: Node) -> OwnOutputs:
    """Writes what this node decides about."""
    return OwnOutputs(node.shared, Versions(node.shared, node.buckets), Ingest(node.store).note)


def output_routes(node: Node) -> list[NativeRoute]:
    """What the nodes that run jobs may ask for."""
    return OutputDoors(own_outputs(node), node.mesh, node.clock).routes()


def job_runner(node: Node, access: Access, views: ViewReader, backed: BackedService) -> JobRunner:
    """What the steward needs."""
    catalog = node_catalog(node)
    outputs = MeshOutputs(own_outputs(node), node.objects, node.mesh, node.peers)
    versions = Versions(node.shared, node.buckets)
    tools = Tools(node.store, node.objects, node.archives, versions, access, outputs)
    inventories = Inventories(node.store, catalog, node.archives, node.objects)
    shelf = PlanShelf(node.store, catalog)
    spreading = Spreading(node.mesh, node.peers, Warmer(backed, node.mesh))
    sharding = Sharding(tools, inventories, shelf)
    kinds: dict[str, JobKind] = {
        "shard": sharding,
        "reshard": sharding,
        "extract": Extracting(tools, inventories, shelf),
        "materialize": Materializing(tools, views),
        "prefetch": Prefetching(
            access,
            backed,
            catalog,
            node.buckets,
            node.objects,
            spreading,
            SnapshotBirths(node.buckets, catalog, node.objects),
        ),
    }
    return JobRunner(
        JobTable(node.control),
        node.control,
        node.identities,
        node.buckets,
        kinds,
        shelf,
        node.clock,
        node.mesh,
    )
