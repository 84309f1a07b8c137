"""Health and metrics endpoints: `/-/healthy`, `/-/ready`, `/metrics`. Unsigned: probes cannot sign.

They reveal nothing about data, names or keys, and answer even when the rest of the node has failed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.cluster.peer_checks import MAP_FORMAT, MAP_FORMAT_HEADER, MAP_VERSION_HEADER
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation
from meshd.server.request import flush_request_counters
from meshd.server.response import Reply
from meshd.telemetry import metric_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.server.request import MeshRequest
    from meshd.server.response import Header
    from meshd.util.clock import Clock


def health_routes(
    trouble: Callable[[], str],
    map_version: Callable[[], int],
    clock: Clock,
    *,
    legacy_metric_names: bool = True,
    exemplars: bool = False,
) -> list[HttpRoute]:
    """Return the routes. `trouble` returns why the node should get no traffic; empty if it should.
    `map_version` returns the version of the cluster map that this process uses. `exemplars`: whether scrapers
    that accept OpenMetrics get that format, which alone has exemplars."""

    def reply(status: int, body: bytes, *more: Header, kind: str = "text/plain; charset=utf-8") -> Reply:
        headers = [("Content-Type", kind), ("Cache-Control", "no-store"), ("Content-Length", str(len(body)))]
        return Reply(status, [*headers, *more], body, clock.now_ms() // 1000)

    @operation("/-/healthy", "Whether the process runs", content="text")
    async def healthy(_: MeshRequest) -> Reply:
        newest = (MAP_FORMAT_HEADER, str(MAP_FORMAT))
        return reply(200, b"healthy\n", (MAP_VERSION_HEADER, str(map_version())), newest)

    @operation("/-/ready", "Whether the node should get traffic", content="text")
    async def ready(_: MeshRequest) -> Reply:
        reason = trouble()
        return reply(503 if reason else 200, f"{reason or 'ready'}\n".encode())

    @operation("/metrics", "Metrics for Prometheus", content="text")
    async def scrape(request: MeshRequest) -> Reply:
        flush_request_counters()
        render, kind = metric_registry.render_metrics, metric_registry.CONTENT_TYPE
        if exemplars and "application/openmetrics-text" in request.headers.get("accept", ""):
            render, kind = metric_registry.render_openmetrics, metric_registry.OPENMETRICS_TYPE
        # Reads a file per process.
        body = await asyncio.to_thread(render, legacy_names=legacy_metric_names)
        return reply(200, body, kind=kind)

    return [
        HttpRoute("GET", "/-/healthy", healthy, access="open"),
        HttpRoute("GET", "/-/ready", ready, access="open"),
        HttpRoute("GET", "/metrics", scrape, access="open"),
    ]
