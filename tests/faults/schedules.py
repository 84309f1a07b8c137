"""What goes wrong, when, and for how long: a pure function of a seed.

Law: a gentle schedule hurts one host at a time and waits until the mesh is whole again, so that ordinary
clients should see no error; a harsh one lets faults overlap, and only what was acknowledged has to hold.
Faults that destroy data wait for a whole mesh in either: two copies survive one loss, not two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal[
    "kill",
    "pause",
    "slow",
    "restart",
    "partition",
    "isolate",
    "control",
    "full",
    "corrupt",
    "replace",
    "clock",
]
KINDS: Final[tuple[Kind, ...]] = (
    "kill",  # SIGKILL to every process, started again after a while
    "pause",  # SIGSTOP, then SIGCONT
    "slow",  # stopped nine tenths of the time, so that every answer is late
    "restart",  # SIGTERM, and started again at once
    "partition",  # from one other host, both ways
    "isolate",  # from every other host and the control store
    "control",  # from the control store alone
    "full",  # no room on the disk
    "corrupt",  # bytes of a data file turned over
    "replace",  # killed, its disk emptied, started again
)
BY_NAME: Final[tuple[Kind, ...]] = (
    "clock",  # its wall clock jumps by minutes or hours, forward or back, and is set right again
)
"""Befall only where they are asked for: clients of that node are refused, and should be."""
JUMPS: Final = (90.0, 240.0, 1200.0, 7200.0, 6 * 3600.0)
"""Seconds: inside the windows of all signatures, of clients' alone, outside both."""
DESTRUCTIVE: Final[frozenset[Kind]] = frozenset({"corrupt", "replace"})
NETWORK: Final[frozenset[Kind]] = frozenset({"partition", "isolate", "control"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` befalls host number `host` (and `other`) for `seconds`; `pause` seconds of peace come before it.
    `settled`: the mesh is whole before it begins."""

    kind: Kind
    host: int
    other: int
    pause: float
    seconds: float
    settled: bool

    def __str__(self) -> str:
        other = f" from {self.other}" if self.kind == "partition" else ""
        return f"{self.kind} host {self.host}{other} for {self.seconds:.1f} s after {self.pause:.1f} s"


def schedule(
    seed: int, hosts: int, length: int, *, harsh: bool = False, kinds: Sequence[Kind] = KINDS
) -> list[Fault]:
    """`length` faults for this many hosts. The same arguments, the same faults."""
    chance, faults = random.Random(f"{seed} {hosts} {harsh}"), list[Fault]()
    for _ in range(length):
        kind = chance.choice(list(kinds))
        host, other = chance.sample(range(hosts), 2)
        pause = chance.uniform(0.2, 1.5) if harsh else chance.uniform(0.5, 3.0)
        seconds = chance.choice([0.5, 3.0, 9.0]) * chance.uniform(0.7, 1.3)
        faults.append(Fault(kind, host, other, pause, seconds, not harsh or kind in DESTRUCTIVE))
    return faults
