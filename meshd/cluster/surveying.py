"""What a node sees of the others when it looks on purpose: certificates that it would refuse, clocks.

Law: asks over connections of its own, for those that are open tell nothing of either; changes nothing. A node
that does not answer is not judged here: it is the guardian's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.cluster.probing import PATIENCE, hear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshwire.cluster import Node


@dataclass(frozen=True, slots=True)
class Survey:
    """`refused`: by id, why a node's certificate is not believed here. `ahead`: by id, the seconds that a
    node's clock is ahead of this one's (negative: behind), to about one; this node is among them. `silent`:
    ids of those that did not answer in time."""

    refused: Mapping[str, str]
    ahead: Mapping[str, float]
    silent: frozenset[str] = frozenset()


async def survey(mesh: Mesh, peers: Peers, clock: Clock, patience: float = PATIENCE) -> Survey:
    """Looks at all others that are not known to be gone, at once; each gets `patience` seconds."""
    others = [
        node
        for node in mesh.map().nodes
        if node.node_id != mesh.node_id and node.state not in ("away", "down")
    ]
    refusals = asyncio.gather(*[peers.refuses(node, patience) for node in others])
    clocks = asyncio.gather(*[_heard(node, clock, patience) for node in others])
    why, heard = await refusals, await clocks
    return Survey(
        {node.node_id: said for node, said in zip(others, why, strict=True) if said},
        {mesh.node_id: 0.0}
        | {
            node.node_id: told[0]
            for node, told in zip(others, heard, strict=True)
            if told is not None and told[0] is not None
        },
        frozenset(node.node_id for node, told in zip(others, heard, strict=True) if told is None),
    )


async def _heard(node: Node, clock: Clock, patience: float) -> tuple[float | None] | None:
    """How far its clock is ahead (None: it does not say); None where it does not answer."""
    before = clock.now_ms()
    heard = await hear(node, patience)
    if heard is None:
        return None
    if heard.clock is None:
        return (None,)
    return (heard.clock + 0.5 - (before + clock.now_ms()) / 2000,)  # it tells whole seconds, cut off
