"""Shutdown of a server that listens in a test's own process.

Law: no connection is left without an owner, whenever it arrived.
"""

from __future__ import annotations

import asyncio

_TURNS = 5  # of the loop, until what was accepted has its transport, then its handler, and that has begun


async def stop_listening(server: asyncio.Server) -> None:
    """Accept nothing more, and close what listens. A connection that is being accepted meanwhile would be
    leaked, and its client wait: when this returns its handler runs, as that of any other."""
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    server.close()
