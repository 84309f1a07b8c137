"""Failure detector: marks silent nodes `away` and gives up lost ones (`down`).

Law: a node changes state only after it was probed directly, and only through the control store; a node
that cannot reach the control store changes no node's state. Any node may do it: the holder of one lease
probes all nodes regularly, and a request that waits for a node probes that node at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.cluster.node_lease import live_nodes, node_lease_name
from meshd.cluster.peer_checks import probe_map_version
from meshd.cluster.replica_counts import replica_shortfall
from meshd.control.control_api import ControlError, LeaseLostError
from meshd.telemetry import metrics
from meshwire.cluster import transitions
from meshwire.cluster.cluster_map import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore, Lease
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger(__name__)
_LEASE: Final = "guardian"
_STEP: Final = 0.25
_ROUNDS_PER_LEASE: Final = 5
_RENEW_AFTER: Final = 1.5  # rounds: in every second one, and in the next if that fails
_CANDIDATES: Final = 32
_WITNESSES: Final = 32
_GONE: Final = ("away", "down")


class NodeStateWriter:
    """Changes other nodes' states in the map."""

    def __init__(self, control: ControlStore, maps: ClusterMapStore) -> None:
        self._control, self._maps = control, maps

    async def live_nodes(self) -> set[str]:
        """Returns the ids of the nodes that hold their leases. Raises ControlError."""
        return await live_nodes(self._control)

    async def is_alive(self, node_id: str) -> bool:
        """Returns whether a node holds its lease. Raises ControlError."""
        name = node_lease_name(node_id)
        return name in await self._control.lease_holders(name)

    async def mark_away(self, silent: Mapping[str, int]) -> None:
        """Marks silent nodes away in one write of the map: each by its id, unless it has changed state since
        map version `silent[id]`."""
        await self._mark(silent, transitions.mark_nodes_away)

    async def mark_down(self, lost: Mapping[str, int]) -> None:
        """Gives nodes up, as `mark_away`."""
        await self._mark(lost, transitions.mark_nodes_down)

    async def _mark(
        self, turned: Mapping[str, int], change: Callable[[ClusterMap, Sequence[str]], ClusterMap]
    ) -> None:
        marked: dict[str, str] = {}

        def mark(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            before = {node.node_id: node.state for node in present.nodes}
            named = [node.node_id for node in present.nodes if turned.get(node.node_id) == node.turned]
            changed = change(present, [node_id for node_id in named if before[node_id] != "down"])
            marked.clear()
            marked.update(
                (node.node_id, node.state)
                for node in changed.nodes
                if node.node_id in named and node.state != before[node.node_id]
            )
            return changed

        if not turned:
            return
        cluster = await self._maps.update_map(mark)
        for node_id, state in marked.items():
            metrics.cluster_marked.labels(state).inc()
            _log.warning("marked a node %s", state, extra={"node": node_id, "map": cluster.version})


class SuspectProbe:
    """Probes a node that a request waits for; implements `ClusterView.report_suspect`."""

    def __init__(self, state_writer: NodeStateWriter, clock: Clock, ttl: float) -> None:
        self._state_writer, self._clock, self._ttl = state_writer, clock, ttl

    async def __call__(self, mesh: ClusterView, node_id: str, version: int) -> None:
        """Returns when the node answers, the map has changed, or nothing more can be found out.

        A node that is silent, instead of refusing connections, lets every probe wait for its whole timeout:
        from the second probe on, its lease is looked at meanwhile."""
        until = self._clock.monotonic() + self._ttl + 1
        probe: asyncio.Task[int | None] | None = None
        try:
            with suppress(ControlError):
                while mesh.current_map().version <= version:
                    node = mesh.current_map().node(node_id)
                    if node is None or node.state in _GONE:
                        return
                    if probe is None:
                        first = asyncio.ensure_future(probe_map_version(node))
                        await asyncio.wait([first])
                        probe = first
                    else:
                        await asyncio.wait([probe], timeout=_STEP)
                    if probe.done():
                        if probe.result() is not None:
                            return
                        probe = asyncio.ensure_future(self._probe_later(node))
                    late = self._clock.monotonic() > until
                    if not await self._state_writer.is_alive(node_id) or (
                        late and await self._reaches(mesh, node)
                    ):
                        # Many processes may wait for it; one write of the map is enough.
                        nodes = len(mesh.current_map().nodes)
                        await asyncio.sleep(random.uniform(0.0, transitions.batch_seconds(nodes)))
                        if mesh.current_map().version <= version:
                            others = await self._others_without_lease(mesh, node_id)
                            await self._state_writer.mark_away({node_id: node.turned} | others)
                        return
                    if late:
                        return
        finally:
            if probe is not None:
                probe.cancel()
                await asyncio.gather(probe, return_exceptions=True)

    async def _probe_later(self, node: Node) -> int | None:
        await asyncio.sleep(_STEP)  # a node that refuses connections is not probed without a pause
        return await probe_map_version(node)

    async def _others_without_lease(self, mesh: ClusterView, suspect: str) -> dict[str, int]:
        """Returns the other nodes that hold no lease and refuse a probe, with their `turned`: nodes that left
        together, as in a power cut, are marked in one write (`transitions.mark_nodes_away`). In a large mesh
        only the failure detector looks at all leases."""
        if transitions.batch_seconds(len(mesh.current_map().nodes)):
            return {}
        alive = await self._state_writer.live_nodes()
        nodes = [
            node
            for node in mesh.current_map().nodes
            if node.state not in _GONE and node.node_id not in {*alive, suspect, mesh.node_id}
        ]
        if not nodes:
            return {}
        probes = {asyncio.ensure_future(probe_map_version(node)): node for node in nodes}
        try:
            done, _ = await asyncio.wait(probes, timeout=_STEP)
            return {probes[each].node_id: probes[each].turned for each in done if each.result() is None}
        finally:
            for each in probes:
                each.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _reaches(self, mesh: ClusterView, node: Node) -> bool:
        """Returns True if other nodes answer: then it is the suspect that is unreachable, not this node that
        is cut off."""
        others = [n for n in mesh.current_map().nodes if n.node_id not in (mesh.node_id, node.node_id)]
        others = [n for n in others if n.state not in _GONE]
        if len(others) > _WITNESSES:  # each of many nodes that wait for a lost one asks so many
            others = random.sample(others, _WITNESSES)
        found = await asyncio.gather(*[probe_map_version(other) for other in others])
        return not others or any(answer is not None for answer in found)


class FailureDetector:
    """Probes all nodes and marks silent ones. Runs in every coordinator; only the holder of the lease is
    active."""

    def __init__(
        self,
        mesh: ClusterView,
        control: ControlStore,
        state_writer: NodeStateWriter,
        fewest_copies: Callable[[], int],
        clock: Clock,
        *,
        ttl: float,
        down_after: float,
    ) -> None:
        self._mesh, self._control, self._state_writer, self._clock = mesh, control, state_writer, clock
        self._fewest, self._ttl, self._down_after = fewest_copies, ttl, down_after
        self._random = random.Random(mesh.node_id)
        self._lease: Lease | None = None
        self._renewed = 0.0
        self._silent: dict[str, float] = {}
        self._away: dict[tuple[str, int], float] = {}

    def __repr__(self) -> str:
        return f"<FailureDetector of {self._mesh.node_id}{', active' if self._lease else ''}>"

    async def run(self) -> None:
        """Runs forever."""
        failed = False
        while True:
            await asyncio.sleep(self._ttl / _ROUNDS_PER_LEASE)
            try:
                record_map_metrics(self._mesh.current_map())
                if await self._hold_lease():
                    await self.check_nodes()
                failed = False
            except ControlError as error:
                self._silent.clear()  # earlier observations are outdated
                _log.debug("nodes are not probed: %s", error)
            except transitions.TransitionError as error:
                _log.warning("the map rejects the transition: %s", error)
            except Exception:  # e.g. no thread can be started
                self._silent.clear()
                level = logging.DEBUG if failed else logging.ERROR
                _log.log(level, "nodes could not be probed; they will be again", exc_info=True)
                failed = True

    async def _hold_lease(self) -> bool:
        now = self._clock.monotonic()
        if self._lease is not None:
            if now - self._renewed < _RENEW_AFTER * self._ttl / _ROUNDS_PER_LEASE:
                return True
            try:
                self._lease, self._renewed = await self._control.renew_lease(self._lease), now
            except LeaseLostError:
                self._lease = None
        elif self._is_turn() and _LEASE not in await self._control.lease_holders(_LEASE):
            self._lease = await self._control.acquire_lease(_LEASE, self._mesh.node_id, self._ttl)
            self._renewed = now
        return self._lease is not None

    def _is_turn(self) -> bool:
        """Returns True if this node is to look for a free lease now. In a large mesh a few dozen nodes do,
        others each time, so that the control store has no more to answer than in a small one."""
        return self._random.random() * max(1, len(self._mesh.current_map().nodes)) < _CANDIDATES

    async def check_nodes(self) -> None:
        """Probes every node once. Raises ControlError."""
        cluster, alive = self._mesh.current_map(), await self._state_writer.live_nodes()
        suspects = [n for n in cluster.nodes if n.state not in _GONE and n.node_id != self._mesh.node_id]
        asked = [self._is_gone(cluster, node, node.node_id in alive) for node in suspects]
        gone = await asyncio.gather(*asked)
        silent = [node for node, is_gone in zip(suspects, gone, strict=True) if is_gone]
        if silent:  # a probe takes longer than a busy node may be late to renew its lease
            alive = await self._state_writer.live_nodes()
        await self._state_writer.mark_away({n.node_id: n.turned for n in silent if n.node_id not in alive})
        await self._mark_lost_nodes(cluster)

    async def _is_gone(self, cluster: ClusterMap, node: Node, alive: bool) -> bool:
        if alive:
            self._silent.pop(node.node_id, None)
            return False
        now = self._clock.monotonic()
        since = self._silent.setdefault(node.node_id, now)
        version = await probe_map_version(node)
        # A node that answers but is cut off from the control store does no harm until its map is outdated.
        return version is None or (version < cluster.version and now - since > self._ttl)

    async def _mark_lost_nodes(self, cluster: ClusterMap) -> None:
        now = self._clock.monotonic()
        away = {(node.node_id, node.turned) for node in cluster.nodes if node.state == "away"}
        self._away = {key: self._away.get(key, now) for key in away}
        late = {
            node_id: turned
            for node_id, turned in away
            if now - self._away[node_id, turned] >= self._down_after
        }
        copies = self._fewest() if late else 0
        await self._state_writer.mark_down(
            {
                node_id: turned
                for node_id, turned in late.items()
                if transitions.can_lose_node(cluster, node_id, copies)
            }
        )


def record_map_metrics(cluster: ClusterMap) -> None:
    """Updates the metrics of the map."""
    metrics.cluster_map_version.set(cluster.version)
    metrics.cluster_rebalancing.set(cluster.is_rebalancing)
    if cluster.version:
        short, lost = replica_shortfall(cluster, cluster.copies)
        metrics.cluster_slots_short.set(short)
        metrics.cluster_slots_lost.set(lost)
    for state in STATES:
        metrics.cluster_nodes.labels(state).set(sum(node.state == state for node in cluster.nodes))
