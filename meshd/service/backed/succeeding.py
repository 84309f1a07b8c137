"""Whether a node that decided about a name before is still writing it to its origin.

Law: who decides by a newer map touches an origin only when every other node that answers goes by that map,
too, and is done with the name there; who may have been taken out of the map touches none before it has asked
whether it is still in it. Who is asked asks nobody. Invariant: two nodes that answer never write a
name to its origin at the same time, so the last write is the last to arrive.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.doubting import Doubt
from meshd.net.peers import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.store.errors import NotReplicatedError

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshwire.cluster import Node

QUIET: Final = "/-/peer/origins/quiet"
MAX_ASK_BYTES: Final = 16 << 10
TURN: Final = 10.0  # seconds after which who is asked says that it is not done yet
_SILENCE: Final = 30.0
_PATIENCE: Final = 15.0  # seconds for a node that neither answers nor is taken out of the map
_PAUSE: Final = 0.05
_YOUNG: Final = 600.0  # seconds from a new map for which others are asked: as long as one request may take


class QuietAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name about which the asker decides by now."""

    bucket: str
    key: str


encode: Final = msgspec.msgpack.Encoder().encode
_ask: Final = msgspec.msgpack.Decoder(QuietAsk).decode
_told: Final = msgspec.msgpack.Decoder(bool).decode


def decode_ask(body: bytes) -> QuietAsk:
    """Raises msgspec.MsgspecError."""
    return _ask(body)


class Succession:
    """One a process."""

    def __init__(self, mesh: Mesh, peers: Peers, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock
        self._doubts = Doubt(mesh, clock)
        self._seen = (-1, 0.0)  # the newest map a write has met, and when the first one did

    def __repr__(self) -> str:
        return f"<Succession of {self._mesh.node_id}, map {self._seen[0]}>"

    async def settled(self, bucket: str, key: str) -> None:
        """Returns when this node is sure of its map, and nobody else is at the origin of a name by an older
        one, nor will be. Raises NotReplicatedError."""
        why = "" if self._mesh.sure else await self._doubts.dispel(bucket, key)
        if why:
            raise NotReplicatedError(f"this node {why}, and does nothing at the origin until it is sure")
        while not self._mesh.alone and self._is_young():
            cluster = self._mesh.map()
            others = [
                node
                for node in cluster.nodes
                if node.node_id != self._mesh.node_id
                and "store" in node.roles
                and node.state not in ("away", "down")
            ]
            ask = QuietAsk(bucket, key)
            await asyncio.gather(*[self._quiet(node, cluster.version, ask) for node in others])
            if self._mesh.map().version == cluster.version:
                return

    def _is_young(self) -> bool:
        """Whether a write that was begun by an older map may still be under way."""
        version, now = self._mesh.map().version, self._clock.monotonic()
        if self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] < _YOUNG

    async def _quiet(self, node: Node, version: int, ask: QuietAsk) -> None:
        """Returns when a node is done with a name, or there is a newer map. Raises NotReplicatedError."""
        deadline = self._clock.monotonic() + _PATIENCE
        while self._mesh.map().version == version:
            try:
                async with self._peers.call(
                    node, "POST", QUIET, body=encode(ask), timeout=_SILENCE
                ) as answer:
                    if _told(await answer.read()):
                        return
                deadline = self._clock.monotonic() + _PATIENCE
            except PeerUnreachableError:
                await self._mesh.suspect(node.node_id, version)
                await self._late(node, version, deadline)
            except (StaleMapError, PieceError, PeerRefusedError):
                await self._late(node, version, deadline)

    async def _late(self, node: Node, version: int, deadline: float) -> None:
        """A pause until it is asked again."""
        if self._clock.monotonic() > deadline:
            raise NotReplicatedError(
                f"node {node.node_id} does not say whether it still writes this name to its origin; try again"
            )
        await self._mesh.newer_than(version, _PAUSE)
