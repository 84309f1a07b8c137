"""Membership of this node: its lease, its place in the map, and its return after it was marked away.

Law: exactly one process of a node, the coordinator, does this. The lease proves that the node is alive
and ties its id to a directory; only the lease holder changes the node's own entry in the map. While the
control store is unreachable nothing changes; the node acquires a new lease afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.control.control_api import ControlError, LeaseLostError
from meshd.errors import StartupError
from meshd.telemetry import metrics
from meshd.util import shared_counters
from meshwire.cluster import transitions as turn

if TYPE_CHECKING:
    from meshd.config import ClusterSettings
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore, Lease
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger(__name__)
_WITH_CONTENT: Final = ("buckets/", "modules/")
_STEP: Final = 0.2
_LONGEST_REST: Final = 30.0


def node_lease_name(node_id: str) -> str:
    """Of the lease that says that a node lives."""
    return f"node/{node_id}"


def id_in_use_message(node_id: str) -> str:
    """What is said to a second daemon of one id."""
    return f"another daemon runs as {node_id}; give this one another --node-id, or stop that one"


class Membership:
    """`me`: the node as it says of itself; `holder`: its id and its directory's."""

    def __init__(
        self,
        control: ControlStore,
        maps: ClusterMapStore,
        me: Node,
        holder: str,
        clock: Clock,
        settings: ClusterSettings,
    ) -> None:
        self._control, self._maps, self._me, self._holder = control, maps, me, holder
        self._clock, self._ttl, self._copies = clock, settings.lease, settings.copies
        self._weighed = settings.weight > 0
        self._lease: Lease | None = None
        self._lost = False
        self._returned, self._rest = -_LONGEST_REST, 0.0

    def __repr__(self) -> str:
        return f"<Membership of {self._me.node_id}{'' if self._lease else ', without its lease'}>"

    async def join(self) -> None:
        """Take the lease and a place in the map. Raises StartupError when somebody else has this id, or the
        map refuses; ControlError."""
        until = self._clock.monotonic() + 2 * self._ttl + 1
        while not await self._hold():
            if self._clock.monotonic() > until:
                raise StartupError(id_in_use_message(self._me.node_id))
            await asyncio.sleep(_STEP)
        try:
            cluster = await self._maps.update_map(self._with_own_node)
        except turn.TransitionError as error:
            raise StartupError(str(error)) from error
        await self._hold()
        _log.info("joined", extra={"node": self._me.node_id, "map": cluster.version})
        await self._settle_empty()

    async def run(self) -> None:
        """For ever: renew the lease, come back when the map says away, settle while nothing is to be
        carried."""
        while True:
            await asyncio.sleep(self._ttl / 4)
            try:
                await self._once()
                self._reached(None)
            except ControlError as error:
                metrics.cluster_control_failures.inc()
                self._reached(error)
            except turn.TransitionError as error:
                _log.warning("the map refuses: %s", error)

    def _reached(self, error: ControlError | None) -> None:
        metrics.cluster_lease_held.set(error is None and self._lease is not None)
        if error is not None and not self._lost:
            _log.warning("the lease is not renewed: %s", error)
        elif error is None and self._lost:
            _log.warning("the control store answers again", extra={"node": self._me.node_id})
        self._lost = error is not None

    async def _once(self) -> None:
        if not await self._hold():
            _log.error("another daemon runs under this node's id", extra={"node": self._me.node_id})
            return
        cluster = self._maps.current()
        mine = None if cluster is None else cluster.node(self._me.node_id)
        if cluster is None or mine is None or mine.state in ("away", "down"):
            await self._return()
        await self._settle_empty()

    async def _hold(self) -> bool:
        """Renew the lease, or take it; whether it is held now. One that was renewed was never lost, so the
        map looked at before is the newest that can have anything against this node, until it may run out."""
        version = await self._maps.fetch_version()
        if self._lease is not None:
            began = self._clock.monotonic()
            with suppress(LeaseLostError):
                self._lease = await self._control.renew_lease(self._lease)
                shared_counters.set_lease(began + self._ttl, version)
                return True
        self._lease = await self._control.acquire_lease(
            node_lease_name(self._me.node_id), self._holder, self._ttl
        )
        return self._lease is not None

    async def _return(self) -> None:
        """Come back. Who is taken for gone again and again rests longer each time: somebody cannot reach
        it."""
        now = self._clock.monotonic()
        if now < self._returned + self._rest:
            return
        often = now < self._returned + self._rest + 4 * self._ttl
        self._rest = min(max(1.0, 2 * self._rest), _LONGEST_REST) if often else 0.0
        self._returned = now
        cluster = await self._maps.update_map(self._with_own_node)
        _log.warning("came back", extra={"node": self._me.node_id, "map": cluster.version})

    def _with_own_node(self, present: ClusterMap | None) -> ClusterMap:
        if present is None:
            return turn.bootstrap_map(self._me, copies=self._copies)
        return turn.join_node(present, self._as_known(present))

    def _as_known(self, cluster: ClusterMap) -> Node:
        """With the weight that the map has, unless this node was told one of its own."""
        known = cluster.node(self._me.node_id)
        return self._me if known is None or self._weighed else replace(self._me, weight=known.weight)

    async def _settle_empty(self) -> None:
        """While there is no bucket, there is nothing to carry. A bucket made later is known only to those who
        know this map: the control store tells everybody of its changes in one order."""
        cluster = self._maps.current()
        if cluster is None or not cluster.must_sync(self._me.node_id):
            return
        for prefix in _WITH_CONTENT:
            if await self._control.list_all(prefix):
                return
        seen = cluster.version

        def settle(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            return turn.mark_complete(present, self._me.node_id, seen)

        with suppress(turn.TransitionError):
            await self._maps.update_map(settle)
