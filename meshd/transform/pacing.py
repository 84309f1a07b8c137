"""How many rows a transform process takes at a time.

Law: of what waits every process gets its share, so that few rows do not wait for one process while others are
idle, and all end together; but never so few that handing them over costs more than they do.
Source: guided self-scheduling, Polychronopoulos and Kuck, IEEE Transactions on Computers C-36 (1987).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

WORTHWHILE: Final = 0.005  # seconds of work, beside a third of a millisecond to hand it over
_UNKNOWN: Final = 0.0015  # seconds a row, until a job's first rows are done: a small photograph
_JOBS: Final = 1000
_WEIGHT: Final = 0.25  # of the newest rows in what is known of a job


class Pace:
    """Seconds a row, by job; of the jobs that were heard of last."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Pace of {len(self._seconds)} jobs>"

    def took(self, job: str, rows: int, seconds: float) -> None:
        """So many rows of the job were done in that time."""
        if rows:
            before = self._seconds.pop(job, seconds / rows)
            self._seconds[job] = before + (seconds / rows - before) * _WEIGHT
            while len(self._seconds) > _JOBS:
                self._seconds.popitem(last=False)

    def portion(self, job: str, rows: int, waiting: int, processes: int) -> int:
        """How many of `rows` rows at the head of the line one of the processes takes; `waiting`: rows in all
        lines, these among them. Even, where it is not all of them: neighbours may be mixed with each other.
        """
        least = int(WORTHWHILE / max(self._seconds.get(job, _UNKNOWN), 1e-9)) + 1
        share = max(least, -(-waiting // processes))
        share += share % 2
        return share if rows - share >= least else rows
