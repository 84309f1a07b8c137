"""Render queue: calls of the renderer, cut into slices of rows, which wait in a fair order.

Law: the account that used the least time is served next, then the job of that account that did; within
a job, first come, first served, and requests made at about the same time in epoch order. Unused time is
not saved up. Work of a restricted job goes only to workers that accept it. Background work is served only
while no other waits. Slices shrink so that all workers share the queue and finish together, but not below the
cost of a handover (guided self-scheduling, Polychronopoulos and Kuck, IEEE Transactions on Computers C-36,
1987). The result of a call is set once, when all its rows are done. Replies after a cancellation are dropped,
and every descriptor is closed once. Invariant: of two accounts with constant backlog, neither gains more than
the time of the work in progress.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from meshd.telemetry import tracing
from meshd.transform.messages import RenderRequest, Row
from meshd.transform.renderer import RenderResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from meshd.transform.decoded_cache.messages import KeptPlace
    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.decoded_cache.slice_order import SliceOrder
    from meshd.transform.messages import RenderReply, RowBlock
    from meshd.transform.renderer import RowWork
    from meshd.transform.source_files import AssetPlace, Piece

T = TypeVar("T")
EXPECTED = 0.05  # assumed seconds per slice until the first slices of a job are done
TOGETHER: Final = 0.25
"""Seconds within which requests count as simultaneous: a loader sends several at once, and some are delayed
by a process that has to read the plan first."""


class QueuePosition(msgspec.Struct, frozen=True):
    """The place of work in a line: `asked`, the time of the request in seconds, and where its rows begin."""

    asked: float = math.inf  # overtakes nothing
    epoch: int = 0
    position: int = 0

    def is_before(self, other: QueuePosition) -> bool:
        """Return whether new work with this position overtakes the waiting `other`."""
        together = other.asked > self.asked - TOGETHER
        return together and (self.epoch, self.position) < (other.epoch, other.position)


NO_POSITION: Final = QueuePosition()


class _Job(Generic[T]):
    """`spent`: seconds of its account's time, on the account's own scale; `usual`: seconds per item."""

    __slots__ = ("line", "spent", "underway", "usual")

    def __init__(self, spent: float) -> None:
        self.line: deque[tuple[T, QueuePosition]] = deque()
        self.spent, self.underway, self.usual = spent, 0, EXPECTED

    def line_up(self, item: T, place: QueuePosition) -> None:
        at = len(self.line)
        while at and place.is_before(self.line[at - 1][1]):
            at -= 1
        self.line.insert(at, (item, place))


class _Account(Generic[T]):
    """`spent`: seconds on the queue's scale; `now`: the present on the account's own scale; `waiting` and
    `underway`: pieces of work; `background`: served only while no other account has work.
    """

    __slots__ = ("background", "jobs", "now", "spent", "underway", "waiting")

    def __init__(self, spent: float, *, background: bool) -> None:
        self.background = background
        self.jobs: dict[str, _Job[T]] = {}
        self.spent, self.now = spent, 0.0
        self.waiting = self.underway = 0


class QueueTicket(Generic[T]):
    """Work that was handed out; return it with `FairQueue.finish_ticket`."""

    __slots__ = ("account", "background", "expected", "item", "job")

    def __init__(self, account: str, job: str, item: T, expected: float, *, background: bool = False) -> None:
        self.account, self.job, self.item, self.expected = account, job, item, expected
        self.background = background


class FairQueue(Generic[T]):
    """A queue that shares time between accounts, and between their jobs. Use on one event loop only."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, bool], _Account[T]] = {}
        """By name, and whether the work is background work."""
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._restricted: set[str] = set()
        self._now = {False: 0.0, True: 0.0}
        """The present on the queue's scale, of background work and of all other."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<FairQueue of {self._length}, {len(self._accounts)} accounts>"

    def put(
        self,
        account: str,
        job: str,
        item: T,
        *,
        first: bool = False,
        place: QueuePosition = NO_POSITION,
        background: bool = False,
    ) -> None:
        """Add work to the job's line; `first`: at its head (retried work has waited before)."""
        owner = self._accounts.get((account, background))
        if owner is None:
            owner = _Account(self._now[background], background=background)
            self._accounts[account, background] = owner
        elif not owner.waiting:
            owner.spent = max(owner.spent, self._now[background])
        mine = owner.jobs.get(job)
        if mine is None:
            mine = owner.jobs[job] = _Job(owner.now)
        elif not mine.line:
            mine.spent = max(mine.spent, owner.now)
        if first:
            mine.line.appendleft((item, place))
        else:
            mine.line_up(item, place)
        owner.waiting += 1
        self._length += 1
        self._wake(job)

    def restrict_job(self, job: str) -> None:
        """Give work of the job only to workers that accept restricted jobs."""
        self._restricted.add(job)

    def release_job(self, job: str) -> None:
        """Give work of a restricted job to all workers again."""
        self._restricted.discard(job)
        for _ in range(len(self._waiting)):
            self._wake(job)

    async def get(self, *, accept_restricted: bool = True) -> QueueTicket[T]:
        """Return the next piece of work, waiting for one if needed: of restricted jobs, too, or not."""
        while True:
            ticket = self._dequeue(accept_restricted=accept_restricted)
            if ticket is not None:
                return ticket
            await self._wait(accept_restricted=accept_restricted)

    async def _wait(self, *, accept_restricted: bool) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (waiter, accept_restricted)
        self._waiting.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                for job in self._lines(accept_restricted=accept_restricted):
                    self._wake(job)  # woken and cancelled at the same time: wake another waiter
            raise

    def _lines(self, *, accept_restricted: bool) -> list[str]:
        """Return the jobs with work for a worker that accepts restricted jobs, or does not."""
        return [
            job
            for owner in self._accounts.values()
            for job, mine in owner.jobs.items()
            if mine.line and (accept_restricted or job not in self._restricted)
        ]

    def _dequeue(self, *, accept_restricted: bool) -> QueueTicket[T] | None:
        found = self._choose(frozenset() if accept_restricted else self._restricted)
        if found is None:
            return None
        name, owner, job, mine = found
        background = owner.background
        self._now[background] = max(self._now[background], owner.spent)
        owner.now = max(owner.now, mine.spent)
        ticket = QueueTicket(name, job, mine.line.popleft()[0], mine.usual, background=background)
        owner.spent += ticket.expected
        mine.spent += ticket.expected
        mine.underway += 1
        owner.underway += 1
        owner.waiting -= 1
        self._length -= 1
        return ticket

    def _choose(self, barred: AbstractSet[str]) -> tuple[str, _Account[T], str, _Job[T]] | None:
        """Return the job to serve next, and its account."""
        waiting = [(name, owner) for (name, _), owner in self._accounts.items() if owner.waiting]
        for name, owner in sorted(waiting, key=lambda entry: (entry[1].background, entry[1].spent)):
            lines = [entry for entry in owner.jobs.items() if entry[1].line and entry[0] not in barred]
            if lines:
                job, mine = min(lines, key=lambda entry: entry[1].spent)
                return name, owner, job, mine
        return None

    def finish_ticket(self, ticket: QueueTicket[T], seconds: float | None = None) -> None:
        """Account for finished work that `get` returned; `seconds` None: it was not begun."""
        owner = self._accounts[ticket.account, ticket.background]
        mine = owner.jobs[ticket.job]
        mine.underway -= 1
        owner.underway -= 1
        late = (seconds or 0.0) - ticket.expected
        owner.spent += late
        mine.spent += late
        if seconds is not None:
            mine.usual += (seconds - mine.usual) / 8
        if not mine.line and not mine.underway:
            self._prune(owner)

    def _prune(self, owner: _Account[T]) -> None:
        """Remove jobs and accounts that are idle and not ahead: they would restart at the present anyway.

        If nothing else has work, there is nothing to be ahead of, and all are removed.
        """
        alone = not owner.waiting and not owner.underway
        owner.jobs = {
            name: job
            for name, job in owner.jobs.items()
            if job.line or job.underway or (job.spent > owner.now and not alone)
        }
        if alone:
            busy = any(other.waiting or other.underway for other in self._accounts.values())
            self._accounts = {
                name: other
                for name, other in self._accounts.items()
                if other.waiting or other.underway or (other.spent > self._now[other.background] and busy)
            }

    def _wake(self, job: str) -> None:
        """Wake a waiter that accepts work of this job."""
        for entry in list(self._waiting):
            waiter, accept_restricted = entry
            if waiter.done():
                self._waiting.remove(entry)
            elif accept_restricted or job not in self._restricted:
                self._waiting.remove(entry)
                waiter.set_result(None)
                return


