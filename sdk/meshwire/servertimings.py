"""How long a node took for an answer, in the form of W3C Server Timing: `fetch;dur=12.5, prepare;dur=40`.

Law: names are ours, durations milliseconds of one clock, from which nothing but differences follows. What
cannot be read is left out, never an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

HEADER: Final = "server-timing"
_ENTRY = re.compile(r"(fetch|prepare|total);dur=([0-9]{1,10}(?:\.[0-9]{1,6})?)")
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds in which a frame was made: `fetch`, until its sources were at hand; `prepare`, in ops. Of one
    that was ready both are 0."""

    fetch: float = 0.0
    prepare: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Seconds of one answer: `total` from the question's arrival on; what others had begun counts only while
    this one waited for it."""

    took: Took
    total: float

    @property
    def fetch(self) -> float:
        """Of `total`, waiting for sources."""
        made = self.took.fetch + self.took.prepare
        return self.took.fetch if made <= self.total else self.total * self.took.fetch / made

    @property
    def preprocessing(self) -> float:
        """Of `total`, the rest: ops, and waiting for one's turn."""
        return max(self.total - self.fetch, 0.0)

    def to_header(self) -> str:
        """As it is sent."""
        took = self.took
        return (
            f"fetch;dur={1000 * took.fetch:.3f}, prepare;dur={1000 * took.prepare:.3f}, "
            f"total;dur={1000 * self.total:.3f}"
        )


def parse_timing(header: str) -> ServerTiming:
    """The timing of a header; zeros where it says nothing."""
    entries = (_ENTRY.fullmatch(entry.strip()) for entry in header[:_LONGEST].split(","))
    found = {entry[1]: float(entry[2]) / 1000 for entry in entries if entry is not None}
    took = Took(found.get("fetch", 0.0), found.get("prepare", 0.0))
    return ServerTiming(took, found.get("total", 0.0))
