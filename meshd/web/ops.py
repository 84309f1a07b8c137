"""Endpoints for operators: alive, ready, metrics. Unsigned, for probes and scrapers cannot sign.

Law: they tell nothing about data, names or keys, and answer even when the rest of the node is in trouble.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from meshd.cluster.probing import VERSION_HEADER
from meshd.telemetry import metrics
from meshd.web.server import NativeRoute
from meshd.web.settling import count_now
from meshwire.httpdates import format_http

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.kit.clock import Clock

_PLAIN = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}


def ops_routes(trouble: Callable[[], str], map_version: Callable[[], int], clock: Clock) -> list[NativeRoute]:
    """The routes. `trouble` says in words why the node should get no traffic; empty text when it should.
    `map_version` is the one of the cluster map that this process goes by."""

    async def healthy(_: web.BaseRequest) -> web.StreamResponse:
        told = {VERSION_HEADER: str(map_version()), "Date": format_http(clock.now_ms() // 1000)}
        return web.Response(text="healthy\n", headers=_PLAIN | told)

    async def ready(_: web.BaseRequest) -> web.StreamResponse:
        reason = trouble()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200, headers=_PLAIN)

    async def scrape(_: web.BaseRequest) -> web.StreamResponse:
        count_now()
        body = await asyncio.to_thread(metrics.render)  # reads a file of every process
        return web.Response(body=body, headers=_PLAIN | {"Content-Type": metrics.CONTENT_TYPE})

    return [
        NativeRoute("GET", "/-/healthy", healthy, auth=False),
        NativeRoute("GET", "/-/ready", ready, auth=False),
        NativeRoute("GET", "/metrics", scrape, auth=False),
    ]
