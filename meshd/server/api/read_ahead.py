"""Read-ahead API (`POST /-/read-ahead`): objects that the caller reads next, from rotational disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.server.api.json_api import caller_of, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.reads.object_read_ahead import ObjectReadAhead
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply


class ReadAheadEndpoint:
    """The read-ahead API. One instance per worker; stateless."""

    def __init__(self, loader: ObjectReadAhead, api: JsonApi) -> None:
        self._loader, self._api = loader, api

    def __repr__(self) -> str:
        return f"<ReadAheadEndpoint with {self._loader!r}>"

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        load = self._api.handle_errors(self._api.limit_concurrency(self.load))
        return [HttpRoute("POST", "/-/read-ahead", load)]

    @operation("/-/read-ahead", "Load objects that are read next from rotational disks", accepts="json")
    async def load(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        count = await self._loader.load(caller_of(request, identity), await request.read())
        return self._api.reply_json({"loaded": count})
