"""View API: create, list and describe views (`/-/views`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.server.api import reply_types
from meshd.server.api.json_api import caller_of, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
    from meshd.views.definitions import ViewDefinitions


class ViewEndpoint:
    """The view API. One instance per worker; stateless."""

    def __init__(self, views: ViewDefinitions, api: JsonApi) -> None:
        self._views, self._api = views, api

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        guarded = self._api.handle_errors
        return [
            HttpRoute("POST", "/-/views", guarded(self._api.limit_concurrency(self.create_view))),
            HttpRoute("GET", "/-/views", guarded(self.list_views)),
            HttpRoute("GET", "/-/views/", guarded(self.get_view)),
        ]

    @operation("/-/views", "Create a view, or confirm that it is there", accepts="json")
    async def create_view(self, request: MeshRequest, identity: Identity) -> Reply:
        return self._api.reply_json(
            await self._views.create(caller_of(request, identity), await request.read())
        )

    @operation("/-/views", "The views of the caller", query=("bucket",), reply=reply_types.Views)
    async def list_views(self, request: MeshRequest, identity: Identity) -> Reply:
        bucket = parse_query(request, ("bucket",)).get("bucket", "")
        return self._api.reply_json({"views": self._views.list_all(caller_of(request, identity), bucket)})

    @operation("/-/views/{view}", "A view", reply=reply_types.View)
    async def get_view(self, request: MeshRequest, identity: Identity) -> Reply:
        name = request.raw_path.partition("?")[0].removeprefix("/-/views/")
        return self._api.reply_json(self._views.describe(caller_of(request, identity), name))
