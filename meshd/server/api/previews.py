"""Preview API: the beginning of a table as text (`GET /-/preview?bucket=&key=`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.server.api import reply_types
from meshd.server.api.batches import caller_of, parse_query
from meshd.server.native_routes import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.datasets.table_preview import TablePreviews
    from meshd.server.api.batches import BatchEndpoint
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply


class PreviewEndpoint:
    """The preview API. One instance per worker; stateless."""

    def __init__(self, tables: TablePreviews, native: BatchEndpoint) -> None:
        self._tables, self._native = tables, native

    def routes(self) -> list[HttpRoute]:
        """Return the route; it requires a signature."""
        bounded = self._native.limit_concurrency(self.table)
        return [HttpRoute("GET", "/-/preview", self._native.handle_errors(bounded))]

    @operation(
        "/-/preview",
        "The first rows of a Parquet or Arrow file",
        query=("bucket", "key"),
        reply=reply_types.TablePreview,
    )
    async def table(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer the first rows of a Parquet or Arrow file."""
        query = parse_query(request, ("bucket", "key"))
        caller = caller_of(request, identity)
        found = await self._tables.preview(caller, query.get("bucket", ""), query.get("key", ""))
        return self._native.reply_json(found)
