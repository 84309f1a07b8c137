"""PrefetchFanOut: distributes the names of a prefetch over the responsible nodes and collects outcomes.

A node has few requests in flight and gets the next one when it answers, so a slow node delays only itself.
Unanswered names of a failed node go to its successor. Each name has exactly one final outcome, reported
once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import busy
from meshd.errors import MeshdError
from meshd.origins.prefetch_worker import PREFETCH, OutcomeDecoder, PrefetchRequest
from meshd.rpc.peer_client import PeerUnreachableError
from meshd.rpc.peer_rpc import BodyFramingError
from meshd.util.byte_rate import RateLimiter
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.prefetch_worker import PrefetchAction, PrefetchItem, PrefetchOutcome, PrefetchWorker
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node

    Report = Callable[[int, PrefetchOutcome], None]

_FETCHED: Final = 64  # names per request
_LOOKED: Final = 500  # names per request that fetches nothing
_QUESTIONS: Final = 2  # concurrent requests per node
_TRIES: Final = 8  # requests in a row without an outcome
_MOMENT: Final = 0.25  # seconds' worth of bytes per request, if the rate is limited
_PATIENCE: Final = 2.0  # seconds to wait for a newer map


class PrefetchFanOut:
    """Distributes prefetches. One instance per process. `own` handles the names of this node."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, own: PrefetchWorker) -> None:
        self._mesh, self._peers, self._own = mesh, peers, own

    def __repr__(self) -> str:
        return f"<PrefetchFanOut from {self._mesh.node_id}>"

    def homes(self, bucket: Bucket) -> Sequence[str]:
        """Return the nodes that each get a copy; ("",) if each name has its one node."""
        named = () if bucket.origin is None or self._mesh.single_node else bucket.origin.homes
        nodes = [self._mesh.current_map().node(name) for name in named]
        return [node.node_id for node in nodes if node is not None and node.state in COMPLETE_STATES] or [""]

    async def fan_out(
        self,
        bucket: Bucket,
        work: PrefetchAction,
        wanted: Sequence[PrefetchItem],
        report: Report,
        toward: str = "",
        budget: RateLimiter | None = None,
    ) -> None:
        """Prefetch names; `report` gets the outcomes of each, by its number in `wanted`. `toward`: the node
        to use, while it serves the names. `budget`: the rate limit of all nodes together. Raises BatchError
        Busy if no node serves some of the names."""
        deal = _FanOutRun(self, bucket, work, wanted, report, toward, budget or RateLimiter(lambda: 0.0))
        try:
            await deal.run()
        finally:
            await deal.aclose()

    def node_for(self, bucket: str, key: str, toward: str = "") -> Node | None:
        """Return a node that serves the name now; `toward` if it is one of them."""
        if self._mesh.single_node:
            return self._mesh.own_node or self._mesh.current_map().nodes[0]
        readers = self._mesh.route_for(bucket, key).read_set
        return next((node for node in readers if node.node_id == toward), next(iter(readers), None))

    async def outcomes(self, node: Node, ask: PrefetchRequest) -> AsyncGenerator[list[PrefetchOutcome], None]:
        """Yield the outcomes of a node. Raises MeshdError if the node ends before the last one."""
        if node.node_id == self._mesh.node_id:
            async with aclosing(self._own.run_request(ask)) as said:
                async for outcomes in said:
                    yield outcomes
            return
        found = OutcomeDecoder()
        async with self._peers.open_typed(node, PREFETCH, ask) as answer:
            async for piece in answer.iter_body():
                yield list(found.feed_bytes(piece))

    async def report_unreachable(self, node: Node, error: Exception, version: int) -> None:
        """Report a node that failed as suspect, and wait for a newer map."""
        if isinstance(error, PeerUnreachableError):
            await self._mesh.report_suspect(node.node_id, version)
        await self.wait_for_new_map(version)

    async def wait_for_new_map(self, version: int) -> None:
        """Wait briefly for a map newer than `version`."""
        if self._mesh.standalone:
            await asyncio.sleep(_PATIENCE)
        else:
            await self._mesh.wait_for_newer_map(version, _PATIENCE)

    @property
    def version(self) -> int:
        """Return the version of this process's cluster map."""
        return self._mesh.current_map().version


