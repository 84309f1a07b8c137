"""A crowd of clients and a training job at work on a mesh while a schedule befalls it; then the question what
is wrong."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.faults.clients import BUCKET, Crowd, final_values
from tests.faults.epochs import Trainer, connect, epoch, fill
from tests.faults.givenup import check_haste
from tests.faults.hasty import HastyCrowd, final_haste
from tests.faults.history import check
from tests.faults.hosts import Hosts
from tests.faults.schedules import schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.schedules import Fault, Kind

SAMPLES = 96
_TOLD = ("InsufficientStorage", "FlexibleChecksumError")
"""What clients are told, and should be, when the deciding node's disk is full, and of a large object that is
damaged and was not scrubbed yet."""


@dataclass
class Outcome:
    """`faults`: what is wrong; `errors`: what S3 clients were told; `counts`: how much they did. A training
    job is told of nothing: an error of its is a fault."""

    seed: int
    schedule: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def unexpected(self) -> list[str]:
        """Errors that ordinary clients do not see while one host at a time is in trouble."""
        return [error for error in self.errors if not any(told in error for told in _TOLD)]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.counts}", *self.schedule]
        return "\n  ".join([*lines, *self.errors[:20], *[f"WRONG: {fault}" for fault in self.faults[:20]]])


def run(
    seed: int,
    length: int,
    *,
    hosts: int = 3,
    harsh: bool = False,
    kinds: Sequence[Kind] | None = None,
) -> Outcome:
    """One mesh, one crowd, one schedule. The mesh's log is printed when something is wrong."""
    outcome, chance, idle = Outcome(seed), random.Random(seed), threading.Event()
    with Hosts(hosts) as world:
        world.start()
        mesh = world.mesh
        keys = (mesh.access_key, mesh.secret_key)
        mesh["n1"].client().create_bucket(Bucket=BUCKET)
        endpoints = list(mesh.endpoints.values())
        with connect(endpoints, keys) as client:
            fill(client, SAMPLES)
        undisturbed = list(epoch(endpoints, keys, 0))
        plan = schedule(seed, hosts, length, harsh=harsh, kinds=kinds or world.kinds)
        crowd, trainer = Crowd(endpoints, keys, seed), Trainer(endpoints, keys)
        hasty = HastyCrowd(world, keys, seed)
        crowd.start()
        hasty.start()
        trainer.start()
        try:
            idle.wait(1.0)
            for fault in plan:
                outcome.schedule.append(str(fault))
                befall(world, fault, chance, idle)
            world.whole()
        except BaseException:
            print(mesh.output())
            raise
        finally:
            history, haste = crowd.stop(), hasty.stop()
            trainer.stop()
        outcome.errors = crowd.errors
        outcome.counts = history.counts() | haste.counts() | {"steps": len(trainer.steps)}
        outcome.faults += trainer.check(endpoints)
        for step, digest in enumerate(undisturbed):
            if trainer.steps.get((0, step), digest) != digest:
                outcome.faults.append(f"step {step} of the first epoch is not as before the first fault")
        for endpoint in endpoints:
            outcome.faults += check(history, final_values(endpoint, keys, history))
        ends = [final_haste(endpoint, keys, haste) for endpoint in endpoints]
        outcome.faults += check_haste(haste, ends, hasty.marks)
        if outcome.faults:
            tell(world, outcome.faults)
    return outcome


def tell(world: Hosts, faults: Sequence[str]) -> None:
    """Prints what there is to find out why: logs, maps, what was asked about the keys that are wrong, and
    what every node has of them."""
    print(world.mesh.output(), *world.maps(), sep="\n")
    keys = {
        word.rstrip(":") for fault in faults for word in fault.split() if word.rstrip(":").count("/") == 1
    }
    for key in sorted(keys)[:5]:
        print(f"=== {key}", *world.told(key), *world.holdings(key), sep="\n")


def befall(world: Hosts, fault: Fault, chance: random.Random, idle: threading.Event) -> None:
    """From the peace before it to its end."""
    if fault.settled:
        world.whole()
    idle.wait(fault.pause)
    world.inflict(fault, chance)
    idle.wait(fault.seconds)
    world.undo(fault)
