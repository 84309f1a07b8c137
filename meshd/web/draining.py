"""Ending a server without hurting the requests it is answering.

Law: aiohttp's own shutdown discards the rest of a body that is still arriving, so a connection is told to end
only when its request has come in whole, or when the time is up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler

    from meshd.kit.clock import Clock

_LOOK_AGAIN = 0.02
_LAST_WORD = 0.5  # seconds for handlers that are cancelled


async def drain(server: web.Server, clock: Clock, grace: float) -> None:
    """Close idle connections now, busy ones after their answer; after `grace` seconds cut what is left.

    Call it when the listening socket is closed.
    """
    deadline = clock.monotonic() + grace
    while server.connections and clock.monotonic() < deadline:
        for connection in server.connections:
            _let_go(connection)
        await asyncio.sleep(_LOOK_AGAIN)
    server.pre_shutdown()
    await server.shutdown(_LAST_WORD)


def _let_go(connection: RequestHandler) -> None:
    """Close it if it is idle; if it answers a request that is here in whole, have it close afterwards.

    aiohttp tells neither; its attributes do, and its keep-alive timer looks at the same one.
    """
    request, waiter = connection._current_request, connection._waiter
    if waiter is not None and not waiter.done():
        connection.force_close()
    elif request is not None and request.content.is_eof():
        connection.close()
