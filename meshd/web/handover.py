"""The door through which the next decider of a name asks the former one for it.

Law: whoever asks goes by a map by which it decides; this node knows that map first, or says by which it goes
(421).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from meshd.cluster.handover import HANDOVER
from meshd.cluster.replicating import ReplicatedStore
from meshd.net.peers import StaleMapError
from meshd.service.semantics.translation import translate
from meshd.store.errors import StoreError
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.store.interface import ObjectStore
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_PATIENCE: Final = 1.0  # seconds for the caller's map to arrive here, too


def handover_routes(store: ObjectStore, mesh: Mesh, clock: Clock) -> list[NativeRoute]:
    """The door; none of a node that is alone for ever. `store`: the one that tells the other nodes."""
    if not isinstance(store, ReplicatedStore):
        return []
    return [peer_route("POST", HANDOVER, HandoverDoor(store, mesh, clock).hand_over)]


class HandoverDoor:
    """One a process."""

    def __init__(self, store: ReplicatedStore, mesh: Mesh, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock

    def __repr__(self) -> str:
        return f"<HandoverDoor of {self._mesh.node_id}>"

    async def hand_over(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        await call.read(request, 0)
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        if "bucket" not in query or "key" not in query:
            raise S3Error("InvalidArgument", "bucket and key must be given")
        mesh = self._mesh
        if call.map_version > mesh.map().version:
            await mesh.newer_than(call.map_version - 1, _PATIENCE)
        node = mesh.map().node(call.node_id)
        if call.map_version != mesh.map().version or node is None:
            raise StaleMapError(mesh.map().version)
        try:
            await self._store.hand_over(query["bucket"], query["key"], call.map_version, node)
        except StoreError as error:
            raise translate(error) from error
        return peer_reply(b"", self._clock.now_ms() // 1000)
