"""Long work that a request waits for only so long: it goes on, and who asks again finds it further, or done.

Law: at most one run per key in this process; it is not cancelled by a caller who leaves. A result is kept for
those who come back, the last few of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from meshd.kit.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

V = TypeVar("V")
_KEPT = 64


class StillRunningError(Exception):
    """Not done within the patience; `progress` is of 0…1."""

    def __init__(self, progress: float) -> None:
        super().__init__(f"{progress:.0%} done")
        self.progress = progress


@dataclass(slots=True)
class Progress:
    """Told by the work as it goes."""

    done: float = 0.0


@dataclass(slots=True)
class _Run(Generic[V]):
    outcome: asyncio.Future[V]
    progress: Progress = field(default_factory=Progress)


class LongWork(Generic[V]):
    """Use on one event loop only."""

    def __init__(self, owner: str, patience: float = 5.0, limit: int = 4) -> None:
        self._patience = patience
        self._room = asyncio.Semaphore(limit)
        self._tasks = Tasks(owner)
        self._runs: OrderedDict[str, _Run[V]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<LongWork, {len(self._tasks)} running>"

    async def run(self, key: str, work: Callable[[Progress], Awaitable[V]]) -> V:
        """The outcome of `work` under `key`. Raises what it raised, and StillRunningError."""
        run = self._runs.get(key)
        if run is None:
            run = self._start(key, work)
        await asyncio.wait([run.outcome], timeout=self._patience)
        if not run.outcome.done():
            raise StillRunningError(run.progress.done)
        if run.outcome.exception() is not None:
            self._runs.pop(key, None)  # whoever asks again tries again
        return run.outcome.result()

    def forget(self, key: str) -> None:
        """Do it anew the next time, if it is done."""
        run = self._runs.get(key)
        if run is not None and run.outcome.done():
            del self._runs[key]

    def _start(self, key: str, work: Callable[[Progress], Awaitable[V]]) -> _Run[V]:
        run: _Run[V] = _Run(asyncio.get_running_loop().create_future())
        self._runs[key] = run
        for old in [name for name, other in self._runs.items() if other.outcome.done()][:-_KEPT]:
            del self._runs[old]
        self._tasks.spawn(self._work(run, work), key[:60])
        return run

    async def _work(self, run: _Run[V], work: Callable[[Progress], Awaitable[V]]) -> None:
        try:
            async with self._room:
                result = await work(run.progress)
        except Exception as error:  # told to whoever asks, then or later
            run.outcome.set_exception(error)
            run.outcome.exception()
        except BaseException:
            run.outcome.cancel()
            raise
        else:
            run.outcome.set_result(result)
