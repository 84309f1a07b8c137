"""What befalls a mesh while clients work on it: a pure plan by seed, and the hands that carry it out.

Law: faults of one step begin and end together and have different hosts; whatever was done is undone before
the next step. Beyond the faults of tests.faults: single processes, all processes of a node at one blow, etcd,
and connections between two nodes that are refused at once instead of falling silent.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

from tests.faults import schedules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.hosts import Hosts
    from tests.support.daemons import Daemon

Kind = Literal[
    "kill",
    "kill-all",
    "kill-process",
    "pause",
    "pause-process",
    "pause-supervisor",
    "pause-etcd",
    "kill-etcd",
    "slow",
    "restart",
    "partition",
    "refuse",
    "isolate",
    "control",
    "full",
]
KINDS: Final[dict[Kind, str]] = {
    "kill": "SIGKILL to the supervisor; its processes end with it",
    "kill-all": "SIGKILL to every process of a node at one blow",
    "kill-process": "SIGKILL to one worker, coordinator, rebalancer or transform process",
    "pause": "SIGSTOP to every process of a node, then SIGCONT",
    "pause-process": "SIGSTOP to one process, then SIGCONT",
    "pause-supervisor": "SIGSTOP to the supervisor alone, then SIGCONT",
    "pause-etcd": "SIGSTOP to etcd, then SIGCONT",
    "kill-etcd": "SIGKILL to etcd, started again on its data",
    "slow": "stopped nine tenths of the time",
    "restart": "SIGTERM, and started again at once",
    "partition": "two nodes do not reach each other: silence",
    "refuse": "two nodes do not reach each other: an error at once",
    "isolate": "a node reaches neither nodes nor etcd; clients reach it",
    "control": "a node does not reach etcd alone",
    "full": "no room on the disk",
}
NETWORK: Final[frozenset[Kind]] = frozenset({"partition", "refuse", "isolate", "control"})
PAIRS: Final[frozenset[Kind]] = frozenset({"partition", "refuse"})
"""Two nodes do not reach each other, and both reach etcd."""
_ETCD: Final[frozenset[Kind]] = frozenset({"pause-etcd", "kill-etcd"})
_LATE: Final[frozenset[Kind]] = frozenset({"kill", "kill-all"})
"""What is undone last: a node that starts needs etcd, its disk and the others."""
_BY_HOSTS: Final = {"kill", "pause", "slow", "restart", "partition", "isolate", "control", "full"}


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` befalls host number `host` (and `other`)."""

    kind: Kind
    host: int
    other: int

    def __str__(self) -> str:
        if self.kind in _ETCD:
            return self.kind
        return f"{self.kind} n{self.host + 1}" + (f" from n{self.other + 1}" if self.kind in PAIRS else "")


@dataclass(frozen=True, slots=True)
class Step:
    """After `pause` seconds of peace these faults, for `seconds`."""

    pause: float
    seconds: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.faults))} for {self.seconds:.1f} s"


def plan(seed: int, hosts: int, seconds: float, kinds: Sequence[Kind] = tuple(KINDS)) -> list[Step]:
    """Steps that take this long together, not counting what starting nodes takes. The same arguments, the
    same steps."""
    chance, steps, length = random.Random(f"{seed} {hosts}"), list[Step](), 0.0
    while kinds and length < seconds:
        pause = chance.uniform(0.1, 2.0)
        lasts = chance.choice([0.3, 1.0, 3.0, 8.0]) * chance.uniform(0.7, 1.3)
        order = chance.sample(range(hosts), hosts)
        chosen = chance.sample(list(kinds), min(len(kinds), chance.choice([1, 1, 2])))
        faults = [Fault(kind, order[n], order[n - 1]) for n, kind in enumerate(chosen)]
        for alike in (NETWORK, _ETCD | {"restart"}):
            if sum(fault.kind in alike for fault in faults) > 1:
                faults = faults[:1]  # healing one heals all; there is one etcd, and no node starts without it
        steps.append(Step(pause, lasts, tuple(faults)))
        length += pause + lasts
    return steps


class Hands:
    """Carries steps out. `seed`: of what a step leaves open, such as which process."""

    def __init__(self, world: Hosts, seed: int) -> None:
        self._world, self._chance = world, random.Random(seed)
        self._stopped: dict[Fault, int] = {}

    def __repr__(self) -> str:
        return f"<Hands on {self._world!r}>"

    def begin(self, step: Step) -> None:
        """All faults of it."""
        for fault in step.faults:
            self._begin(fault)

    def end(self, step: Step) -> None:
        """Undoes them: connections, etcd and what stands still first, then nodes start, together."""
        for fault in step.faults:
            if fault.kind not in _LATE:
                self._end(fault)
        with ThreadPoolExecutor(4) as pool:
            late = [fault for fault in step.faults if fault.kind in _LATE]
            for done in [pool.submit(self._node(fault).up) for fault in late]:
                done.result()

    def _node(self, fault: Fault) -> Daemon:
        return self._world.mesh[self._world.names[fault.host]]

    def _begin(self, fault: Fault) -> None:
        node, etcd = self._node(fault), self._world.mesh.etcd
        match fault.kind:
            case "kill-all":
                for pid in [node.pid, *node.children().values()]:
                    _signal(pid, signal.SIGKILL)
                node.kill()
            case "kill-process" | "pause-process":
                pid = self._chance.choice(sorted(node.children().items()))[1]
                self._stopped[fault] = pid
                _signal(pid, signal.SIGKILL if fault.kind == "kill-process" else signal.SIGSTOP)
            case "pause-supervisor":
                os.kill(node.pid, signal.SIGSTOP)
            case "pause-etcd":
                etcd.signal_member(0, signal.SIGSTOP)
            case "kill-etcd":
                etcd.kill_member(0)
            case "refuse":
                self._refuse(fault, "add")
            case _:
                self._world.inflict(_as_schedules(fault), self._chance)

    def _end(self, fault: Fault) -> None:
        node, etcd = self._node(fault), self._world.mesh.etcd
        match fault.kind:
            case "kill-process":
                pass
            case "pause-process":
                if self._stopped[fault] in node.children().values():
                    _signal(self._stopped[fault], signal.SIGCONT)
            case "pause-supervisor":
                os.kill(node.pid, signal.SIGCONT)
            case "pause-etcd" | "kill-etcd":
                etcd.start_all()
            case "refuse":
                self._refuse(fault, "del")
            case _:
                self._world.undo(_as_schedules(fault))

    def _refuse(self, fault: Fault, verb: str) -> None:
        """Both hosts say at once that there is no way to the other."""
        networks = self._world.networks
        assert networks is not None
        for host, other in ((fault.host, fault.other), (fault.other, fault.host)):
            route = ["ip", "route", verb, "unreachable", f"{networks.address(other)}/32"]
            subprocess.run([*networks.prefix(host), *route], check=True, capture_output=True, timeout=20)


def possible(world: Hosts) -> list[Kind]:
    """What can be done here."""
    without = set() if world.networks is not None else {*NETWORK, "full"}
    return [kind for kind in KINDS if kind not in without]


def _as_schedules(fault: Fault) -> schedules.Fault:
    assert fault.kind in _BY_HOSTS
    return schedules.Fault(cast("schedules.Kind", fault.kind), fault.host, fault.other, 0.0, 0.0, False)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
