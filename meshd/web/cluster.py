"""The cluster over signed JSON: `GET /-/map` for everybody, `GET /-/cluster` and changes of nodes for root.

Law: parse, call the service, answer. The map says where nodes are, and nothing about what they hold.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.control.interface import ControlError
from meshd.service.cluster.administering import NodeChange
from meshd.service.identities.errors import AdminError
from meshd.web.admin import check_root, check_signed_whole, json_reply, read_document, refusal
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Identity
    from meshd.service.cluster.administering import ClusterAdmin
    from meshd.web.incoming import MeshRequest

_NODES = "/-/cluster/nodes/"
_UNAVAILABLE = "nodes are changed in the control store alone; data is read and written without it meanwhile"


class ClusterEndpoint:
    """One a worker; holds no state of its own."""

    def __init__(self, mesh: Mesh, admin: ClusterAdmin, clock: Clock) -> None:
        self._mesh, self._admin, self._clock = mesh, admin, clock

    def __repr__(self) -> str:
        return f"<ClusterEndpoint of {self._mesh!r}>"

    def routes(self) -> list[NativeRoute]:
        """All of them signed."""
        return [
            NativeRoute("GET", "/-/map", self._map),
            NativeRoute("GET", "/-/cluster", self._status),
            NativeRoute("POST", _NODES, self._change),
        ]

    async def _map(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        document = {"node": self._mesh.node_id, "map": json.loads(self._mesh.map().to_json())}
        return await self._answered(request, lambda: _done(document))

    async def _status(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        return await self._answered(request, lambda: self._looked(identity))

    async def _looked(self, identity: Identity) -> object:
        check_root(identity)
        return await self._admin.status()

    async def _change(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        return await self._answered(request, lambda: self._changed(request, identity))

    async def _changed(self, request: MeshRequest, identity: Identity) -> object:
        check_root(identity)
        check_signed_whole(request)
        node_id = unquote(request.raw_path.partition("?")[0].removeprefix(_NODES))
        return await self._admin.change(node_id, await read_document(request, NodeChange))

    async def _answered(
        self, request: MeshRequest, work: Callable[[], Awaitable[object]]
    ) -> web.StreamResponse:
        now = self._clock.now_ms() // 1000
        if request.method == "HEAD":
            return refusal(request, AdminError("MethodNotAllowed", "use GET"), now)
        try:
            document = await work()
        except AdminError as error:
            return refusal(request, error, now)
        except ControlError as error:
            unavailable = AdminError("Unavailable", str(error), help=_UNAVAILABLE)
            return refusal(request, unavailable, now)
        return json_reply(200, document, now)


async def _done(document: object) -> object:
    return document
