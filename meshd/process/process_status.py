"""ProcessStatus: what state the node and each of its processes are in, for all of them to read.

Phases are one byte each in shared memory, allocated before the first fork; only the supervisor writes.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Phase(IntEnum):
    """The state of a process or of the node."""

    DOWN = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


class ProcessStatus:
    """Phases of the node and of its processes, by name. The node's readiness ignores `on_demand`
    processes."""

    def __init__(self, names: Sequence[str], on_demand: Sequence[str] = ()) -> None:
        self._slots = {name: index for index, name in enumerate(("", *names, *on_demand))}
        self._on_demand = frozenset(on_demand)
        self._page = mmap.mmap(-1, max(len(self._slots), mmap.PAGESIZE))
        self.node_phase = Phase.STARTING

    def __repr__(self) -> str:
        phases = {name: self[name].name for name in self._slots if name}
        return f"<ProcessStatus {self.node_phase.name} {phases}>"

    @property
    def node_phase(self) -> Phase:
        """The phase of the node as a whole."""
        return self[""]

    @node_phase.setter
    def node_phase(self, phase: Phase) -> None:
        self[""] = phase

    def __getitem__(self, name: str) -> Phase:
        return Phase(self._page[self._slots[name]])

    def __setitem__(self, name: str, phase: Phase) -> None:
        self._page[self._slots[name]] = phase

    def names_of_role(self, role: str) -> list[str]:
        """Return the processes of a role: `worker`, `coordinator`, `transform`."""
        return [name for name in self._slots if name.partition("-")[0] == role]

    def unready_reason(self) -> str:
        """Return why the node should get no traffic; empty if it should."""
        if self.node_phase is not Phase.READY:
            needed = [name for name in self._slots if name and name not in self._on_demand]
            waiting = [name for name in needed if self[name] is not Phase.READY]
            return f"the node is {self.node_phase.name.lower()}" + (
                f": {', '.join(waiting)}" if waiting else ""
            )
        if any(self[name] is not Phase.READY for name in self.names_of_role("coordinator")):
            return "the coordinator is being restarted"
        transforms = self.names_of_role("transform")
        if transforms and all(self[name] is not Phase.READY for name in transforms):
            return "no transform process is up"
        return ""
