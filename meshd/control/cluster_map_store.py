"""Cluster map in the control store: one document, changed by compare-and-swap.

Law: of two changes to one version only one succeeds; the other is computed again on the new version. A
node that cannot reach the store changes nothing and keeps its last map. Invariant: no node returns to a
map older than one it has seen. An older map in the store comes from a backup: the newest known map is
written back, because it says where the objects are. A store that lost the cluster's identity is not
written to.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.control.control_api import ABSENT, MESH_ID, ControlError, VersionConflictError
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.control.control_api import ControlStore, Versioned
    from meshwire.cluster import ClusterMap

_log = logging.getLogger("meshd.cluster")
TOPIC = "cluster"
_KEY = f"{TOPIC}/map"


class StoreChangedError(ControlError):
    """The control store is not this mesh's any more."""


class ClusterMapStore:
    """The map as this process knows it, and the one way to change it."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._seen = (-1, -1)
        self._map: ClusterMap | None = None
        self._version = ABSENT
        self._mesh: bytes | None = None
        self.current()

    def __repr__(self) -> str:
        return f"<ClusterMaps {self._map}>"

    def current(self) -> ClusterMap | None:
        """The newest map known here, None before there is one. Never waits."""
        seen = self._control.restores, self._control.revision(TOPIC)
        if seen != self._seen:
            entry = self._control.cached_entries(TOPIC).get(_KEY)
            known = self._version if seen[0] == self._seen[0] else ABSENT
            if entry is not None and entry.version != known:
                self._learn(parse_map(entry.value))
                self._version = entry.version
            self._seen = seen
        return self._map

    def _learn(self, found: ClusterMap) -> None:
        if self._map is None or found.version > self._map.version:
            self._map, self._mesh = found, _value(self._control.cached_entries("mesh").get(MESH_ID))

    async def fetch_version(self) -> int:
        """The version of the map that the control store has, 0 before there is one; a store with an older one
        than is known here is given that back first. Raises ControlError, StoreChangedError."""
        known = self.current()
        found = _parsed(await self._control.get(_KEY))
        if _is_behind(found, known):
            found = await self.update_map(_as_it_is)
        return 0 if found is None else found.version

    async def update_map(self, change: Callable[[ClusterMap | None], ClusterMap]) -> ClusterMap:
        """Replaces the map by what `change` makes of it, durably; called again with the newer map when
        somebody else was quicker. Raises what `change` raises (nothing is written then), ControlError,
        StoreChangedError.
        """
        while True:
            known = self.current()
            entry = await self._control.get(_KEY)
            present = _parsed(entry)
            wanted = change(await self._put_back(known) if _is_behind(present, known) else present)
            if wanted == present:
                return wanted
            try:
                expect = ABSENT if entry is None else entry.version
                await self._control.put(_KEY, wanted.to_json(), expect=expect)
            except VersionConflictError:
                continue
            return wanted

    async def _put_back(self, known: ClusterMap | None) -> ClusterMap:
        """The known map as the next version, in a store that has an older one. Raises StoreChangedError."""
        assert known is not None
        if _value(await self._control.get(MESH_ID)) != self._mesh:
            raise StoreChangedError(
                "the control store was emptied, or is another mesh's: nothing is written to it; put this "
                "mesh's back from its backup"
            )
        _log.warning(
            "the control store has an older map, from a backup: the newest known is put back",
            extra={"map": known.version},
        )
        return replace(known, version=known.version + 1)


def _parsed(entry: Versioned | None) -> ClusterMap | None:
    return None if entry is None else parse_map(entry.value)


def _value(entry: Versioned | None) -> bytes | None:
    return None if entry is None else bytes(entry.value)


def _is_behind(found: ClusterMap | None, known: ClusterMap | None) -> bool:
    """Whether the store, which was asked after `known` was seen, has lost that."""
    if known is None or found is None:
        return known is not None
    return found.version < known.version or (found.version == known.version and found != known)


def _as_it_is(present: ClusterMap | None) -> ClusterMap:
    assert present is not None
    return present
