"""Jobs, put together: the desk of a worker, the runner of the steward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.catalog import Catalog
from meshd.control.jobs import JobTable
from meshd.service.access import Access
from meshd.service.facts import finder
from meshd.service.jobs.desk import JobDesk
from meshd.service.jobs.inventories import Inventories
from meshd.service.jobs.plans import PlanShelf
from meshd.service.jobs.running import JobRunner
from meshd.service.jobs.sharding import Sharding
from meshd.service.versions import Versions

if TYPE_CHECKING:
    from meshd.runtime.node import Node
    from meshd.service.jobs.kinds import JobKind


def job_desk(node: Node, access: Access) -> JobDesk:
    """What a worker needs."""
    return JobDesk(JobTable(node.control), node.control, node.buckets, access, node.clock)


def job_runner(node: Node) -> JobRunner:
    """What the steward needs."""
    catalog, versions = Catalog(node.store), Versions(node.store, node.buckets)
    access = Access(node.buckets, node.clock, finder(node.store))
    shelf = PlanShelf(node.store, catalog)
    sharding = Sharding(node.store, versions, access, Inventories(node.store, node.archives), shelf)
    kinds: dict[str, JobKind] = {"shard": sharding, "reshard": sharding}
    return JobRunner(JobTable(node.control), node.control, node.identities, kinds, node.clock)
