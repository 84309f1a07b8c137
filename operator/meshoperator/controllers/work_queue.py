"""Work queue: one pass at a time for each object, after an event and again after a while.

Law: a pass reads the object when it runs; an event only says "look". A failed pass is repeated with
growing delay. Nothing runs while another operator leads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from meshoperator import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

_log = logging.getLogger(__name__)
_LONGEST: Final = 30.0


class ObjectKey(NamedTuple):
    """An object."""

    kind: str
    namespace: str
    name: str


Pass = "Callable[[str, str], Awaitable[float | None]]"
"""Of (namespace, name): seconds until the next look, None when the object is gone."""


@dataclass(slots=True)
class _QueueEntry:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    failures: int = 0


class WorkQueue:
    """`passes` by kind. `leads` is set while this operator is the one that acts. `pause`: seconds in which
    events are gathered, so that a flood of them is one pass."""

    def __init__(
        self,
        passes: Mapping[str, Callable[[str, str], Awaitable[float | None]]],
        leads: asyncio.Event,
        pause: float = 0.2,
    ) -> None:
        self._passes, self._leads, self._pause = passes, leads, pause
        self._attended: dict[ObjectKey, _QueueEntry] = {}

    def __repr__(self) -> str:
        return f"<Loops over {len(self._attended)} objects{'' if self._leads.is_set() else ', not leading'}>"

    def enqueue(self, kind: str, namespace: str, name: str) -> None:
        """Something happened to an object, or to what belongs to it."""
        key = ObjectKey(kind, namespace, name)
        attended = self._attended.get(key)
        if attended is None:
            attended = self._attended[key] = _QueueEntry()
            attended.task = asyncio.ensure_future(self._attend(key, attended))
        attended.wake.set()

    def enqueue_all(self, kind: str) -> None:
        """Something happened that may concern every object of a kind."""
        for key in list(self._attended):
            if key.kind == kind:
                self.enqueue(*key)

    async def close(self) -> None:
        """End all passes; one that is under way is cut off, and another operator goes on."""
        tasks = [each.task for each in self._attended.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._attended.clear()

    async def _attend(self, key: ObjectKey, attended: _QueueEntry) -> None:
        rest: float | None = 0.0
        while rest is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest or None):
                    await attended.wake.wait()
            await asyncio.sleep(self._pause)
            await self._leads.wait()
            attended.wake.clear()
            rest = await self._once(key, attended)
        del self._attended[key]
        if attended.wake.is_set():  # it was made anew meanwhile
            self.enqueue(*key)

    async def _once(self, key: ObjectKey, attended: _QueueEntry) -> float | None:
        with metrics.pass_seconds.labels(key.kind).time():
            try:
                rest = await self._passes[key.kind](key.namespace, key.name)
            except Exception as error:
                attended.failures += 1
                rest = min(_LONGEST, 0.5 * 2**attended.failures)
                metrics.passes.labels(key.kind, "failed").inc()
                _log.warning(
                    "%s %s/%s: %s: %s; again in %.0f s", *key, type(error).__name__, str(error)[:500], rest
                )
                await asyncio.sleep(rest)  # events do not make it faster
                return 0.001
        attended.failures = 0
        metrics.passes.labels(key.kind, "done").inc()
        return rest
