"""Faults of a schedule inflicted and undone, those of several hosts at once where the schedule lets them.

Law: one host has one fault at a time. A settled fault begins when all others have ended and the mesh is
whole, and ends before the next one begins. After `finish` nothing is left of any.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tests.faults.hosts import Hosts
    from tests.faults.schedules import Fault


class Injector:
    """`with Injector(world, seed) as injector: injector.inflict(fault)`. `injected`: how many were."""

    def __init__(self, world: Hosts, seed: int) -> None:
        self.injected = 0
        self._world, self._seed, self._idle = world, seed, threading.Event()
        self._pool = ThreadPoolExecutor(len(world.names), "injector")
        self._busy = dict[int, "Future[None]"]()

    def __repr__(self) -> str:
        return f"<Injector of {self.injected} faults into {self._world}>"

    def inflict(self, fault: Fault) -> None:
        """Begin with a fault; return when it has ended, if it is a settled one."""
        hosts = [fault.host, fault.other] if fault.kind == "partition" else [fault.host]
        if fault.settled:
            self.finish()
            self._world.whole()
        for host in hosts:
            if host in self._busy:
                self._busy.pop(host).result()
        self._idle.wait(fault.pause)
        begun = self._pool.submit(self._befall, fault, random.Random(f"{self._seed} {self.injected}"))
        self.injected += 1
        self._busy |= dict.fromkeys(hosts, begun)
        if fault.settled:
            self.finish()

    def finish(self) -> None:
        """Wait for the end of all. Raises what went wrong in inflicting or undoing one."""
        while self._busy:
            self._busy.popitem()[1].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._idle.set()
        self._pool.shutdown()

    def _befall(self, fault: Fault, chance: random.Random) -> None:
        self._world.inflict(fault, chance)
        try:
            self._idle.wait(fault.seconds)
        finally:
            self._world.undo(fault)
