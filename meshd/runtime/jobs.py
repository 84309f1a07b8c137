"""Jobs, put together: the desk of a worker, the runner of the steward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.catalog import Catalog
from meshd.control.jobs import JobTable
from meshd.service.archives.ingesting import Ingest
from meshd.service.backed.prefetching import Prefetching
from meshd.service.jobs.desk import JobDesk
from meshd.service.jobs.extracting import Extracting
from meshd.service.jobs.inventories import Inventories
from meshd.service.jobs.kinds import Tools
from meshd.service.jobs.materializing import Materializing
from meshd.service.jobs.plans import PlanShelf
from meshd.service.jobs.running import JobRunner
from meshd.service.jobs.sharding import Sharding
from meshd.service.versions import Versions

if TYPE_CHECKING:
    from meshd.runtime.node import Node
    from meshd.service.access import Access
    from meshd.service.backed.service import BackedService
    from meshd.service.jobs.kinds import JobKind
    from meshd.service.views.dispatch import ViewReader


def job_desk(node: Node, access: Access) -> JobDesk:
    """What a worker needs."""
    table = JobTable(node.control)
    return JobDesk(table, node.control, node.buckets, access, node.clock, lambda: node.mesh.alone)


def job_runner(node: Node, access: Access, views: ViewReader, backed: BackedService) -> JobRunner:
    """What the steward needs."""
    catalog = Catalog(node.store, node.objects, node.uses)
    tools = Tools(node.shared, Versions(node.shared, node.buckets), access, Ingest(node.store).note)
    inventories = Inventories(node.store, catalog, node.archives)
    shelf = PlanShelf(node.store, catalog)
    sharding = Sharding(tools, inventories, shelf)
    kinds: dict[str, JobKind] = {
        "shard": sharding,
        "reshard": sharding,
        "extract": Extracting(tools, inventories, shelf),
        "materialize": Materializing(tools, views),
        "prefetch": Prefetching(access, backed, catalog, node.buckets),
    }
    return JobRunner(JobTable(node.control), node.control, node.identities, kinds, shelf, node.clock)
