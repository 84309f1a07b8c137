"""How many names have fewer copies than asked for, counted by those that decide about them.

Law: counted, not reckoned: a node goes through its names when the map says that some have too few copies, and
not otherwise. Slow on purpose: at most a twentieth of the time, behind clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.cluster.comparing import scope_of
from meshd.cluster.offers import InventoryWanted
from meshd.cluster.redundancy import short_slots
from meshwire.cluster import routes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshd.cluster.comparing import Scope
    from meshd.cluster.mesh import Mesh
    from meshd.cluster.offers import Offers
    from meshd.kit.clock import Clock

_EVERY: Final = 60.0
_SPARING: Final = 20.0
_PAGE: Final = 1000


class Debts:
    """One a node, in its steward. `copies`: of every bucket there is, as `routes` takes them."""

    def __init__(self, mesh: Mesh, offers: Offers, copies: Callable[[], Iterable[int]], clock: Clock) -> None:
        self._mesh, self._offers, self._copies, self._clock = mesh, offers, copies, clock
        self._version, self._again = 0, 0.0
        self.names = 0
        """Of those that this node decides about."""

    def __repr__(self) -> str:
        return f"<Debts of {self._mesh.node_id}: {self.names}>"

    async def count(self) -> int:
        """Look again where that is due; how many there are."""
        cluster, began = self._mesh.map(), self._clock.monotonic()
        if self._mesh.alone or (cluster.version == self._version and began < self._again):
            return self.names
        scope = self._short()
        self.names = await self._counted(scope) if scope else 0
        now = self._clock.monotonic()
        self._version, self._again = cluster.version, now + max(_EVERY, _SPARING * (now - began))
        return self.names

    def _short(self) -> Scope | None:
        """Slots with too few copies of which this node decides."""
        cluster = self._mesh.map()
        masks = {}
        for number in {cluster.copies, *self._copies()}:
            short = short_slots(cluster, number)
            if short.any():
                short = short & routes(cluster, number).decided_by(self._mesh.node_id)
            masks[number] = short
        return scope_of(masks, cluster.slots) if any(mask.any() for mask in masks.values()) else None

    async def _counted(self, scope: Scope) -> int:
        found, after = 0, b""
        while True:
            page = await self._offers.inventory(InventoryWanted(scope, after, _PAGE))
            found += sum(any(not each.marker for each in held.versions) for held in page.names)
            after = page.after
            if not after:
                return found
