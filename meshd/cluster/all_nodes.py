"""One question to all other nodes at once: a node that does not answer in time has no answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from meshd.errors import MeshdError
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import PeerCall
    from meshwire.cluster import Node

Request = TypeVar("Request")
Response = TypeVar("Response")


async def ask_other_nodes(
    mesh: ClusterView,
    peers: PeerClient,
    call: PeerCall[Request, Response],
    request: Request,
    patience: float,
) -> dict[str, Response | None]:
    """Return the answers by node id, of all nodes of the map that are not down; None after `patience`
    seconds, or for an error."""
    others = [
        node for node in mesh.current_map().nodes if node.node_id != mesh.node_id and node.state != "down"
    ]

    async def ask(node: Node) -> Response | None:
        try:
            async with timeout(patience):
                return await peers.call_typed(node, call, request)
        except (MeshdError, TimeoutError, OSError):
            return None

    found = await asyncio.gather(*[ask(node) for node in others])
    return {node.node_id: answer for node, answer in zip(others, found, strict=True)}
