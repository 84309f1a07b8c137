"""Ending a server without hurting the requests it is answering.

Law: aiohttp's own shutdown discards the rest of a body that is still arriving, so a connection is told to end
only when its request has come in whole, or when the time is up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.web.connections import Connection

if TYPE_CHECKING:
    from aiohttp import web

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
            if isinstance(connection, Connection):
                connection.let_go()
        await asyncio.sleep(_LOOK_AGAIN)
    server.pre_shutdown()
    await server.shutdown(_LAST_WORD)
