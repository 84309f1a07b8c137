"""Outputs of earlier runs that this one does not have: removed, so that no sample stands twice.

Law: only what this very job made is removed, by what its metadata say; under the rights of the job's maker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.service.jobs.principals import Grant
from meshd.service.jobs.writing import JOB

if TYPE_CHECKING:
    from collections.abc import Container

    from meshd.service.jobs.kinds import Running, Tools

_PAGE: Final = 1000


async def remove_stale(tools: Tools, running: Running, present: Container[str]) -> None:
    """Remove what earlier runs wrote under the target and is not `present`. Raises BatchError
    AccessDenied."""
    target = running.spec.target
    grant = Grant.of(tools.access, running.caller, "s3:DeleteObject", target.bucket)
    after, more = "", True
    while more:
        page = await tools.outputs.page(target.bucket, target.prefix, after, _PAGE)
        stale = [
            key
            for key, record in page.entries
            if record.metadata.get(JOB) == running.job_id and key not in present
        ]
        for key in stale:
            grant.require(key)
        if stale:
            await tools.outputs.remove(target.bucket, stale)
        running.tally.removed += len(stale)
        after, more = page.next_after, page.truncated
