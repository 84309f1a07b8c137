"""Work queue: runs one pass at a time for each object, after an event and again after a while.

Law: a pass reads the object when it runs; an event only wakes it. A failed pass is retried with
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
    """Identifies an object in the queue."""

    kind: str
    namespace: str
    name: str


Pass = "Callable[[str, str], Awaitable[float | None]]"
"""A reconcile function of (namespace, name): returns the seconds until the next pass, or None if the object
is gone."""


@dataclass(slots=True)
class _QueueEntry:
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    failures: int = 0


class WorkQueue:
    """Runs `passes`, by kind, while `leads` is set. `pause`: seconds for which events are collected, so that
    a burst becomes one pass."""

    def __init__(
        self,
        passes: Mapping[str, Callable[[str, str], Awaitable[float | None]]],
        leads: asyncio.Event,
        pause: float = 0.2,
    ) -> None:
        self._passes, self._leads, self._pause = passes, leads, pause
        self._attended: dict[ObjectKey, _QueueEntry] = {}

    def __repr__(self) -> str:
        return (
            f"<WorkQueue of {len(self._attended)} objects{'' if self._leads.is_set() else ', not leading'}>"
        )

    def enqueue(self, kind: str, namespace: str, name: str) -> None:
        """Schedule a pass for an object, because it or one of its dependents changed."""
        key = ObjectKey(kind, namespace, name)
        attended = self._attended.get(key)
        if attended is None:
            attended = self._attended[key] = _QueueEntry()
            attended.task = asyncio.ensure_future(self._attend(key, attended))
        attended.wake.set()

    def enqueue_all(self, kind: str) -> None:
        """Schedule a pass for every known object of a kind."""
        for key in list(self._attended):
            if key.kind == kind:
                self.enqueue(*key)

    async def close(self) -> None:
        """Cancel all passes; the next leader continues an interrupted one."""
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
        if attended.wake.is_set():  # it was created again during the pass
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
                    "%s %s/%s failed: %s: %s; retrying in %.0f s",
                    *key,
                    type(error).__name__,
                    str(error)[:500],
                    rest,
                )
                await asyncio.sleep(rest)  # events must not shorten the delay
                return 0.001
        attended.failures = 0
        metrics.passes.labels(key.kind, "done").inc()
        return rest
