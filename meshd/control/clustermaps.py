"""The cluster map in the control store: one document, changed by comparing and swapping.

Law: of two changes to one version only one happens; the other is worked out again from what there is then. A
side that cannot reach the store changes nothing, and goes on by the last map it saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.control.interface import ABSENT, VersionConflictError
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.control.interface import ControlStore
    from meshwire.cluster import ClusterMap

TOPIC = "cluster"
_KEY = f"{TOPIC}/map"


class ClusterMaps:
    """The map as this process knows it, and the one way to change it."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._seen = -1
        self._map: ClusterMap | None = None
        self._version = ABSENT

    def __repr__(self) -> str:
        return f"<ClusterMaps {self._map}>"

    def current(self) -> ClusterMap | None:
        """The newest map known here, None before there is one. Never waits."""
        revision = self._control.revision(TOPIC)
        if revision != self._seen:
            entry = self._control.peek(TOPIC).get(_KEY)
            if entry is None:
                self._map, self._version = None, ABSENT
            elif entry.version != self._version:
                self._map, self._version = parse_map(entry.value), entry.version
            self._seen = revision
        return self._map

    async def newest(self) -> int:
        """The version of the map that the control store has, 0 before there is one. Raises ControlError."""
        entry = await self._control.get(_KEY)
        return 0 if entry is None else parse_map(entry.value).version

    async def change(self, change: Callable[[ClusterMap | None], ClusterMap]) -> ClusterMap:
        """Replaces the map by what `change` makes of it, durably; called again with the newer map when
        somebody else was quicker. Raises what `change` raises (nothing is written then), ControlError.
        """
        while True:
            entry = await self._control.get(_KEY)
            present = None if entry is None else parse_map(entry.value)
            wanted = change(present)
            if wanted == present:
                return wanted
            try:
                expect = ABSENT if entry is None else entry.version
                await self._control.put(_KEY, wanted.to_json(), expect=expect)
            except VersionConflictError:
                continue
            return wanted