MIN_SLICE_SECONDS: Final = 0.005  # seconds of work, compared with a third of a millisecond to hand it over
_UNKNOWN: Final = 0.0015  # assumed seconds per row until a job's first rows are done: a small image
_JOBS: Final = 1000
_WEIGHT: Final = 0.25  # weight of the newest rows in a job's average


class SliceSizer:
    """Measures the seconds per row of the most recent jobs, and sizes slices accordingly."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SliceSizer of {len(self._seconds)} jobs>"

    def record_duration(self, job: str, rows: int, seconds: float) -> None:
        """Record that so many rows of the job took this time."""
        if rows:
            before = self._seconds.pop(job, seconds / rows)
            self._seconds[job] = before + (seconds / rows - before) * _WEIGHT
            while len(self._seconds) > _JOBS:
                self._seconds.popitem(last=False)

    def slice_rows(self, job: str, rows: int, waiting: int, processes: int) -> int:
        """Return how many of `rows` rows at the head of the line one process takes.

        `waiting`: rows in all lines, including these. The number is even unless it is all of them, because
        neighbours may be mixed with each other.
        """
        least = int(MIN_SLICE_SECONDS / max(self._seconds.get(job, _UNKNOWN), 1e-9)) + 1
        share = max(least, -(-waiting // processes))
        share += share % 2
        return share if rows - share >= least else rows


class RenderSpec(msgspec.Struct, frozen=True):
    """The parameters that all rows of a call share; `asked`: the call's time by the event loop's clock.

    `prefixes_only`: only the decoded cache's entries are made, in the background.
    """

    asked: float
    account: str
    job: str
    program_text: str
    program: str
    epoch: int
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    assets: tuple[AssetPlace, ...] = ()
    samples: SampleSet | None = None
    prefixes_only: bool = False


class RenderCall:
    """The state that all slices of one `render` share: the spec, and the outcome as it accumulates.

    The frame's descriptor stays open until the last slice is released.
    """

    def __init__(self, spec: RenderSpec, frame_fd: int, rows: int) -> None:
        self.spec = spec
        self.frame_fd = os.dup(frame_fd)
        self.outcome: asyncio.Future[RenderResult] = asyncio.get_running_loop().create_future()
        self.span = tracing.current()
        self._rendered = RenderResult()
        self._left, self._slices = rows, 0

    @property
    def is_pending(self) -> bool:
        """Whether a caller still waits for the outcome."""
        return not self.outcome.done()

    def add_slice(self) -> None:
        self._slices += 1

    def release_slice(self) -> None:
        self._slices -= 1
        if not self._slices:
            os.close(self.frame_fd)

    def add_result(self, part: RenderResult, rows: int) -> None:
        """Add the outcome of `rows` more rows."""
        if not self.is_pending:
            part.close()
            return
        self._rendered.merge(part)
        self._left -= rows
        if not self._left:
            self.outcome.set_result(self._rendered)

    def fail_call(self, error: Exception) -> None:
        if self.is_pending:
            self.discard()
            self.outcome.set_exception(error)

    def discard(self) -> None:
        """Close the scratch files of a call that failed or was cancelled."""
        self._rendered.close()


class RowSlice:
    """Rows that travel together. `suspect`: a single row, retried because a process died on it.

    `lost`: how often a process died that had received this slice but not begun it; `ticket`: the ticket to
    return to the queue; `prefixes`: what its process does with the decoded cache; `queued`, `sent`: when it
    was, if its call is traced.
    """

    def __init__(self, call: RenderCall, rows: Sequence[RowWork], *, suspect: bool = False) -> None:
        self.call, self.rows, self.suspect = call, rows, suspect
        self.number, self.lost = 0, 0
        self.ticket: QueueTicket[RowSlice] | None = None
        self.prefixes: SliceOrder | None = None
        self.queued, self.sent = tracing.now() if call.span is not None else 0.0, 0.0
        call.add_slice()

    def to_request(self, number: int, *, with_text: bool) -> RenderRequest:
        self.number, self.sent = number, tracing.now() if self.call.span is not None else 0.0
        paths: dict[str, int] = {}

        def path_index(path: str) -> int:
            return paths.setdefault(path, len(paths))

        def placed(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
            return tuple((paths.setdefault(piece[0], len(paths)), *piece[1:]) for piece in pieces)

        def kept(sample: int) -> tuple[tuple[KeptPlace, ...], ...]:
            return () if prefixes is None or sample < 0 else prefixes.places(sample, path_index)

        def placed_block(work: RowWork) -> RowBlock | None:
            if work.block is None:
                return None
            return msgspec.structs.replace(work.block, files=tuple(map(path_index, work.paths)))

        prefixes = self.prefixes
        rows = tuple(
            Row(
                work.row,
                work.position,
                tuple(map(placed, work.sources)),
                tuple(map(placed, work.partner)),
                work.sample,
                work.partner_sample,
                kept(work.sample),
                kept(work.partner_sample),
                placed_block(work),
            )
            for work in self.rows
        )
        fields = () if prefixes is None else prefixes.fields(path_index)
        spec = self.call.spec
        assets = tuple((digest, placed(pieces)) for digest, pieces in spec.assets)
        return RenderRequest(
            number,
            spec.program,
            spec.program_text if with_text else "",
            spec.epoch,
            spec.frame_bytes,
            spec.targets,
            tuple(paths),
            rows,
            assets,
            self.suspect,
            fields,
            spec.prefixes_only,
            self.call.span is not None,
        )

    def record_spans(self, reply: RenderReply) -> None:
        """Record how long the slice waited and what its process did, if its call is traced."""
        if self.call.span is None:
            return
        ended = tracing.now()
        tracing.record(self.call.span, "queue", self.queued, self.sent)
        span = tracing.Span("render", self.call.span, self.sent)
        span.attributes = {"shardmesh.rows": len(reply.rendered)}
        tracing.record_timed(span, reply.spans)
        span.end(ended)
