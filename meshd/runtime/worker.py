"""The body of an HTTP worker: serve the port until SIGTERM, then finish what runs.

Law: reports ready only when it accepts. After SIGTERM it accepts nothing new, lets requests finish within the
grace period, closes idle connections and ends with code 0.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from meshd.runtime.node import open_node, web_deps
from meshd.runtime.steward import steward
from meshd.telemetry import logs
from meshd.web.ops import ops_routes
from meshd.web.server import build_server

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from meshd.config import NodeSettings
    from meshd.runtime.children import Reporter
    from meshd.runtime.listening import Doors
    from meshd.runtime.node import Node


def run_worker(
    settings: NodeSettings, index: int, doors: Doors, trouble: Callable[[], str], reporter: Reporter
) -> None:
    """Worker `index` from start to end. A lone worker is the steward too."""
    logs.configure(settings.log_format, settings.log_level, f"worker-{index}")
    with (
        open_node(settings, f"w{index}") as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_work(node, index, doors, trouble, reporter))


async def _work(node: Node, index: int, doors: Doors, trouble: Callable[[], str], reporter: Reporter) -> None:
    async with AsyncExitStack() as stack:
        if node.settings.workers == 1:
            await stack.enter_async_context(steward(node, doors.steward))
        await _serve(node, doors.http[index], trouble, reporter)


async def _serve(node: Node, sock: socket.socket, trouble: Callable[[], str], reporter: Reporter) -> None:
    http = node.settings.http
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = build_server(web_deps(node), ops_routes(trouble))
    listener = await loop.create_server(server, sock=sock, backlog=http.backlog)
    reporter.ready()
    await stop.wait()
    listener.close()
    server.pre_shutdown()
    await server.shutdown(http.drain_timeout)
