"""Scheduling of transform work: a fair queue over accounts and jobs, and the size of the slices handed out.

Law: the account that used the least time is served next, then the job of that account that did; within
a job, first come, first served, and requests made at about the same time in epoch order. Unused time is
not saved up. Work of a shy job goes only to workers that accept it. Slices shrink so that all workers
share the queue and finish together, but not below the cost of a handover (guided self-scheduling,
Polychronopoulos and Kuck, IEEE Transactions on Computers C-36, 1987). Invariant: of two accounts with
constant backlog, neither gains more than the time of the work in progress.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


T = TypeVar("T")
EXPECTED = 0.05  # seconds that a slice is taken to need until a job's first ones are done
TOGETHER: Final = 0.25
"""Seconds: a loader asks for several frames at once, and some come to a process that has to read the plan."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where work belongs: when it was `asked` for, in seconds of one clock, and where its rows begin."""

    asked: float = math.inf  # never: it overtakes nobody
    epoch: int = 0
    position: int = 0

    def is_before(self, other: QueuePosition) -> bool:
        """Whether what is asked for now overtakes what waits already."""
        together = other.asked > self.asked - TOGETHER
        return together and (self.epoch, self.position) < (other.epoch, other.position)


NO_POSITION: Final = QueuePosition()


class _Job(Generic[T]):
    """`spent`: seconds of its account's time, on the account's own scale; `usual`: of one piece of work."""

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
    """`spent`: seconds on the queue's scale; `now`: where the account's own scale stands; `waiting` and
    `underway`: pieces of work.
    """

    __slots__ = ("jobs", "now", "spent", "underway", "waiting")

    def __init__(self, spent: float) -> None:
        self.jobs: dict[str, _Job[T]] = {}
        self.spent, self.now = spent, 0.0
        self.waiting = self.underway = 0


class QueueTicket(Generic[T]):
    """Work that was handed out; to be given back to `FairQueue.done`."""

    __slots__ = ("account", "expected", "item", "job")

    def __init__(self, account: str, job: str, item: T, expected: float) -> None:
        self.account, self.job, self.item, self.expected = account, job, item, expected


class FairQueue(Generic[T]):
    """Use on one event loop only."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account[T]] = {}
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._shy: set[str] = set()
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<FairQueue of {self._length}, {len(self._accounts)} accounts>"

    def put(
        self, account: str, job: str, item: T, *, first: bool = False, place: QueuePosition = NO_POSITION
    ) -> None:
        """Add to the job's line; `first`: at its head (what is retried has waited already)."""
        owner = self._accounts.get(account)
        if owner is None:
            owner = self._accounts[account] = _Account(self._now)
        elif not owner.waiting:
            owner.spent = max(owner.spent, self._now)
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

    def set_shy(self, job: str, *, shy: bool) -> None:
        """Whether the job's work goes only to those who take shy jobs, from now on."""
        if shy:
            self._shy.add(job)
        elif job in self._shy:
            self._shy.remove(job)
            for _ in range(len(self._waiting)):
                self._wake(job)

    async def get(self, *, shy: bool = True) -> QueueTicket[T]:
        """The next piece of work, once there is any; `shy`: whether those of shy jobs are taken, too."""
        while True:
            turn = self._dequeue(shy=shy)
            if turn is not None:
                return turn
            await self._wait(shy=shy)

    async def _wait(self, *, shy: bool) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (waiter, shy)
        self._waiting.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                for job in self._lines(shy=shy):
                    self._wake(job)  # woken and cancelled in the same moment: pass it on
            raise

    def _lines(self, *, shy: bool) -> list[str]:
        """Jobs with work for somebody who takes those of shy jobs, or does not."""
        return [
            job
            for owner in self._accounts.values()
            for job, mine in owner.jobs.items()
            if mine.line and (shy or job not in self._shy)
        ]

    def _dequeue(self, *, shy: bool) -> QueueTicket[T] | None:
        found = self._choose(self._shy if not shy else frozenset())
        if found is None:
            return None
        name, owner, job, mine = found
        self._now, owner.now = max(self._now, owner.spent), max(owner.now, mine.spent)
        turn = QueueTicket(name, job, mine.line.popleft()[0], mine.usual)
        owner.spent += turn.expected
        mine.spent += turn.expected
        mine.underway += 1
        owner.underway += 1
        owner.waiting -= 1
        self._length -= 1
        return turn

    def _choose(self, barred: AbstractSet[str]) -> tuple[str, _Account[T], str, _Job[T]] | None:
        """The job whose turn it is, and its account."""
        for name, owner in sorted(
            (entry for entry in self._accounts.items() if entry[1].waiting), key=lambda entry: entry[1].spent
        ):
            lines = [entry for entry in owner.jobs.items() if entry[1].line and entry[0] not in barred]
            if lines:
                job, mine = min(lines, key=lambda entry: entry[1].spent)
                return name, owner, job, mine
        return None

    def finish_turn(self, turn: QueueTicket[T], seconds: float | None = None) -> None:
        """What `get` gave is over: it took so long; None: it was not begun."""
        owner = self._accounts[turn.account]
        mine = owner.jobs[turn.job]
        mine.underway -= 1
        owner.underway -= 1
        late = (seconds or 0.0) - turn.expected
        owner.spent += late
        mine.spent += late
        if seconds is not None:
            mine.usual += (seconds - mine.usual) / 8
        if not mine.line and not mine.underway:
            self._prune(owner)

    def _prune(self, owner: _Account[T]) -> None:
        """Forget jobs and accounts that are idle and not ahead: they would begin at the present anyway. With
        nothing else to be ahead of, all are forgotten."""
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
                if other.waiting or other.underway or (other.spent > self._now and busy)
            }

    def _wake(self, job: str) -> None:
        """Somebody who may take work of this job."""
        for entry in list(self._waiting):
            waiter, shy = entry
            if waiter.done():
                self._waiting.remove(entry)
            elif shy or job not in self._shy:
                self._waiting.remove(entry)
                waiter.set_result(None)
                return


MIN_SLICE_SECONDS: Final = 0.005  # seconds of work, beside a third of a millisecond to hand it over
_UNKNOWN: Final = 0.0015  # seconds a row, until a job's first rows are done: a small photograph
_JOBS: Final = 1000
_WEIGHT: Final = 0.25  # of the newest rows in what is known of a job


class SliceSizer:
    """Seconds a row, by job; of the jobs that were heard of last."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Pace of {len(self._seconds)} jobs>"

    def record_duration(self, job: str, rows: int, seconds: float) -> None:
        """So many rows of the job were done in that time."""
        if rows:
            before = self._seconds.pop(job, seconds / rows)
            self._seconds[job] = before + (seconds / rows - before) * _WEIGHT
            while len(self._seconds) > _JOBS:
                self._seconds.popitem(last=False)

    def slice_rows(self, job: str, rows: int, waiting: int, processes: int) -> int:
        """How many of `rows` rows at the head of the line one of the processes takes; `waiting`: rows in all
        lines, these among them. Even, where it is not all of them: neighbours may be mixed with each other.
        """
        least = int(MIN_SLICE_SECONDS / max(self._seconds.get(job, _UNKNOWN), 1e-9)) + 1
        share = max(least, -(-waiting // processes))
        share += share % 2
        return share if rows - share >= least else rows
