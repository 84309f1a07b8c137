"""Asyncio building blocks: background tasks, single flight, long-running calls, and cooperative yielding.

Law: every background task belongs to a group that logs its failure and cancels it on close.
`SingleFlight` runs one computation per key as a task of its own: a cancelled caller does not cancel it
for the others; it is cancelled when its last caller leaves. `GroupFlights` does so for computations that
have the results of several keys. `LongRunningCalls` runs at most one call per
key; a caller that stops waiting does not cancel it, and the last few results are kept for callers that
come back. `finish_before_cancel` lets what cannot be taken back end before its caller does;
`cancel_and_discard` ends work that was begun ahead and is not needed.
`CooperativeYield` yields by elapsed time, not by count, because users control what one item
costs. Loops that wait for the next tick wake their process together. `poll_in_thread` asks a condition
that may block without waking the event loop until it is true.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence


_log = logging.getLogger("meshd.tasks")
_TICK_MS: Final = 250


async def sleep_to_tick(seconds: float) -> None:
    """Sleeps `seconds`, up to a tick (0.25 s) less or half a tick more: to a time at which other loops of
    this process wake up, too. Every process has ticks of its own, so that those of a machine do not wake up
    at once."""
    now = round(asyncio.get_running_loop().time() * 1000)
    await asyncio.sleep(tick_delay(now, seconds, 37 * os.getpid()))


def tick_delay(now: int, seconds: float, phase: int) -> float:
    """Returns the seconds from `now` to a tick, a time that is `phase` modulo 250 (both in ms). A sleep is
    shortened by half at most, and one of less than a tick is not prolonged."""
    wait = round(seconds * 1000)
    early = (now + wait - phase) % _TICK_MS
    if 2 * early <= wait:
        return (wait - early) / 1000
    return (wait + _TICK_MS - early) / 1000 if wait >= _TICK_MS else seconds


async def poll_in_thread(condition: Callable[[], bool], seconds: float) -> None:
    """Waits until `condition()` is true, which a thread of its own asks every so many seconds; it may block.

    The event loop sleeps meanwhile. A call of `asyncio.to_thread` instead wakes it, and two threads contend
    for the interpreter: a dozen wake-ups for one question. Raises what `condition` raises.
    """
    loop, left = asyncio.get_running_loop(), threading.Event()
    outcome: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def poll() -> None:
        error = None
        try:
            while not condition():
                if left.wait(seconds):
                    return
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=poll, name="poll", daemon=True).start()
    try:
        await outcome
    finally:
        left.set()


class BackgroundTasks:
    """The running background tasks of one owner. Use it on one event loop only."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundTasks of {self._owner}: {sorted(task.get_name() for task in self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs `work` in the background. An exception is logged with the task's name."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", extra={"task": task.get_name()}, exc_info=error)

    async def aclose(self) -> None:
        """Cancels the running tasks and waits until they have ended."""
        remaining = list(self._tasks)
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)


K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class _Flight(msgspec.Struct, Generic[V]):
    task: asyncio.Future[V]
    callers: int = 0


class SingleFlight(Generic[K, V]):
    """Shares running computations by key; keeps no result after they finish."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __repr__(self) -> str:
        return f"<SingleFlight {len(self._flights)} in flight>"

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: K) -> bool:
        return key in self._flights

    async def run(self, key: K, compute: Callable[[], Awaitable[V]]) -> tuple[V, bool]:
        """Returns (result, joined): the result of `compute()`, or of the computation already in progress
        (joined is True).

        Every caller gets the same result object or the same exception.
        """
        flight = self._flights.get(key)
        joined = flight is not None and not flight.task.done()
        if flight is None or not joined:  # a finished one may still await its callback
            flight = self._start(key, compute)
        flight.callers += 1
        try:
            return await asyncio.shield(flight.task), joined
        finally:
            flight.callers -= 1
            if not flight.callers and not flight.task.done():
                self._forget(key, flight)  # a new caller must not join a cancelled computation
                flight.task.cancel()

    def _start(self, key: K, compute: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.ensure_future(compute()))
        self._flights[key] = flight
        flight.task.add_done_callback(lambda task: self._on_done(key, flight, task))
        return flight

    def _on_done(self, key: K, flight: _Flight[V], task: asyncio.Future[V]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            task.exception()  # marks it as retrieved even if every caller has left

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class GroupFlights(Generic[K, V]):
    """Shares running computations that have the results of several keys each, or None instead of them."""

    def __init__(self) -> None:
        self._flights: SingleFlight[tuple[K, int], Sequence[V] | None] = SingleFlight()
        self._running: dict[K, tuple[asyncio.Future[Sequence[V] | None], int]] = {}

    def __repr__(self) -> str:
        return f"<GroupFlights of {len(self._running)} keys>"

    def __contains__(self, key: object) -> bool:
        return key in self._running

    def is_running(self, keys: Sequence[K]) -> bool:
        """Returns whether there is a computation of exactly these consecutive keys."""
        return (keys[0], len(keys)) in self._flights

    async def run(
        self, keys: Sequence[K], compute: Callable[[], Awaitable[Sequence[V] | None]]
    ) -> tuple[Sequence[V] | None, bool]:
        """As `SingleFlight.run`, for consecutive keys that are in no other computation."""
        return await self._flights.run((keys[0], len(keys)), lambda: self._start(keys, compute))

    async def result_of(self, key: K) -> V | None:
        """Waits for the running computation of a key, without keeping it running, and returns the result;
        None if it has none."""
        task, number = self._running[key]
        await asyncio.wait((task,))
        found = None if task.cancelled() or task.exception() is not None else task.result()
        return None if found is None else found[number]

    def _start(
        self, keys: Sequence[K], compute: Callable[[], Awaitable[Sequence[V] | None]]
    ) -> asyncio.Future[Sequence[V] | None]:
        task = asyncio.ensure_future(compute())
        self._running.update((key, (task, number)) for number, key in enumerate(keys))
        task.add_done_callback(lambda _: self._forget(keys, task))
        return task

    def _forget(self, keys: Sequence[K], task: asyncio.Future[Sequence[V] | None]) -> None:
        for key in keys:
            if key in self._running and self._running[key][0] is task:
                del self._running[key]


R = TypeVar("R")
_MAX_RESULTS = 64


async def finish_before_cancel(
    work: Awaitable[R], patience: float, has_begun: Callable[[], bool] = lambda: True
) -> R:
    """Awaits `work`. If the caller is cancelled once it `has_begun`, the cancellation is raised when `work`
    has ended, `patience` seconds later at most; work that has not begun is cancelled, too.

    A second cancellation ends the wait at once. Work that is not waited for any longer goes on by itself.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_retrieve)
        if not task.done():
            if not has_begun():
                task.cancel()
            await asyncio.wait((task,), timeout=patience)
            if not task.done():
                _log.warning("work continues after its caller has ended", extra={"seconds": patience})
        raise


