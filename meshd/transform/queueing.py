"""Rows waiting for a transform process: one line a job, served in turn.

Law: a job with a long line delays another's next slice by at most one slice a job. Within a job, first come
first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Use on one event loop only."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __repr__(self) -> str:
        return f"<FairQueue { ({job[:8]: len(line) for job, line in self._lines.items()}) }>"

    def put(self, job: str, item: T, *, first: bool = False) -> None:
        """Add to the job's line; `first`: at its head (what is retried has waited already)."""
        line = self._lines.setdefault(job, deque())
        if first:
            line.appendleft(item)
        else:
            line.append(item)
        self._wake()

    async def get(self) -> tuple[str, T]:
        """(job, item): the head of the line whose turn it is."""
        while not self._lines:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                elif self._lines:
                    self._wake()  # woken and cancelled in the same moment: pass it on
                raise
        job, line = next(iter(self._lines.items()))
        item = line.popleft()
        if line:
            self._lines.move_to_end(job)
        else:
            del self._lines[job]
        return job, item

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