class _FanOutRun:
    def __init__(
        self,
        spreading: PrefetchFanOut,
        bucket: Bucket,
        work: PrefetchAction,
        wanted: Sequence[PrefetchItem],
        report: Report,
        toward: str,
        budget: RateLimiter,
    ) -> None:
        self._budget = budget
        self._fan_out, self._bucket, self._work = spreading, bucket, work
        self._wanted, self._report, self._toward = wanted, report, toward
        self._most = _FETCHED if work == "fetch" else _LOOKED
        self._queues: dict[str, deque[int]] = {}
        self._nodes: dict[str, Node] = {}
        self._asked: Counter[str] = Counter()
        self._tasks: dict[asyncio.Task[list[int]], str] = {}
        self._silent, self._why = 0, "no node serves it now"

    @property
    def _which(self) -> tuple[str, int, PrefetchAction]:
        return self._bucket.name, self._bucket.created_ms, self._work

    async def run(self) -> None:
        self._assign(range(len(self._wanted)))
        self._begin()
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = self._tasks.pop(task)
                self._asked[name] -= 1
                left = task.result()
                if left:
                    self._assign([*left, *self._queues.pop(name, ())])
            if self._silent > _TRIES:
                raise busy(f"{self._bucket.name} cannot be prefetched now: {self._why}")
            self._begin()

    def _assign(self, numbers: Iterable[int]) -> None:
        """Assign names to nodes by the current map; names that no node serves wait for a newer map."""
        nobody = []
        for number in numbers:
            node = self._fan_out.node_for(self._bucket.name, self._wanted[number].key, self._toward)
            if node is None:
                nobody.append(number)
                continue
            self._nodes[node.node_id] = node
            self._queues.setdefault(node.node_id, deque()).append(number)
        if nobody:
            self._tasks[asyncio.ensure_future(self._wait(nobody, self._fan_out.version))] = ""

    def _begin(self) -> None:
        for name, queue in self._queues.items():
            while queue and self._asked[name] < _QUESTIONS:
                numbers = self._next(queue)
                task = asyncio.ensure_future(self._ask(self._nodes[name], numbers))
                self._tasks[task] = name
                self._asked[name] += 1

    def _next(self, queue: deque[int]) -> list[int]:
        """Return the names of the next request: with a rate limit, at most a moment's bytes, or one name."""
        room = self._budget.rate() * _MOMENT or float("inf")
        numbers: list[int] = []
        while queue and len(numbers) < self._most and (room > 0 or not numbers):
            room -= max(0, self._wanted[queue[0]].size)
            numbers.append(queue.popleft())
        return numbers

    async def _wait(self, numbers: list[int], version: int) -> list[int]:
        self._silent += 1
        await self._fan_out.wait_for_new_map(version)
        return numbers

    async def _ask(self, node: Node, numbers: list[int]) -> list[int]:
        """Send one request; return the numbers that must be assigned again."""
        wanted = [self._wanted[number] for number in numbers]
        if self._work != "fetch":
            return await self._collect(node, numbers, PrefetchRequest(*self._which, wanted), Counter())
        size, prefetched = sum(max(0, each.size) for each in wanted), Counter[str]()
        await self._budget.acquire_bytes(size)
        try:
            ask = PrefetchRequest(*self._which, wanted, int(self._budget.rate()))
            return await self._collect(node, numbers, ask, prefetched)
        finally:
            self._budget.refund_bytes(max(0, size - prefetched["bytes"]))

    async def _collect(
        self, node: Node, numbers: list[int], ask: PrefetchRequest, prefetched: Counter[str]
    ) -> list[int]:
        left, version = dict(enumerate(numbers)), self._fan_out.version
        try:
            async with aclosing(self._fan_out.outcomes(node, ask)) as said:
                async for outcomes in said:
                    for number, outcome in self._new(outcomes, left):
                        prefetched["bytes"] += outcome.size if outcome.verdict == "moved" else 0
                        self._report(number, outcome)
        except (MeshdError, BodyFramingError, msgspec.MsgspecError) as error:
            self._why = f"{node.node_id}: {error}"
            self._silent += 1
            await self._fan_out.report_unreachable(node, error, version)
            return list(left.values())
        if left:
            self._silent += 1
            await self._fan_out.wait_for_new_map(version)
        return list(left.values())

    def _new(
        self, outcomes: list[PrefetchOutcome], left: dict[int, int]
    ) -> Iterator[tuple[int, PrefetchOutcome]]:
        """Yield what to report; names with a final outcome are removed from `left`."""
        for outcome in outcomes:
            number = left.get(outcome.number)
            if number is None or outcome.verdict == "elsewhere":
                continue
            self._silent = 0
            if outcome.last:
                del left[outcome.number]
            yield number, outcome

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
