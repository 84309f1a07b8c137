"""Membership of this node: its lease, its place in the map, and its return after it was marked away.

Law: exactly one process of a node, the coordinator, does this. The lease proves that the node is alive
and ties its id to a directory; only the lease holder writes the node's own entry in the map.
While the control store is unreachable nothing changes; the node acquires a new lease afterwards.
A node whose disk hangs marks itself away for as long as that lasts, if other nodes have all of its data:
otherwise every write of its share would wait for the disk.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Final

from meshd.cluster.batched_map_changes import enter_node
from meshd.cluster.node_lease import NodeLease
from meshd.control.control_api import ControlError
from meshd.errors import StartupError
from meshd.telemetry import metrics
from meshd.util import shared_counters
from meshwire.cluster import transitions

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.config import ClusterSettings
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger(__name__)
_WITH_CONTENT: Final = ("buckets/", "modules/")
_STEP: Final = 0.2
_END_CHECK_SECONDS: Final = 1.25
"""The longest time between two checks whether the node is shutting down."""
_LONGEST_REST: Final = 30.0


def id_in_use_message(node_id: str) -> str:
    """Returns the error text for a second daemon with the same id."""
    return f"another daemon runs as {node_id}; give this one another --node-id, or stop the other one"


class Membership:
    """This node's membership in the cluster. `me`: the node's own entry; `holder`: its id and its
    directory's. `hanging`: whether a disk has not answered for so long that the node is to leave its share
    to the others; `fewest_copies`: of any bucket."""

    def __init__(
        self,
        control: ControlStore,
        maps: ClusterMapStore,
        me: Node,
        holder: str,
        clock: Clock,
        settings: ClusterSettings,
        hanging: Callable[[], bool] = lambda: False,
        fewest_copies: Callable[[], int] = lambda: 1,
    ) -> None:
        self._hanging, self._fewest_copies = hanging, fewest_copies
        self._control, self._maps, self._me = control, maps, me
        self._clock, self._ttl = clock, settings.lease
        self._copies, self._slots = settings.copies, settings.slots
        self._weighed = settings.weight > 0
        self._lease = NodeLease(control, maps, me.node_id, holder, clock, settings.lease)
        self._control_lost = False
        self._last_rejoin, self._rejoin_delay = -_LONGEST_REST, 0.0

    def __repr__(self) -> str:
        return f"<Membership of {self._me.node_id}{'' if self._lease.held else ', without its lease'}>"

    async def join(self) -> None:
        """Acquires the lease and a place in the map. Raises StartupError if another daemon has this id or the
        map rejects the node; ControlError."""
        until = self._clock.monotonic() + 2 * self._ttl + 1
        while not await self._lease.renew():
            if self._clock.monotonic() > until:
                raise StartupError(id_in_use_message(self._me.node_id))
            await asyncio.sleep(_STEP)
        try:
            cluster = await enter_node(self._control, self._maps, self._me, self._with_own_node)
        except transitions.TransitionError as error:
            raise StartupError(str(error)) from error
        await self._lease.renew()
        _log.info("joined the cluster", extra={"node": self._me.node_id, "map": cluster.version})
        if cluster.slots < self._slots:
            _log.warning(
                "the mesh has fewer slots than this node's setting `slots`, which applies to new meshes "
                "only; to split the slots of this mesh, run `mesh cluster slots`",
                extra={"slots": cluster.slots, "setting": self._slots},
            )
        await self._settle_empty()

    async def run(self) -> None:
        """Runs until the node shuts down: renews the lease, returns after the map marked the node away,
        and completes it while there is nothing to move. Releases the lease then, and when it is cancelled:
        requests that are still answered may wait for writes that others hold back for this node."""
        try:
            await self._maintain()
        finally:
            await self._lease.release()

    async def _maintain(self) -> None:
        await self._rest()
        while not shared_counters.is_ending():
            try:
                await self._run_once()
                self._record_control_state(None)
            except ControlError as error:
                metrics.cluster_control_failures.inc()
                self._record_control_state(error)
            except transitions.TransitionError as error:
                _log.warning("the map rejects the transition: %s", error)
            except Exception as error:  # e.g. no thread can be started: without its lease, a node is away
                self._record_control_state(error)
            await self._rest()

    async def _rest(self) -> None:
        """Sleeps until the lease is to be renewed, or the node shuts down. After a failure, a
        large mesh renews sooner: otherwise the lease would be over by the renewal after the next one."""
        cluster = self._maps.current()
        times = transitions.renewals_per_lease(
            0 if cluster is None or self._control_lost else len(cluster.nodes)
        )
        pieces = ceil(self._ttl / times / _END_CHECK_SECONDS)
        for _ in range(pieces):
            if not shared_counters.is_ending():
                await asyncio.sleep(self._ttl / times / pieces)

    def _record_control_state(self, error: Exception | None) -> None:
        metrics.cluster_lease_held.set(error is None and self._lease.held)
        if error is not None and not self._control_lost:
            trace = None if isinstance(error, ControlError) else error
            _log.warning("cannot renew the lease: %s", error, exc_info=trace)
        elif error is None and self._control_lost:
            _log.warning("the control store answers again", extra={"node": self._me.node_id})
        self._control_lost = error is not None

    async def _run_once(self) -> None:
        if not await self._lease.renew():
            _log.error("another daemon runs under this node's id", extra={"node": self._me.node_id})
            return
        cluster = self._maps.current()
        mine = None if cluster is None else cluster.node(self._me.node_id)
        if self._hanging():
            await self._step_aside()
        elif cluster is None or mine is None or mine.state in ("away", "down"):
            await self._rejoin()
        await self._settle_empty()

    async def _rejoin(self) -> None:
        """Returns to the cluster. A node that is repeatedly marked away waits longer each time, because some
        node cannot reach it."""
        now = self._clock.monotonic()
        if now < self._last_rejoin + self._rejoin_delay:
            return
        often = now < self._last_rejoin + self._rejoin_delay + 4 * self._ttl
        self._rejoin_delay = min(max(1.0, 2 * self._rejoin_delay), _LONGEST_REST) if often else 0.0
        self._last_rejoin = now
        cluster = await self._maps.update_map(self._with_own_node)
        _log.warning("returned to the cluster", extra={"node": self._me.node_id, "map": cluster.version})

    async def _step_aside(self) -> None:
        """Marks this node away, unless other nodes lack data that it has; they go on without it then."""
        before = self._maps.current()
        copies = self._fewest_copies()

        def step_aside(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            mine = present.node(self._me.node_id)
            known = mine is not None and mine.state in ("up", "returning", "draining")
            if not known or not transitions.can_lose_node(present, self._me.node_id, copies):
                return present
            return transitions.mark_node_away(present, self._me.node_id)

        if before is None or step_aside(before) is before:
            return
        cluster = await self._maps.update_map(step_aside)
        _log.error(
            "a disk of this node hangs: the node is away, and other nodes answer, until the disk does",
            extra={"node": self._me.node_id, "map": cluster.version},
        )

    def _with_own_node(self, present: ClusterMap | None) -> ClusterMap:
        if present is None:
            return transitions.bootstrap_map(self._me, self._slots, self._copies)
        return transitions.join_node(present, self._as_known(present))

    def _as_known(self, cluster: ClusterMap) -> Node:
        """Returns the node's entry with the weight in the map, unless this node was configured with one."""
        known = cluster.node(self._me.node_id)
        return self._me if known is None or self._weighed else replace(self._me, weight=known.weight)

    async def _settle_empty(self) -> None:
        """Marks the node complete while no bucket exists, because there is nothing to move. A bucket created
        later is known only to nodes that know this map: the control store delivers its changes in one order.
        """
        cluster = self._maps.current()
        if cluster is None or not cluster.must_sync(self._me.node_id):
            return
        for prefix in _WITH_CONTENT:
            if await self._control.list_all(prefix):
                return
        seen = cluster.version
        everybody = {node.node_id: seen for node in cluster.nodes}  # nobody has anything to move

        def settle(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            if not present.must_sync(self._me.node_id):
                return present
            return transitions.mark_all_complete(present, everybody)

        await self._maps.update_map(settle)
