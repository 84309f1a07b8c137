"""Who is up: one byte a process in memory shared by the supervisor (writes) and its children (read).

Law: the supervisor alone writes. Made before the first fork; needs no lock, for a byte is written whole.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Phase(IntEnum):
    """What a process, or the node, is doing."""

    DOWN = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


class Board:
    """Phases of the node and of its processes, by name; nobody waits for those that start `on_demand`."""

    def __init__(self, names: Sequence[str], on_demand: Sequence[str] = ()) -> None:
        self._slots = {name: index for index, name in enumerate(("", *names, *on_demand))}
        self._on_demand = frozenset(on_demand)
        self._page = mmap.mmap(-1, max(len(self._slots), mmap.PAGESIZE))
        self.node = Phase.STARTING

    def __repr__(self) -> str:
        return f"<Board {self.node.name} { ({name: self[name].name for name in self._slots if name}) }>"

    @property
    def node(self) -> Phase:
        """The node as a whole."""
        return self[""]

    @node.setter
    def node(self, phase: Phase) -> None:
        self[""] = phase

    def __getitem__(self, name: str) -> Phase:
        return Phase(self._page[self._slots[name]])

    def __setitem__(self, name: str, phase: Phase) -> None:
        self._page[self._slots[name]] = phase

    def names(self, role: str) -> list[str]:
        """The processes of a role: `worker`, `steward`, `transform`."""
        return [name for name in self._slots if name.partition("-")[0] == role]

    def trouble(self) -> str:
        """Why the node should get no traffic; empty when it should."""
        if self.node is not Phase.READY:
            needed = [name for name in self._slots if name and name not in self._on_demand]
            waiting = [name for name in needed if self[name] is not Phase.READY]
            return f"the node is {self.node.name.lower()}" + (f": {', '.join(waiting)}" if waiting else "")
        if any(self[name] is not Phase.READY for name in self.names("steward")):
            return "the steward is being restarted"
        transforms = self.names("transform")
        if transforms and all(self[name] is not Phase.READY for name in transforms):
            return "no transform process is up"
        return ""
