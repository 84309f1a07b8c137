"""How the frames of a plan come to one rank: by a pass over steps, every k-th of them, or one alone.

Law: holds no place. Which steps, of which epoch, counted from where, is told each time, so that several
passes of one feed do not know of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshsdk.arenas import Arena
from meshsdk.deliveries import Order
from meshsdk.frames import read_frame
from meshsdk.passes import Pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.addressing import Addresses
    from meshsdk.batches import Batch
    from meshsdk.doctor.checkups import Subject
    from meshsdk.meters import Meter
    from meshsdk.outputs import Stage
    from meshsdk.resuming import Place
    from meshsdk.transport import Transport
    from meshsdk.watchers import Watchers


@dataclass(frozen=True, slots=True)
class Feed:
    """`expected`: bytes of a frame, 0 where they are not known beforehand; `budget`: of an arena; `deadline`:
    seconds; `verify`: whether checksums are looked at, of shared memory too if it is "all"."""

    transport: Transport
    addresses: Addresses
    stage: Stage
    meter: Meter
    watchers: Watchers
    expected: int
    budget: int
    connections: int
    deadline: float
    verify: Literal[True, False, "all"]

    def begin(self, place: Place, steps: range, arena: Arena) -> Pass:
        """A pass over these steps of the place's epoch, which the caller closes."""
        addresses, epoch, origin = self.addresses, place.state.epoch, place.origin
        order = Order(
            lambda step: addresses.request(epoch, step, origin),
            steps,
            self.expected,
            self.verify,
            self.connections,
            self.deadline,
            parts=addresses.parts(epoch, origin),
        )
        watchers = self.watchers.present()
        return Pass(self.transport, order, arena, self.stage, self.meter, epoch, watchers)

    def part(self, place: Place, part: int, parts: int) -> Iterator[Batch]:
        """Every `parts`-th batch from the `part`-th on, of what is left of the place's epoch: in an arena of
        its own, its share of the budget."""
        steps = range(place.step + part, place.steps, parts)
        if not steps:
            return
        least = 3 * self.stage.memory.capacity(self.expected)
        running = self.begin(place, steps, Arena(max(self.budget // parts, least), self.stage.memory))
        try:
            for _ in steps:
                batch = running.next()
                yield batch
                del batch  # or its slot would be held while waiting for the next
        finally:
            running.close()

    def one(self, epoch: int, step: int, origin: int) -> Batch:
        """A step's batch, in memory of its own."""
        frame = self.transport.call(
            self.addresses.plain(epoch, step, origin),
            lambda response: read_frame(response, step, verify=bool(self.verify)),
            self.deadline,
        )
        return self.stage.finish(self.stage.begin(frame, epoch))

    def subject(self, arena: Arena, source: str) -> Subject:
        """What `mesh doctor` looks into."""
        from meshsdk.doctor.checkups import Subject

        addresses = self.addresses
        return Subject(
            self.transport,
            addresses.plan,
            addresses.batch,
            addresses.rank,
            addresses.world,
            self.stage,
            arena,
            self.expected,
            self.connections,
            bool(self.verify),
            self.deadline,
            source,
        )
