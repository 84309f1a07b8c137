"""The nodes of a warm-up: which of them need which samples, and how a job asks one.

Law: a node warms up what it will render. Rows of fixed size are rendered by the node that holds them, because
loaders request frames in parts; all other frames are requested whole, from a node that follows from the
frame's address, so that every node that builds batches needs every sample.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from meshd.batches.warm_up.messages import WARM_UP
from meshd.util.timeouts import timeout
from meshwire.cluster.routes import COMPLETE_STATES, batch_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.batches.warm_up.messages import WarmUpRequest, WarmUpStatus
    from meshd.batches.warm_up.node_task import WarmUps
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node

MAX_SPLIT: Final = 16
"""Nodes that a loader asks for parts of one frame, at most."""
_STOP_SECONDS: Final = 2.0
_MAP_SECONDS: Final = 2.0


class NodeChoice(NamedTuple):
    """The nodes of a warm-up under a version of the cluster map. `own`: each takes only its own samples."""

    version: int
    own: bool
    nodes: tuple[Node, ...]


class WarmUpNodes:
    """Asks nodes for their part of a warm-up. One instance per node; `own` is this node's."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, own: WarmUps) -> None:
        self._mesh, self._peers, self._own = mesh, peers, own

    def __repr__(self) -> str:
        return f"<WarmUpNodes from {self._mesh.node_id}>"

    @property
    def version(self) -> int:
        """The version of this process's cluster map."""
        return self._mesh.current_map().version

    def choose(self, *, in_parts: bool) -> NodeChoice:
        """Return the nodes by the present map. `in_parts`: frames of the plan may be requested in parts."""
        cluster = self._mesh.current_map()
        if self._mesh.single_node:
            return NodeChoice(cluster.version, False, (self._mesh.own_node or cluster.nodes[0],))
        storing = tuple(node for node in cluster.nodes if node.stores and node.state in COMPLETE_STATES)
        building = batch_nodes(cluster)
        split = in_parts and 2 <= len(storing) <= MAX_SPLIT and {*storing} == {*building}
        return NodeChoice(cluster.version, split, storing if split else building)

    async def ask(self, node: Node, request: WarmUpRequest) -> WarmUpStatus:
        """Send a request to a node. Raises BatchError, MeshdError."""
        if self._mesh.single_node or node.node_id == self._mesh.node_id:
            return await self._own.answer(request)
        return await self._peers.call_typed(node, WARM_UP, request)

    async def stop(self, nodes: Iterable[Node], request: WarmUpRequest) -> None:
        """End the tasks of nodes that can be reached; those of others end by themselves."""
        ending = msgspec.structs.replace(request, stop=True)
        with suppress(TimeoutError):
            async with timeout(_STOP_SECONDS):
                asked = (self.ask(node, ending) for node in nodes)
                await asyncio.gather(*asked, return_exceptions=True)

    async def wait_for_change(self, version: int, silent: str = "") -> None:
        """Wait briefly for a newer map, or just briefly. `silent`: a node that did not answer."""
        if silent:
            await self._mesh.report_suspect(silent, version)
        if self._mesh.standalone:
            await asyncio.sleep(_MAP_SECONDS)
        else:
            await self._mesh.wait_for_newer_map(version, _MAP_SECONDS)
