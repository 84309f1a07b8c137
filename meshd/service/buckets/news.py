"""What was just changed in the control store, known everywhere before its author hears of it.

Law: a bucket that was made, a setting that was put is in force at every node that answers when the change is
acknowledged: whoever is asked next says so. A node that does not answer, or does not know of it within
`PATIENCE`, hears of it from the control store itself and holds nobody up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.net.peers import PREFIX, PeerRefusedError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.net.wires import PeerUnreachableError

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.control.interface import ControlStore
    from meshd.net.peers import Peers
    from meshwire.cluster import Node

HEARD: Final = f"{PREFIX}heard"
PATIENCE: Final = 2.0
"""Seconds; who knows of it later than that is not waited for."""
_LOOK: Final = 0.002
_TOPICS: Final = ("buckets", "access")


class News:
    """One a process. `workers`: how many processes of a node answer, each with a copy of its own."""

    def __init__(self, control: ControlStore, mesh: Mesh, peers: Peers, workers: int) -> None:
        self._control, self._mesh, self._peers, self._workers = control, mesh, peers, workers

    def __repr__(self) -> str:
        return f"<News of {self._mesh.node_id}>"

    async def spread(self) -> None:
        """Return when every node that answers knows of buckets and access keys what is known here."""
        if self._mesh.alone:
            return
        known = {topic: self._control.revision(topic) for topic in _TOPICS}
        body = msgspec.msgpack.encode(known)
        me = self._mesh.node_id
        others = [n for n in self._mesh.map().nodes if n.node_id != me and n.state not in ("away", "down")]
        await asyncio.gather(*(self._tell(node, body) for node in others))
        if self._workers > 1:  # its other processes hear of it from the same watch, in the same moment
            await asyncio.sleep(_LOOK * 10)

    async def hear(self, known: dict[str, int]) -> None:
        """Return when this process knows as much, or patience is at its end."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while any(self._control.revision(topic) < known.get(topic, 0) for topic in _TOPICS):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_LOOK)

    async def _tell(self, node: Node, body: bytes) -> None:
        try:
            async with self._peers.call(node, "POST", HEARD, body=body, timeout=PATIENCE) as answer:
                await answer.read()
        except (PeerUnreachableError, PeerRefusedError, StaleMapError, PieceError):
            return
