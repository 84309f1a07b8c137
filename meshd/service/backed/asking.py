"""Whether what is cached of an origin is still so: asked there, and waited for only so long.

Law: what is not cached is waited for. Of what is, a reader waits `patience` seconds once while its origin is
silent; from then on nobody does, and the question goes on behind, one at a time, until the origin has said
anything at all. One a process and bucket.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.kit.tasks import Tasks
from meshd.origin.errors import OriginDownError, OriginError
from meshd.service.caching.shelf import shelf_name
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.origin.interface import Facts
    from meshd.service.backed.sharing import Crew

_Task = asyncio.Task["Facts | OriginError"]


class Questions:
    """One a process. `patience` in seconds."""

    def __init__(self, crew: Crew, patience: float) -> None:
        self._crew, self._patience = crew, patience
        self._silent: dict[str, _Task] = {}  # buckets whose origin said nothing in time, and who asks it
        self._tasks = Tasks("asking")

    def __repr__(self) -> str:
        return f"<Questions, {len(self._silent)} origins silent>"

    async def answered(self, bucket: Bucket, key: str, held: Facts | None) -> Facts:
        """What the origin has; `held`, what is cached, while it is down or silent. Raises OriginError."""
        if held is None:
            return await self._crew.of(bucket.name, key).check(bucket, key)
        name = shelf_name(bucket)
        behind = self._silent.get(name)
        if behind is not None:
            if behind.done():
                self._silent[name] = self._asked(bucket, key)
            return _unanswered(held)
        asked = self._asked(bucket, key)
        await asyncio.wait((asked,), timeout=self._patience)
        if not asked.done():
            self._silent[name] = asked
            return _unanswered(held)
        found = asked.result()
        if isinstance(found, OriginDownError):
            return held
        if isinstance(found, OriginError):
            raise found
        return found

    def _asked(self, bucket: Bucket, key: str) -> _Task:
        return self._tasks.spawn(self._ask(bucket, key), "question")

    async def _ask(self, bucket: Bucket, key: str) -> Facts | OriginError:
        try:
            found: Facts | OriginError = await self._crew.of(bucket.name, key).check(bucket, key)
        except OriginError as error:
            found = error
        if not isinstance(found, OriginDownError):
            self._silent.pop(shelf_name(bucket), None)
        return found

    async def aclose(self) -> None:
        await self._tasks.aclose()


def _unanswered(held: Facts) -> Facts:
    metrics.origin_unanswered.inc()
    return held
