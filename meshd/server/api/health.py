"""Health and metrics endpoints: `/-/healthy`, `/-/ready`, `/metrics`. Unsigned: probes cannot sign.

Law: they reveal nothing about data, names or keys, and answer even when the rest of the node has failed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from meshd.cluster.peer_checks import MAP_VERSION_HEADER
from meshd.server.http_server import HttpRoute
from meshd.server.request_trace import flush_request_counters
from meshd.telemetry import metrics
from meshwire.http_values.dates import format_http

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.util.clock import Clock

_PLAIN = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}


def health_routes(
    trouble: Callable[[], str], map_version: Callable[[], int], clock: Clock
) -> list[HttpRoute]:
    """The routes. `trouble` says in words why the node should get no traffic; empty text when it should.
    `map_version` is the one of the cluster map that this process goes by."""

    async def healthy(_: web.BaseRequest) -> web.StreamResponse:
        told = {MAP_VERSION_HEADER: str(map_version()), "Date": format_http(clock.now_ms() // 1000)}
        return web.Response(text="healthy\n", headers=_PLAIN | told)

    async def ready(_: web.BaseRequest) -> web.StreamResponse:
        reason = trouble()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200, headers=_PLAIN)

    async def scrape(_: web.BaseRequest) -> web.StreamResponse:
        flush_request_counters()
        body = await asyncio.to_thread(metrics.render_metrics)  # reads a file of every process
        return web.Response(body=body, headers=_PLAIN | {"Content-Type": metrics.CONTENT_TYPE})

    return [
        HttpRoute("GET", "/-/healthy", healthy, auth=False),
        HttpRoute("GET", "/-/ready", ready, auth=False),
        HttpRoute("GET", "/metrics", scrape, auth=False),
    ]
