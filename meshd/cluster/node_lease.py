"""The lease that proves that a node is alive: acquired, renewed and released by the node, seen by all others.

Law: exactly one process of a node holds it, the coordinator. All processes of the node read in the shared
counters until when it holds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.control.control_api import ControlError, LeaseLostError
from meshd.util import shared_counters
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore, Lease
    from meshd.util.clock import Clock

_RELEASE_S: Final = 1.0


def node_lease_name(node_id: str) -> str:
    """Returns the name of the lease that proves that a node is alive."""
    return f"node/{node_id}"


async def live_nodes(control: ControlStore) -> set[str]:
    """Returns the ids of the nodes that hold their leases. Raises ControlError."""
    prefix = node_lease_name("")
    return {name[len(prefix) :] for name in await control.lease_holders(prefix)}


class NodeLease:
    """This node's lease. `holder`: the node's id and its directory's; `ttl`: seconds that it holds after a
    renewal."""

    def __init__(
        self,
        control: ControlStore,
        maps: ClusterMapStore,
        node_id: str,
        holder: str,
        clock: Clock,
        ttl: float,
    ) -> None:
        self._control, self._maps, self._clock = control, maps, clock
        self._name, self._holder, self._ttl = node_lease_name(node_id), holder, ttl
        self._lease: Lease | None = None
        self._renewal: asyncio.Future[tuple[Lease, int]] | None = None

    def __repr__(self) -> str:
        return f"<NodeLease {self._name}, {'held' if self.held else 'not held'}>"

    @property
    def held(self) -> bool:
        """Whether this process has acquired it and has not heard that it was lost."""
        return self._lease is not None

    async def renew(self) -> bool:
        """Renews or acquires the lease; returns False if another daemon holds it. Raises ControlError.

        A renewed lease was never lost. So no map version that is newer than the one read with the renewal can
        exclude this node until the lease may expire.
        """
        if self._lease is not None:
            # Taken before the renewal: a slow answer must shorten the lease, never lengthen it.
            began = self._clock.monotonic()
            # Shielded: a renewal that is cancelled may reach the engine, and `release` has to know its lease.
            self._renewal = asyncio.ensure_future(self._maps.renew_lease(self._lease))
            with suppress(LeaseLostError):
                self._lease, version = await asyncio.shield(self._renewal)
                shared_counters.set_lease(began + self._ttl, version)
                return True
        await self._maps.fetch_version()
        self._lease = await self._control.acquire_lease(self._name, self._holder, self._ttl)
        return self.held

    async def release(self) -> None:
        """Releases the lease, which until then would let writes wait for a node that ended in order. First
        this node stops to rely on it."""
        shared_counters.set_lease(0.0, 0)
        lease, self._lease = self._lease, None
        renewal, self._renewal = self._renewal, None
        if lease is not None:
            with suppress(ControlError, TimeoutError):
                async with timeout(_RELEASE_S):
                    if renewal is not None:
                        with suppress(ControlError):
                            lease, _ = await renewal
                    await self._control.release_lease(lease)
