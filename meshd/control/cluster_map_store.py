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

    from meshd.control.control_api import ControlStore, Lease, Versioned
    from meshwire.cluster import ClusterMap

_log = logging.getLogger("meshd.cluster")
TOPIC = "cluster"
_KEY = f"{TOPIC}/map"


class StoreChangedError(ControlError):
    """The control store no longer belongs to this mesh."""


class ClusterMapStore:
    """The map as this process knows it, and the only way to change it."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._seen = (-1, -1)
        self._map: ClusterMap | None = None
        self._version = ABSENT
        self._stored = False  # the entry of this version has the known map
        self._mesh: bytes | None = None
        self.current()

    def __repr__(self) -> str:
        return f"<ClusterMapStore {self._map}>"

    def current(self) -> ClusterMap | None:
        """Returns the newest known map without waiting; None before there is one."""
        seen = self._control.restores, self._control.revision(TOPIC)
        if seen != self._seen:
            entry = self._control.cached_entries(TOPIC).get(_KEY)
            known = self._version if seen[0] == self._seen[0] else ABSENT
            if entry is not None and entry.version != known:
                found = parse_map(entry.value)
                self._adopt(found)
                self._version, self._stored = entry.version, found == self._map
            self._seen = seen
        return self._map

    def _adopt(self, found: ClusterMap) -> None:
        if self._map is None or found.version > self._map.version:
            self._map, self._mesh = found, _value(self._control.cached_entries("mesh").get(MESH_ID))

    async def fetch_version(self) -> int:
        """Returns the map version in the control store, 0 if there is none. If the store has an older map
        than this process, writes the newer one back first. Transfers no map that this process has: all nodes
        ask several times in each lease. Raises ControlError, StoreChangedError."""
        known, restores = self.current(), self._control.restores
        if known is not None and self._stored:
            version = self._version
            same = await self._control.get_version(_KEY) == version
            if same and restores == self._control.restores:
                return known.version
        found = _parse_entry(await self._control.get(_KEY))
        if _is_behind(found, known):
            found = await self.update_map(_leave_unchanged)
        return 0 if found is None else found.version

    async def renew_lease(self, lease: Lease) -> tuple[Lease, int]:
        """Renews a lease; returns it and the map version in the control store, which was read before the
        renewal or, if it is not the known one, after it. Raises LeaseLostError and as `fetch_version`."""
        known, restores, version = self.current(), self._control.restores, self._version
        stored = known is not None and self._stored
        renewed, found = await self._control.renew_lease_and_get_version(lease, _KEY)
        if known is not None and stored and found == version and restores == self._control.restores:
            return renewed, known.version
        return renewed, await self.fetch_version()

    async def update_map(self, change: Callable[[ClusterMap | None], ClusterMap]) -> ClusterMap:
        """Replaces the map by what `change` returns, durably; calls `change` again with the newer map after a
        conflict. Raises what `change` raises (then nothing is written), ControlError, StoreChangedError."""
        while True:
            known = self.current()
            entry = await self._control.get(_KEY)
            present = _parse_entry(entry)
            wanted = change(await self._restore_known_map(known) if _is_behind(present, known) else present)
            if wanted == present:
                return wanted
            try:
                expect = ABSENT if entry is None else entry.version
                await self._control.put(_KEY, wanted.to_stored(), expect=expect)
            except VersionConflictError:
                continue
            return wanted

    async def _restore_known_map(self, known: ClusterMap | None) -> ClusterMap:
        """Returns the known map as the next version, for a store that has an older map. Raises
        StoreChangedError."""
        assert known is not None
        if _value(await self._control.get(MESH_ID)) != self._mesh:
            raise StoreChangedError(
                "the control store was emptied or belongs to another mesh: nothing is written to it; restore "
                "this mesh's control store from its backup"
            )
        _log.warning(
            "the control store has an older map, from a backup: writing the newest known map back",
            extra={"map": known.version},
        )
        return replace(known, version=known.version + 1)


def _parse_entry(entry: Versioned | None) -> ClusterMap | None:
    return None if entry is None else parse_map(entry.value)


def _value(entry: Versioned | None) -> bytes | None:
    return None if entry is None else bytes(entry.value)


def _is_behind(found: ClusterMap | None, known: ClusterMap | None) -> bool:
    """Returns True if the store, which was asked after `known` was seen, has lost it."""
    if known is None or found is None:
        return known is not None
    return found.version < known.version or (found.version == known.version and found != known)


def _leave_unchanged(present: ClusterMap | None) -> ClusterMap:
    assert present is not None
    return present
