"""Cluster API over signed JSON: `GET /-/map` and `GET /-/activity` for every caller, `/-/cluster` for root.

A handler parses, calls the service and answers. The map shows the addresses of nodes, and nothing about their
data; activity, like `/metrics`, shows counters and the names of loaders.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from meshd.auth.identities.admin_errors import AdminError
from meshd.control.control_api import ControlError
from meshd.server.api import reply_types
from meshd.server.api.admin import (
    admin_error_reply,
    check_fully_signed,
    check_root,
    json_reply,
    read_document,
)
from meshd.server.api.cluster_admin import NodeChange, SlotCount
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.scatter_gather import ActivityService
    from meshd.server.api.cluster_admin import ClusterAdmin
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
    from meshd.util.clock import Clock


_NODES = "/-/cluster/nodes/"
_UNAVAILABLE = "node changes need the control store; data can still be read and written without it"


class ClusterEndpoint:
    """The cluster API. One instance per worker; stateless."""

    def __init__(self, mesh: ClusterView, admin: ClusterAdmin, clock: Clock) -> None:
        self._mesh, self._admin, self._clock = mesh, admin, clock

    def __repr__(self) -> str:
        return f"<ClusterEndpoint of {self._mesh!r}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        return [
            HttpRoute("GET", "/-/map", self._map),
            HttpRoute("GET", "/-/cluster", self._status),
            HttpRoute("POST", _NODES, self._change),
            HttpRoute("POST", "/-/cluster/slots", self._split),
        ]

    @operation("/-/map", "The cluster map")
    async def _map(self, request: MeshRequest, identity: Identity) -> Reply:
        document = {"node": self._mesh.node_id, "map": json.loads(self._mesh.current_map().to_json())}
        return await self._respond(request, lambda: _immediate(document))

    @operation("/-/cluster", "The nodes, and what moves between them", reply=reply_types.Cluster)
    async def _status(self, request: MeshRequest, identity: Identity) -> Reply:
        return await self._respond(request, lambda: self._status_document(identity))

    async def _status_document(self, identity: Identity) -> object:
        check_root(identity)
        return await self._admin.status()

    @operation("/-/cluster/nodes/{node}", "Change what a node does", body=NodeChange)
    async def _change(self, request: MeshRequest, identity: Identity) -> Reply:
        return await self._respond(request, lambda: self._apply_change(request, identity))

    async def _apply_change(self, request: MeshRequest, identity: Identity) -> object:
        check_root(identity)
        check_fully_signed(request)
        node_id = unquote(request.raw_path.partition("?")[0].removeprefix(_NODES))
        return await self._admin.change(node_id, await read_document(request, NodeChange))

    @operation("/-/cluster/slots", "Split the slots of the map", body=SlotCount)
    async def _split(self, request: MeshRequest, identity: Identity) -> Reply:
        return await self._respond(request, lambda: self._split_slots(request, identity))

    async def _split_slots(self, request: MeshRequest, identity: Identity) -> object:
        check_root(identity)
        check_fully_signed(request)
        return await self._admin.split_slots(await read_document(request, SlotCount))

    async def _respond(self, request: MeshRequest, work: Callable[[], Awaitable[object]]) -> Reply:
        now = self._clock.now_ms() // 1000
        if request.method == "HEAD":
            return admin_error_reply(request, AdminError("MethodNotAllowed", "use GET"), now)
        try:
            document = await work()
        except AdminError as error:
            return admin_error_reply(request, error, now)
        except ControlError as error:
            unavailable = AdminError("Unavailable", str(error), help=_UNAVAILABLE)
            return admin_error_reply(request, unavailable, now)
        return json_reply(200, document, now)


async def _immediate(document: object) -> object:
    return document


class ActivityEndpoint:
    """The activity API. One instance per worker."""

    def __init__(self, activity: ActivityService, clock: Clock) -> None:
        self._activity, self._clock = activity, clock

    def __repr__(self) -> str:
        return f"<ActivityEndpoint {self._activity!r}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        return [HttpRoute("GET", "/-/activity", self._get)]

    @operation("/-/activity", "What each node counts", query=("history",), reply=reply_types.Activity)
    async def _get(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer the numbers; with `?history=1`, the last hour of each node, too."""
        query = dict(parse_qsl(request.raw_path.partition("?")[2]))
        document = await self._activity.of_all_nodes(history=query.get("history") == "1")
        return json_reply(200, document, self._clock.now_ms() // 1000)
