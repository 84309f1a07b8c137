"""What a loader has done, in numbers.

Law: measures this process only; what the nodes did is theirs to report. Times are of the monotonic clock,
CPU of the threads that load: the reader's, and the consumer's inside `next`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.deliveries import Tally


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Since the loader was made, of this rank; `print(stats)` tells it in a line.

    Attributes:
        samples, batches, bytes: received by the program; bytes as they came over the network.
        seconds: inside `for` loops.
        waited: of these, spent waiting for a batch.
        cpu: seconds of processor time that loading took in this process.
        retries: requests asked again.
        overflows: batches for which memory beyond the arena was taken.
        flagged: rows that are substitutes, masked or pads.
        frames: how the nodes came by the frames: "miss" (prepared for this request), "joined" (together with
            another job), "hit" (prepared before).
    """

    samples: int
    batches: int
    bytes: int
    seconds: float
    waited: float
    cpu: float
    retries: int
    overflows: int
    flagged: int
    frames: Mapping[str, int]

    @property
    def samples_per_second(self) -> float:
        """Of this rank, over the loop's time; 0 before the first batch."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Part of the loop's time that the consumer waited, 0…1."""
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def cpu_per_1000(self) -> float:
        """Client CPU seconds a 1000 samples."""
        return 1000 * self.cpu / self.samples if self.samples else 0.0

    @property
    def hits(self) -> int:
        """Frames that were ready or shared with another job when asked for."""
        return self.frames.get("hit", 0) + self.frames.get("joined", 0)

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.samples_per_second:.0f}/s, waited {self.wait_share:.0%}, "
            f"client CPU {self.cpu_per_1000:.3f} s a 1000, {self.retries} retries, {self.hits} hits"
        )


@dataclass(slots=True)
class Meter:
    """The running numbers behind LoaderStats."""

    samples: int = 0
    batches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    cpu: float = 0.0
    retries: int = 0
    flagged: int = 0
    frames: dict[str, int] = field(default_factory=dict)
    _began: float | None = None

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None

    def absorb(self, tally: Tally) -> None:
        """Adds what a finished reader did."""
        self.retries += tally.retries
        self.bytes += tally.bytes
        self.cpu += tally.cpu
        for origin, count in tally.origins.items():
            self.frames[origin] = self.frames.get(origin, 0) + count

    def read(self, running: Tally | None, overflows: int) -> LoaderStats:
        """The numbers now, those of a running reader included."""
        now = Meter(**{name: getattr(self, name) for name in _NAMES}, frames=dict(self.frames))
        if running is not None:
            now.absorb(running)
        if self._began is not None:
            now.seconds += time.perf_counter() - self._began
        return LoaderStats(
            **{name: getattr(now, name) for name in _NAMES}, frames=now.frames, overflows=overflows
        )


_NAMES = ("samples", "batches", "bytes", "seconds", "waited", "cpu", "retries", "flagged")
