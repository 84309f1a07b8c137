"""`GET /-/map`: the cluster map, for the SDK, operators and tests.

Law: for every signed caller; it says where nodes are, and nothing about what they hold.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from meshd.service.adminerrors import AdminError
from meshd.web.admin import json_reply, refusal
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.access import Identity
    from meshd.web.incoming import MeshRequest


class ClusterEndpoint:
    """One a worker; holds no state of its own."""

    def __init__(self, mesh: Mesh, clock: Clock) -> None:
        self._mesh, self._clock = mesh, clock

    def __repr__(self) -> str:
        return f"<ClusterEndpoint of {self._mesh!r}>"

    def routes(self) -> list[NativeRoute]:
        """Signed."""
        return [NativeRoute("GET", "/-/map", self._map)]

    async def _map(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        now = self._clock.now_ms() // 1000
        if request.method == "HEAD":
            return refusal(request, AdminError("MethodNotAllowed", "use GET"), now)
        document = {"node": self._mesh.node_id, "map": json.loads(self._mesh.map().to_json())}
        return json_reply(200, document, now)
