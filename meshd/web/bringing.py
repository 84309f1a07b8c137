"""The doors through which a node is asked to bring to an origin, or to remove there, what it decides about;
and whether it is still at what another one decides about by now.

Law: who asks by another map than that by which this node decides, or does not, is told so (421), and nothing
was done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.net.peers import StaleMapError
from meshd.service.backed import bringing, succeeding
from meshd.service.backed.bringing import BRING
from meshd.service.backed.succeeding import QUIET
from meshd.store.errors import NotDeciderError
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.backed.bringing import Bringer
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

T = TypeVar("T")
_PATIENCE: Final = 1.0  # seconds for the caller's map to arrive here, too


class BringingDoors:
    """One a process."""

    def __init__(self, bringer: Bringer, mesh: Mesh, clock: Clock) -> None:
        self._bringer, self._mesh, self._clock = bringer, mesh, clock

    def __repr__(self) -> str:
        return f"<BringingDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The doors."""
        return [peer_route("POST", BRING, self.bring), peer_route("POST", QUIET, self.quiet)]

    async def quiet(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        asked = _read(succeeding.decode_ask, await call.read(request, succeeding.MAX_ASK_BYTES))
        if call.map_version < self._mesh.map().version:
            raise StaleMapError(self._mesh.map().version)
        quiet = await self._bringer.quiet(asked, call.map_version)
        return peer_reply(succeeding.encode(quiet), self._clock.now_ms() // 1000)

    async def bring(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        asked = _read(bringing.decode_ask, await call.read(request, bringing.MAX_ASK_BYTES))
        if call.map_version > self._mesh.map().version:
            await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
        try:
            if not self._mesh.is_decider(asked.bucket, asked.key):
                raise StaleMapError(self._mesh.map().version)
            brought = await self._bringer.carried_out(asked)
        except NotDeciderError as error:
            raise StaleMapError(self._mesh.map().version) from error
        return peer_reply(bringing.encode(brought), self._clock.now_ms() // 1000)


def _read(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
