"""Whether a bucket with an origin was written to through the mesh: a mark of every node that may write.

Law: marks are compared, never ordered. A node changes its own before it acknowledges a write, so what was
asked of the origin under marks that are still the same has every write that was acknowledged since. While
some node cannot be asked there are none.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.net.peers import PREFIX, PeerRefusedError, StaleMapError
from meshd.net.wires import PeerUnreachableError

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.net.peers import Peers
    from meshd.service.caching.shelf import Shelf
    from meshwire.cluster import Node

MARK: Final = f"{PREFIX}origin-mark"
_PATIENCE: Final = 0.5  # seconds for all nodes; asking the origin takes hardly longer
_LONGEST: Final = 64

Marks = tuple[str, ...]


class Marker:
    """One a process."""

    def __init__(self, shelf: Shelf, mesh: Mesh, peers: Peers) -> None:
        self._shelf, self._mesh, self._peers = shelf, mesh, peers

    def __repr__(self) -> str:
        return f"<Marker of {self._mesh.node_id}>"

    def own(self, name: str) -> str:
        """This node's; "" of a bucket that it does not know."""
        bucket = self._shelf.backed(name)
        return "" if bucket is None else self._shelf.mark(bucket)

    async def of(self, bucket: Bucket) -> Marks | None:
        """All there are; None while some node that may write does not tell."""
        assert bucket.origin is not None
        if self._mesh.alone or bucket.origin.write == "off":
            return (self._shelf.mark(bucket),)
        cluster = self._mesh.map()
        nodes = [node for node in cluster.nodes if node.stores and node.state not in ("away", "down")]
        try:
            async with asyncio.timeout(_PATIENCE):
                told = await asyncio.gather(*[self._ask(node, bucket) for node in nodes])
        except (TimeoutError, PeerUnreachableError, PeerRefusedError, StaleMapError):
            return None
        if not all(told) or self._mesh.map().version != cluster.version:
            return None
        return (str(cluster.version), *told)

    async def _ask(self, node: Node, bucket: Bucket) -> str:
        if node.node_id == self._mesh.node_id:
            return self._shelf.mark(bucket)
        call = self._peers.call(node, "POST", MARK, body=bucket.name.encode(), timeout=_PATIENCE)
        async with call as answer:
            return (await answer.read())[:_LONGEST].decode("ascii", "replace")
