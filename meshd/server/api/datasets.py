"""Dataset API: snapshots (`/-/snapshots`), and the beginning of a table as text (`/-/preview`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.datasets.snapshot_statistics import snapshot_statistics
from meshd.server.api import reply_types
from meshd.server.api.json_api import caller_of, check_last_part, hash_path, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation
from meshwire.dataset.build_snapshot import CONTENT_TYPE

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.batches.read_ahead.cost_estimator import ReadCostEstimator
    from meshd.batches.read_ahead.default_order import DefaultOrders
    from meshd.datasets.service import DatasetService
    from meshd.datasets.table_preview import TablePreviews
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply


class DatasetEndpoint:
    """The dataset API. One instance per worker; stateless."""

    def __init__(
        self,
        datasets: DatasetService,
        tables: TablePreviews,
        read_costs: ReadCostEstimator,
        orders: DefaultOrders,
        api: JsonApi,
    ) -> None:
        self._datasets, self._tables, self._api = datasets, tables, api
        self._read_costs, self._orders = read_costs, orders

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        guarded, bounded = self._api.handle_errors, self._api.limit_concurrency
        return [
            HttpRoute("POST", "/-/snapshots", guarded(bounded(self.create_snapshot))),
            HttpRoute("GET", "/-/snapshots/", guarded(self.get_snapshot)),
            HttpRoute("POST", "/-/snapshots/", guarded(bounded(self.post_to_snapshot))),
            HttpRoute("GET", "/-/preview", guarded(bounded(self.preview_table))),
        ]

    @operation("/-/snapshots", "Pin a dataset", accepts="json")
    async def create_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        return self._api.reply_json(
            await self._datasets.create_snapshot(caller_of(request, identity), await request.read())
        )

    @operation("/-/snapshots/{snapshot}", "A snapshot as it is stored", content="bytes")
    @operation("/-/snapshots/{snapshot}/pages/{page}", "The index of a shard of a snapshot", content="bytes")
    @operation(
        "/-/snapshots/{snapshot}/statistics",
        "Samples of each class, and sizes by powers of two",
        reply=reply_types.Statistics,
    )
    async def get_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, *what = hash_path(request, "/-/snapshots/", 1, 2, 3)
        caller = caller_of(request, identity)
        if len(what) == 2:
            check_last_part(request, what[0], "pages")
            page = await self._datasets.page_document(caller, digest, what[1])
            return self._api.reply(CONTENT_TYPE, page)
        if what:
            check_last_part(request, what[0], "statistics")
            snapshot = await self._datasets.snapshot(caller, digest)
            return self._api.reply_json(await asyncio.to_thread(snapshot_statistics, snapshot))
        document = await self._datasets.snapshot_document(caller, digest)
        return self._api.reply(CONTENT_TYPE, document)

    @operation("/-/snapshots/{snapshot}/read-cost", "What an order of reading would cost", accepts="json")
    @operation("/-/snapshots/{snapshot}/order", "The order of loaders without shuffle=", accepts="json")
    async def post_to_snapshot(self, request: MeshRequest, identity: Identity) -> Reply:
        digest, what = hash_path(request, "/-/snapshots/", 2)
        check_last_part(request, what, "read-cost", "order")
        answer = self._orders.choose if what == "order" else self._read_costs.estimate
        return self._api.reply_json(await answer(caller_of(request, identity), digest, await request.read()))

    @operation(
        "/-/preview",
        "The first rows of a Parquet or Arrow file",
        query=("bucket", "key"),
        reply=reply_types.TablePreview,
    )
    async def preview_table(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer the first rows of a Parquet or Arrow file."""
        query = parse_query(request, ("bucket", "key"))
        caller = caller_of(request, identity)
        found = await self._tables.preview(caller, query.get("bucket", ""), query.get("key", ""))
        return self._api.reply_json(found)
