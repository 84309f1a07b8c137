"""Outputs of earlier runs that this one does not have: removed, so that no sample stands twice.

Law: only what this very job made is removed, by what its metadata say; under the rights of the job's maker.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.service.jobs.principals import Grant
from meshd.service.jobs.writing import JOB

if TYPE_CHECKING:
    from collections.abc import Container

    from meshd.service.access import Access
    from meshd.service.jobs.kinds import Running
    from meshd.service.versions import Versions
    from meshd.store.interface import ObjectStore

_PAGE: Final = 1000


class Tidier:
    """Holds no state."""

    def __init__(self, store: ObjectStore, versions: Versions, access: Access) -> None:
        self._store, self._versions, self._access = store, versions, access

    async def remove_stale(self, running: Running, present: Container[str]) -> None:
        """Remove what earlier runs wrote under the target and is not `present`. Raises BatchError
        AccessDenied."""
        target = running.spec.target
        grant = Grant.of(self._access, running.caller, "s3:DeleteObject", target.bucket)
        setting = self._versions.setting(target.bucket)
        after, more = "", running.run > 1
        while more:
            page = await asyncio.to_thread(
                self._store.list, target.bucket, prefix=target.prefix, after=after, limit=_PAGE
            )
            stale = [
                key
                for key, record in page.entries
                if record.metadata.get(JOB) == running.job_id and key not in present
            ]
            for key in stale:
                grant.require(key)
            await self._store.delete_many(target.bucket, stale, versioning=setting)
            running.tally.removed += len(stale)
            after, more = page.next_after, page.truncated
