"""Abandoned requests: what is done for a client that has closed its connection ends a while later.

Law: a request that is sent again within GRACE_SECONDS, as after the time limit of a proxy, joins the work for
the first one. Otherwise a batch that takes longer to build than that limit would never be built.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.server.client_transport import ClientTransport

GRACE_SECONDS: Final = 10.0


@contextmanager
def cancel_when_abandoned(connection: ClientTransport, seconds: float = GRACE_SECONDS) -> Iterator[None]:
    """Cancel the block `seconds` after the client has closed its side of the connection. Raises
    ConnectionResetError then.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    timer: asyncio.TimerHandle | None = None
    abandoned = False

    def cancel() -> None:
        nonlocal abandoned
        abandoned = task.cancel()

    def closed() -> None:
        nonlocal timer
        timer = loop.call_later(seconds, cancel)

    connection.on_closed = closed
    try:
        yield
    except asyncio.CancelledError:
        if abandoned and not task.uncancel():
            raise ConnectionResetError("the client closed the connection") from None
        raise
    finally:
        connection.on_closed = None
        if timer is not None:
            timer.cancel()
