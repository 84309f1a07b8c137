"""What goes wrong, when, and for how long: a pure function of a seed.

Law: a gentle schedule hurts one host at a time and waits until the mesh is whole again, so that ordinary
clients should see no error; a harsh one lets faults of several hosts overlap, and only what was acknowledged
has to hold. Faults that destroy data wait for a whole mesh in either: two copies survive one loss, not two.
At the end of each schedule a node is lost for good while another one is in trouble (`Loss`).
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
_BRIEF: Final = 0.7
"""How many of the faults before a loss are shorter than a lease: no node is marked then, and the loss comes
before any node compares."""
JUMPS: Final = (90.0, 240.0, 1200.0, 7200.0, 6 * 3600.0)
"""Seconds: inside the windows of all signatures, of clients' alone, outside both."""
AIMED: Final[tuple[Kind, ...]] = ("pause", "isolate", "partition", "slow", "control", "kill")
"""What befalls the other owner before a node is lost."""
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
        pause = chance.uniform(0.2, 1.5) if harsh else chance.uniform(0.3, 1.5)
        seconds = chance.choice([0.5, 3.0, 6.0]) * chance.uniform(0.7, 1.3)
        if kind == "restart":  # over when the node is up again
            seconds = 0.0
        faults.append(Fault(kind, host, other, pause, seconds, not harsh or kind in DESTRUCTIVE))
    return faults


@dataclass(frozen=True, slots=True)
class Loss:
    """`fault` befalls the other owner of names that `victim` decides about; then the victim is lost, its
    processes and its disk: before that fault ends (`first`), or at the moment at which the map says that all
    nodes are up."""

    victim: int
    fault: Fault
    first: bool

    def __str__(self) -> str:
        when = "before that ended" if self.first else "when all nodes were up"
        return f"{self.fault}; host {self.victim} lost for good {when}"


def loss(seed: int, hosts: int, kinds: Sequence[Kind] = AIMED) -> Loss:
    """The loss at the end of a schedule."""
    chance = random.Random(f"{seed} {hosts} loss")
    victim, other = chance.sample(range(hosts), 2)
    kind = chance.choice([kind for kind in AIMED if kind in kinds] or list(AIMED))
    brief = chance.random() < _BRIEF
    seconds = chance.uniform(0.4, 1.0) if brief else chance.uniform(3.0, 6.0)
    first = brief and kind != "kill" and chance.random() < 0.5
    return Loss(victim, Fault(kind, other, victim, 0.0, seconds, settled=True), first)
