"""Plans kept: made once a run, durable before the first output is written.

Law: a run that was interrupted finds its plan again and no other: what the source has become meanwhile counts
for the next run only. What was kept for a run goes when it ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.kit import failpoints
from meshwire.columns import ColumnError
from meshwire.jobplans import JobPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from meshd.assembly.catalog import Catalog
    from meshd.service.jobs.kinds import Running
    from meshd.store.interface import ObjectStore

_PAGE = 1000


def scratch(running: Running) -> str:
    """What the names of all that is kept for a run begin with."""
    return f"jobs/{running.name}/"


class PlanShelf:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, catalog: Catalog) -> None:
        self._store, self._catalog = store, catalog

    def __repr__(self) -> str:
        return "<PlanShelf>"

    async def plan(self, running: Running, make: Callable[[], Awaitable[JobPlan]]) -> JobPlan:
        """The run's plan; made, and kept, if there is none yet."""
        name = f"{scratch(running)}plan"
        document = await asyncio.to_thread(self._catalog.read, name)
        if document is not None:
            try:
                return await asyncio.to_thread(JobPlan.from_bytes, document)
            except ColumnError:  # another release wrote it: made anew
                pass
        plan = await make()
        await self._catalog.write(name, await asyncio.to_thread(plan.to_bytes))
        failpoints.hit("jobs.planned")
        return plan

    async def clear(self, job_id: str) -> None:
        """Forget what was kept for all runs of a job."""
        while keys := list(self._kept(f"jobs/{job_id}-")):
            await self._store.delete_many(RESERVED_BUCKET, keys)

    def jobs(self) -> set[str]:
        """The jobs that something is kept for."""
        found, after = set[str](), ""
        while (key := next(self._kept("jobs/", after), "")) != "":
            job_id = key.removeprefix("jobs/").partition("-")[0]
            found.add(job_id)
            after = f"jobs/{job_id}-\U0010ffff"
        return found

    def _kept(self, prefix: str, after: str = "") -> Iterator[str]:
        """A page of names."""
        page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_PAGE)
        return iter([key for key, _ in page.entries])
