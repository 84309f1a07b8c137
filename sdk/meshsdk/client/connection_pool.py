"""Pool: the idle connections to an endpoint, for the next request.

Invariant: a connection of another process, as in a forked child, is never reused.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from meshsdk.client.http_connection import Connection

if TYPE_CHECKING:
    from meshsdk.client.settings import Endpoint

_MAX_IDLE = 16


def _close_all(idle: deque[Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


class Pool:
    """Idle connections to one endpoint, most recently used first.

    Thread-safe; a forked child starts with an empty pool.
    """

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._idle: deque[Connection] = deque(maxlen=None)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def acquire(self, connect_timeout: float) -> Connection:
        """Return an idle connection, else a new one. Raises ConnectError."""
        if self._pid != os.getpid():
            self.clear()
            self._pid = os.getpid()
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.idle():
                    return connection
                connection.close()
        return self.dial(connect_timeout)

    def dial(self, connect_timeout: float, timeout: float | None = None) -> Connection:
        """Open a new connection, which the caller owns. `timeout` (seconds) overrides that of the pool."""
        return Connection(self.endpoint, self.timeout if timeout is None else timeout, connect_timeout)

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool; its last response must have been read to the end."""
        if len(self._idle) < _MAX_IDLE and self._pid == os.getpid():
            self._idle.append(connection)
        else:
            connection.close()

    def clear(self) -> None:
        """Close the idle connections."""
        _close_all(self._idle)

    def __repr__(self) -> str:
        return f"Pool({self.endpoint}, {len(self._idle)} idle)"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.endpoint, self.timeout)
