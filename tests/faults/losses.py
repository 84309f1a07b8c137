"""A node that acknowledged writes is taken away for good, when the other owner of these names has just been
in trouble, and before any nodes compare.

Law: "the disks of up to N - 1 owners, with time between to make copies again: nothing" (docs/promises.md).
The node is killed when the map of the control store says that all nodes are up, and its disk is taken only if
the map says after that, too, that all others are up; `mesh cluster lost` accepts that without `--anyway`.
Then everything acknowledged has to be at the survivors. Had the map said that another owner is away, what
was acknowledged meanwhile might be lost: then the node is started again on its disk, and the loss tried
again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

    from tests.faults.concurrent_writers import ConcurrentWriters
    from tests.faults.hosts import Hosts
    from tests.faults.schedules import Loss

_TRIES: Final = 3


def lose(world: Hosts, writers: ConcurrentWriters, loss: Loss, chance: random.Random) -> tuple[int, bool]:
    """Let a loss befall, and have the writers read from the survivors what they wrote. How often it was
    tried, and whether the node was lost in the end."""
    for tried in range(1, _TRIES + 1):
        world.whole()
        writers.renew(world.mesh.map_of())
        if _befell(world, writers, loss, chance):
            return tried, True
    return _TRIES, False


def _befell(world: Hosts, writers: ConcurrentWriters, loss: Loss, chance: random.Random) -> bool:
    victim = world.names[loss.victim]
    writers.hurried = True
    try:
        writers.await_bursts(2)
        world.inflict(loss.fault, chance)
        threading.Event().wait(loss.fault.seconds)
        if loss.first:
            world.mesh.kill(victim)
        world.undo(loss.fault)
        if not loss.first and world.await_up():
            world.mesh.kill(victim)
    finally:
        writers.hold()
        writers.hurried = False
    given_up = not world.mesh[victim].running and world.give_up(victim)
    if given_up:
        endpoints = [world.mesh.endpoints[name] for name in world.names if name != victim]
        writers.survived(endpoints)
    if not world.mesh[victim].running:
        world.mesh.up(victim)
    return given_up
