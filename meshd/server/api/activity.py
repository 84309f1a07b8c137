"""Activity API: `GET /-/activity`, the numbers of every node, for every signed caller.

Like `/metrics`, which needs no signature, it tells numbers and the names of loaders, and nothing about data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from meshd.server.api import reply_types
from meshd.server.api.admin import json_reply
from meshd.server.described import operation
from meshd.server.native_routes import HttpRoute

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.cluster.activity import ActivityService
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
    from meshd.util.clock import Clock


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
        query = dict(parse_qsl(request.raw_path.partition("?")[2], max_num_fields=64))
        document = await self._activity.of_all_nodes(history=query.get("history") == "1")
        return json_reply(200, document, self._clock.now_ms() // 1000)