async def cancel_and_discard(task: asyncio.Task[R] | None, discard: Callable[[R], object]) -> None:
    """Cancels a task that has begun ahead; passes its result to `discard`, if it has one."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody is left to be told."""
    if not task.cancelled():
        task.exception()


class StillRunningError(Exception):
    """The call did not finish in time; `progress` is between 0 and 1; `items`: how many of how many items are
    done, None if the call counts none."""

    def __init__(self, progress: float, items: tuple[int, int] | None = None) -> None:
        super().__init__(f"{progress:.0%} done" + (f" ({items[0]} of {items[1]})" if items else ""))
        self.progress, self.items = progress, items


class CallProgress(msgspec.Struct):
    """Progress of a long-running call, updated by the call."""

    done: float = 0.0
    items: tuple[int, int] | None = None

    def reached(self, done: int, of: int) -> None:
        """Note that so many of the items are done."""
        self.items, self.done = (done, of), done / max(1, of)

    def advance(self) -> None:
        """Note that one item more is done."""
        done, of = self.items or (0, 1)
        self.reached(done + 1, of)


class _RunningCall(msgspec.Struct, Generic[R]):
    outcome: asyncio.Future[R]
    progress: CallProgress = msgspec.field(default_factory=CallProgress)


class LongRunningCalls(Generic[R]):
    """Runs calls that may outlive their callers. Use it on one event loop only."""

    def __init__(self, owner: str, max_wait: float = 5.0, limit: int = 4) -> None:
        self._max_wait = max_wait
        self._slots = asyncio.Semaphore(limit)
        self._tasks = BackgroundTasks(owner)
        self._runs: OrderedDict[str, _RunningCall[R]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<LongRunningCalls, {len(self._tasks)} running>"

    async def run_or_wait(self, key: str, work: Callable[[CallProgress], Awaitable[R]]) -> R:
        """Returns the result of `work` under `key`. Raises what it raised; StillRunningError if it is not
        done in time."""
        run = self._runs.get(key)
        if run is None:
            run = self._start(key, work)
        await asyncio.wait([run.outcome], timeout=self._max_wait)
        if not run.outcome.done():
            raise StillRunningError(run.progress.done, run.progress.items)
        if run.outcome.exception() is not None:
            self._runs.pop(key, None)  # the next caller starts it again
        return run.outcome.result()

    def discard_result(self, key: str) -> None:
        """Discards a finished result, so that the next caller starts the work again."""
        run = self._runs.get(key)
        if run is not None and run.outcome.done():
            del self._runs[key]

    def _start(self, key: str, work: Callable[[CallProgress], Awaitable[R]]) -> _RunningCall[R]:
        run: _RunningCall[R] = _RunningCall(asyncio.get_running_loop().create_future())
        self._runs[key] = run
        for old in [name for name, other in self._runs.items() if other.outcome.done()][:-_MAX_RESULTS]:
            del self._runs[old]
        self._tasks.spawn(self._run_call(run, work), key[:60])
        return run

    async def _run_call(self, run: _RunningCall[R], work: Callable[[CallProgress], Awaitable[R]]) -> None:
        try:
            async with self._slots:
                result = await work(run.progress)
        except Exception as error:  # raised for each caller, now or later
            run.outcome.set_exception(error)
            run.outcome.exception()
        except BaseException:
            run.outcome.cancel()
            raise
        else:
            run.outcome.set_result(result)


_MAX_SLICE = 0.005


class CooperativeYield:
    """Yields to the event loop during one piece of work."""

    __slots__ = ("_ends", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + _MAX_SLICE

    def __repr__(self) -> str:
        return f"<CooperativeYield, {self._ends - self._loop.time():.3f} s left>"

    async def yield_if_due(self) -> None:
        """Yields to other tasks if this one has run for long enough."""
        if self._loop.time() >= self._ends:
            await asyncio.sleep(0)
            self._ends = self._loop.time() + _MAX_SLICE
