"""Clients and a training job at work on a mesh while a schedule of faults befalls it; then the question what
is wrong."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from meshd.util.shared_counters import NICE_FAILPOINT
from tests.faults.clients import BUCKET, Crowd, final_values, now
from tests.faults.concurrent_writers import ConcurrentWriters
from tests.faults.epochs import EPOCHS, References, Trainer, connect, fill
from tests.faults.givenup import check_haste
from tests.faults.hasty import HastyCrowd, final_haste
from tests.faults.history import check
from tests.faults.hosts import Hosts
from tests.faults.injector import Injector
from tests.faults.losses import lose
from tests.faults.registers import check_registers
from tests.faults.schedules import loss, schedule
from tests.support.daemons import with_failpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.schedules import Fault, Kind

SAMPLES: Final = 96
_TOLD = ("InsufficientStorage", "FlexibleChecksumError", "RequestTimeTooSkewed")
"""What clients are told, and should be, when the disk of a node with a copy is full, of a large object that
is damaged and was not scrubbed yet, and by a node whose clock has jumped."""


@dataclass
class Outcome:
    """`faults`: what is wrong; `errors`: what S3 clients were told until the loss at the end; `counts`: how
    much they did; `injected`: how many faults befell; `lost`: how many nodes were lost for good; `seconds`:
    what the parts of the run took ("until whole" is a part of "work"). A training job is told of nothing: an
    error of its is a fault."""

    seed: int
    harsh: bool = False
    schedule: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    injected: int = 0
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def unexpected(self) -> list[str]:
        """Errors that ordinary clients do not see while one host at a time is in trouble."""
        return [error for error in self.errors if not any(told in error for told in _TOLD)]

    @property
    def wrong(self) -> bool:
        """Whether the promises were broken, as far as this schedule tries them."""
        return bool(self.faults) or (bool(self.unexpected) and not self.harsh)

    @property
    def acknowledged(self) -> int:
        """How many writes of all clients were acknowledged."""
        return sum(self.counts[name] for name in ("done", "hasty done", "concurrent done"))

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.counts} in {self.seconds}", *self.schedule]
        return "\n  ".join([*lines, *self.errors[:20], *[f"WRONG: {fault}" for fault in self.faults[:20]]])


class Testbed:
    """A mesh with data to train on, for one schedule after the other: between `__enter__` and `__exit__`.
    What moves its data gives way to clients by its pauses, not by its niceness: the machine is never idle."""

    __test__ = False  # pytest is not to take it for a test

    def __init__(self, hosts: int = 3) -> None:
        self._ends = ExitStack()
        self._world = Hosts(hosts)
        self._keys = (self._world.mesh.access_key, self._world.mesh.secret_key)

    def __repr__(self) -> str:
        return f"<Testbed {self._world}>"

    def __enter__(self) -> Self:
        world = self._ends.enter_context(self._world)
        self._ends.enter_context(with_failpoints(f"{NICE_FAILPOINT}=error"))
        try:
            world.start()
            world.mesh["n1"].client().create_bucket(Bucket=BUCKET)
            self._endpoints = list(world.mesh.endpoints.values())
            with connect(self._endpoints, self._keys) as client:
                fill(client, SAMPLES)
        except BaseException:
            self._ends.close()
            raise
        self._references = References(self._endpoints, self._keys)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def run(
        self, seed: int, length: int, *, harsh: bool = False, kinds: Sequence[Kind] | None = None
    ) -> Outcome:
        """One schedule, and the loss of a node after it. The logs are printed when something is wrong."""
        chosen = kinds or self._world.kinds
        plan = schedule(seed, len(self._world.names), length, harsh=harsh, kinds=chosen)
        outcome = Outcome(seed, harsh)
        began, waited = now(), self._world.waited
        _ = self._references[seed % EPOCHS]
        work = _Work(self._world, self._endpoints, self._keys, seed)
        try:
            self._befall(outcome, plan, work)
        except BaseException:
            print(self._world.mesh.output())
            raise
        finally:
            work.stop()
        ended = now()
        work.tell(outcome, self._references)
        spent = {"work": ended - began, "until whole": self._world.waited - waited, "checks": now() - ended}
        outcome.seconds = {part: round(seconds, 1) for part, seconds in spent.items()}
        if outcome.faults:
            tell(self._world, outcome.faults)
        return outcome

    def _befall(self, outcome: Outcome, plan: Sequence[Fault], work: _Work) -> None:
        world, seed = self._world, outcome.seed
        work.start()
        threading.Event().wait(1.0)
        with Injector(world, seed) as injector:
            for fault in plan:
                outcome.schedule.append(f"at {now():.1f}: {fault}")
                injector.inflict(fault)
            injector.finish()
        world.whole()
        outcome.errors = work.crowd.errors
        outcome.schedule.append(f"at {now():.1f}: {work.loss}")
        tries, lost = lose(world, work.writers, work.loss, random.Random(f"{seed} loss"))
        if tries > 1:
            outcome.schedule.append(f"tried {tries} times, as another node was not up after the kill")
        outcome.lost = int(lost)
        outcome.injected = injector.injected + tries + outcome.lost
        world.whole()


class _Work:
    """All clients of one schedule."""

    def __init__(self, world: Hosts, endpoints: list[str], keys: tuple[str, str], seed: int) -> None:
        self._world, self._endpoints, self._keys = world, endpoints, keys
        self.loss = loss(seed, len(world.names), world.kinds)
        owners = (world.names[self.loss.victim], world.names[self.loss.fault.host])
        self.crowd = Crowd(endpoints, keys, seed)
        self._hasty = HastyCrowd(world, keys, seed)
        self.writers = ConcurrentWriters(world.mesh.endpoints, keys, seed, *owners)
        self._trainer = Trainer(endpoints, keys, first=seed % EPOCHS)

    def start(self) -> None:
        self.crowd.start()
        self._hasty.start()
        self._trainer.start()
        self.writers.start(self._world.mesh.map_of())

    def stop(self) -> None:
        """The last operations of all have ended."""
        with ThreadPoolExecutor(4) as pool:
            ends = (self.crowd.stop, self._hasty.stop, self._trainer.stop, self.writers.stop)
            for stopped in [pool.submit(end) for end in ends]:
                stopped.result()

    def tell(self, outcome: Outcome, references: References) -> None:
        """Put into an outcome what they saw, and what was wrong."""
        history, haste, seen = self.crowd.stop(), self._hasty.stop(), self.writers.seen
        outcome.counts = history.counts() | haste.counts() | seen.counts()
        outcome.counts["steps"] = len(self._trainer.steps)
        outcome.faults += self._trainer.check(references)
        with ThreadPoolExecutor(len(self._endpoints)) as pool:
            finals = pool.map(lambda at: final_values(at, self._keys, history), self._endpoints)
            hasty = pool.map(lambda at: final_haste(at, self._keys, haste), self._endpoints)
            concurrent = pool.map(self.writers.final, self._endpoints)
            for final in finals:
                outcome.faults += check(history, final)
            outcome.faults += check_haste(haste, list(hasty), self._hasty.marks)
            outcome.faults += check_registers(seen, list(concurrent), self._hasty.marks)
        outcome.faults = list(dict.fromkeys(outcome.faults))  # several nodes may show the same


def tell(world: Hosts, faults: Sequence[str]) -> None:
    """Prints what there is to find out why: logs, maps, what was asked about the keys that are wrong, and
    what every node has of them."""
    print(world.mesh.output(), *world.maps(), sep="\n")
    keys = {
        word.rstrip(":") for fault in faults for word in fault.split() if word.rstrip(":").count("/") == 1
    }
    for key in sorted(keys)[:5]:
        print(f"=== {key}", *world.told(key), *world.holdings(key), sep="\n")
