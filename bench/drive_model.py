"""A rotational drive as arithmetic: which request it takes next, and what each one costs.

Law: no I/O and no clock; times come in as arguments. The standard library alone, because
`bench.rotational_device` starts with it alone.
Invariant: equal requests in equal order cost the same. The angle at which a sector comes by is not modelled:
every seek is followed by half a turn, the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

KIB: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class Geometry:
    """A drive of 7200 rpm over `size` bytes.

    Seeks take the square root of the distance, which is relative to `size`: an image of a few gigabytes has
    the seeks of a full drive.

    Attributes:
        size: bytes; a seek over all of them takes `farthest_s`.
        rate: bytes a second under the head.
        nearest_s: the shortest seek, in seconds, without the half turn.
        farthest_s: the longest one.
        turn_s: a turn of the platter, in seconds.
        passed_over: bytes. A forward gap of at most so many is not a seek: it passes under the head.
        queue_depth: requests among which the drive chooses the next one.
        patience_s: seconds for which an idle drive waits for the request that continues where the head is,
            before it takes another one; stands for the read-ahead of drives.
    """

    size: int
    rate: float = 200e6
    nearest_s: float = 0.0008
    farthest_s: float = 0.015
    turn_s: float = 60 / 7200
    passed_over: int = 512 * KIB
    queue_depth: int = 32
    patience_s: float = 0.0005

    def passes_over(self, gap: int) -> bool:
        """Whether the head reaches a request `gap` bytes ahead of it without a seek."""
        return 0 <= gap <= self.passed_over

    def seek_s(self, distance: int) -> float:
        """Seconds until the first sector is under the head, `distance` bytes away in either direction."""
        stroke = math.sqrt(min(1.0, abs(distance) / self.size))
        return self.nearest_s + (self.farthest_s - self.nearest_s) * stroke + self.turn_s / 2


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes that are asked of the drive. `arrived`: seconds of any clock; `write`: the direction."""

    offset: int
    length: int
    arrived: float = 0.0
    write: bool = False

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class DriveStats:
    """What a drive was asked for and what it cost; `later - earlier` is what came in between.

    Attributes:
        reads: requests, as the drive sees them: merged or split by the kernel.
        bytes: bytes read.
        seeks: reads that moved the head by more than a gap that passes under it.
        seek_s: seconds in seeks, each with its half turn.
        media_s: seconds in which bytes that were asked for passed under the head; gaps are not in it.
        passing_s: seconds in which gaps passed under it.
        writes: requests.
        written: bytes.
    """

    reads: int = 0
    bytes: int = 0
    seeks: int = 0
    seek_s: float = 0.0
    media_s: float = 0.0
    passing_s: float = 0.0
    writes: int = 0
    written: int = 0

    @property
    def disk_s(self) -> float:
        """Seconds that the reads kept the drive busy."""
        return self.seek_s + self.media_s + self.passing_s

    def __sub__(self, earlier: DriveStats) -> DriveStats:
        names = [each.name for each in fields(DriveStats)]
        return DriveStats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(slots=True)
class Arm:
    """The one arm of a drive: where its head is, and what its requests have cost."""

    geometry: Geometry
    head: int = 0
    stats: DriveStats = field(default_factory=DriveStats)

    def choose(self, waiting: Sequence[Request]) -> Request:
        """Return the request that is next in one direction (C-LOOK) among the first of those that wait.

        From the head upwards; from the lowest offset when nothing is above the head.
        """
        queue = waiting[: self.geometry.queue_depth]
        ahead = [request for request in queue if request.offset >= self.head]
        return min(ahead or queue, key=lambda request: request.offset)

    def continues(self, request: Request) -> bool:
        """Whether serving it needs no seek. Writes never do: the drive acknowledges from its cache."""
        return request.write or self.geometry.passes_over(request.offset - self.head)

    def serve(self, request: Request) -> float:
        """Move to the request and count it; return the seconds that it takes."""
        said, media_s = self.stats, request.length / self.geometry.rate
        if request.write:
            self.stats = replace(said, writes=said.writes + 1, written=said.written + request.length)
            return media_s
        gap, seek_s, passing_s, seeks = request.offset - self.head, 0.0, 0.0, 0
        if self.continues(request):
            passing_s = gap / self.geometry.rate
        else:
            seek_s, seeks = self.geometry.seek_s(gap), 1
        self.head = request.end
        self.stats = replace(
            said,
            reads=said.reads + 1,
            bytes=said.bytes + request.length,
            seeks=said.seeks + seeks,
            seek_s=said.seek_s + seek_s,
            media_s=said.media_s + media_s,
            passing_s=said.passing_s + passing_s,
        )
        return seek_s + passing_s + media_s


@dataclass(slots=True)
class Drive:
    """Requests that wait, and when the drive has finished the ones that it took."""

    arm: Arm
    waiting: list[Request] = field(default_factory=list)
    free_at: float = 0.0

    @classmethod
    def idle(cls, geometry: Geometry) -> Self:
        """A drive that has not been asked for anything; its head is at the first byte."""
        return cls(Arm(geometry))

    def submit(self, request: Request) -> None:
        """Let it wait for its turn."""
        self.waiting.append(request)

    def decides_at(self) -> float | None:
        """When the drive takes the next of those that wait; None while nothing does.

        A request that needs a seek is held for `patience_s`: one that continues at the head may arrive.
        """
        if not self.waiting:
            return None
        request = self.arm.choose(self.waiting)
        begins = max(self.free_at, request.arrived)
        return begins if self.arm.continues(request) else begins + self.arm.geometry.patience_s

    def start_next(self, now: float) -> tuple[Request, float] | None:
        """Take the next request, and when its last byte has been read; None before `decides_at`."""
        decides = self.decides_at()
        if decides is None or now < decides:
            return None
        request = self.arm.choose(self.waiting)
        self.waiting = [other for other in self.waiting if other is not request]
        self.free_at = decides + self.arm.serve(request)
        return request, self.free_at


@dataclass(frozen=True, slots=True)
class Issued:
    """A request reached the device."""

    request: Request


@dataclass(frozen=True, slots=True)
class Completed:
    """The device has finished the request at this offset."""

    offset: int


def replay(geometry: Geometry, events: Iterable[Issued | Completed]) -> DriveStats:
    """Return what a drive would have spent on requests that a device without an arm has served.

    Requests that were outstanding together are taken in one direction, as the drive would; one that was
    completed was taken before those that were issued afterwards.
    """
    arm, waiting = Arm(geometry), list[Request]()
    for event in events:
        if isinstance(event, Issued):
            waiting.append(event.request)
            continue
        while any(request.offset == event.offset for request in waiting):
            chosen = arm.choose(waiting)
            waiting.remove(chosen)
            arm.serve(chosen)
    while waiting:
        chosen = arm.choose(waiting)
        waiting.remove(chosen)
        arm.serve(chosen)
    return arm.stats
