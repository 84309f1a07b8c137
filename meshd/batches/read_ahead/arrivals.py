"""Arrivals: the rows of a batch in the order in which the disk brings their bytes.

Law: a row comes once, and not before every read that has bytes of it has ended or was given up. So the first
rows of a window are built while the disk reads its last ones.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy.typing as npt

    from meshd.batches.read_ahead.disk_reader import DiskReader, DiskWork
    from meshd.transform.renderer import RowWork
    from meshd.util.clock import Clock

    Integers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

_SPAN: Final = 44  # bits of an offset within a file
_LEAST_ROWS: Final = 8
_GROUPS: Final = 8  # a batch is built in so many groups at most: each has a cost of its own


class Progress:
    """Wakes those who wait for reads of any window. Use on one event loop only."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Progress {self._changed!r}>"

    def tell(self) -> None:
        """Wake all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until more has been read."""
        await self._changed.wait()


class Window(msgspec.Struct, eq=False):
    """Positions first…end−1 of an epoch, whose bytes are read together. `works`: its reads on each disk, none
    until they have been looked up."""

    first: int
    end: int
    bytes: int
    progress: Progress
    read: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    works: list[DiskWork] = msgspec.field(default_factory=list)
    urgent: bool = False

    @property
    def begun(self) -> bool:
        """Whether some of it has been read."""
        return self.read.is_set() or any(work.finished for work in self.works)

    def prioritize(self, readers: dict[int, DiskReader]) -> None:
        """Move its reads before those of windows that no batch waits for."""
        self.urgent = True
        for work in self.works:
            readers[work.device].prioritize(work)

    def finish(self) -> None:
        """Let batches go: all has been read, or will not be."""
        self.read.set()
        self.progress.tell()

    def give_up(self) -> None:
        """Let batches go, and read no more of it."""
        for work in self.works:
            work.cancelled = True
        self.finish()


class Arrivals:
    """The reads of the windows that a batch lies in; of none by default."""

    def __init__(self, windows: Sequence[Window] = (), clock: Clock | None = None) -> None:
        self._windows, self._clock = list(windows), clock

    def __repr__(self) -> str:
        return f"<Arrivals of {len(self._windows)} windows>"

    @property
    def end(self) -> int:
        """The position of the epoch after the first window that is being read; 0 if none is."""
        return min((window.end for window in self._windows if not window.read.is_set()), default=0)

    async def until_begun(self) -> None:
        """Wait until the first bytes may be there: what waits for a later window needs no memory yet."""
        while self._windows and not any(window.begun for window in self._windows):
            await self._more()

    async def until_read(self) -> None:
        """Wait until all is there."""
        while not all(window.read.is_set() for window in self._windows):
            await self._more()

    async def groups(self, rows: Sequence[RowWork]) -> AsyncIterator[Sequence[RowWork]]:
        """Yield all of these rows, in groups whose bytes are there."""
        least = max(_LEAST_ROWS, len(rows) // _GROUPS)
        dues: dict[DiskWork, Integers] = {}
        left = np.arange(len(rows))
        while left.size:
            there = self._there(rows, dues)[left]
            if there.all() or np.count_nonzero(there) >= least:
                yield [rows[number] for number in left[there].tolist()]
                left = left[~there]
            else:
                await self._more()

    async def _more(self) -> None:
        assert self._clock is not None
        began = self._clock.monotonic()
        await self._windows[0].progress.wait()
        metrics.read_ahead_wait_seconds.inc(self._clock.monotonic() - began)

    def _there(self, rows: Sequence[RowWork], dues: dict[DiskWork, Integers]) -> Flags:
        """Return bool[rows]: whose bytes are there. `dues`: what was computed before."""
        there = np.ones(len(rows), np.bool_)
        for window in self._windows:
            if window.read.is_set():
                continue
            if not window.works:
                return np.zeros(len(rows), np.bool_)
            for work in window.works:
                if work not in dues:
                    dues[work] = reads_due(work, rows)
                there &= dues[work] <= work.finished
        return there


def reads_due(work: DiskWork, rows: Sequence[RowWork]) -> Integers:
    """Return int64[rows]: how many reads of a window, from the first on, bring all bytes of each row; 0 for a
    row of which they bring none."""
    files = {path: number for number, path in enumerate(work.paths)}
    ends, of = [], []
    for number, row in enumerate(rows):
        for pieces in (*row.sources, *row.partner):
            for path, offset, length, *_ in pieces:
                if path in files and length:
                    ends.append((files[path] << _SPAN) + offset + length - 1)
                    of.append(number)
    starts, last = (work.reads.files << _SPAN) + work.reads.offsets, np.array(ends, np.int64)
    place = np.searchsorted(starts, last, side="right") - 1
    covered = (place >= 0) & (last < starts[place] + work.reads.lengths[place])
    due = np.zeros(len(rows), np.int64)
    np.maximum.at(due, np.array(of, np.int64), np.where(covered, place + 1, 0))
    return due
