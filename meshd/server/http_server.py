"""The HTTP server of a worker: its connections, and graceful shutdown.

On shutdown, a connection ends only after its request has arrived in full and is answered, or when the grace
period is over.
"""

from __future__ import annotations

import asyncio
import os
import resource
from typing import TYPE_CHECKING

from meshd.server.api.sts_query import StsQueryEndpoint
from meshd.server.connection import Connection
from meshd.server.connection_limits import ConnectionLimiter
from meshd.server.console.endpoint import ConsoleEndpoint
from meshd.server.request_dispatcher import NativeRoutes, RequestDispatcher
from meshd.server.s3.endpoint import S3Endpoint
from meshd.server.s3.fast_path import FastPath
from meshd.server.s3.request_auth import Authenticator, RequestAdmission, VirtualHosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.config import HttpSettings
    from meshd.server.http_route import HttpRoute
    from meshd.server.response import RequestHandler
    from meshd.server.services import ServerServices
    from meshd.util.clock import Clock


class MeshServer:
    """Creates and closes the connections of one worker. `handler` answers a request: it has written the reply
    that it returns, or leaves that to the connection; it raises ConnectionError when the client is gone."""

    def __init__(
        self,
        handler: RequestHandler,
        *,
        clock: Clock,
        guard: ConnectionLimiter,
        keepalive_timeout: float,
        hot: FastPath | None = None,
    ) -> None:
        """Create it in the running loop."""
        self.handler, self.clock, self.guard, self.hot = handler, clock, guard, hot
        self.keepalive_timeout = keepalive_timeout
        """Seconds for which an idle connection is kept."""
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self.on_connection_lost: Callable[[], None] | None = None
        """Called when a connection has ended."""
        guard.start()

    def __repr__(self) -> str:
        return f"<MeshServer, {len(self._connections)} connections>"

    def __call__(self) -> Connection:
        """The protocol factory of `loop.create_server`."""
        return Connection(self, self._loop, None if self.hot is None else self.hot.try_respond)

    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        return list(self._connections)

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def connection_made(self, connection: Connection) -> None:
        """Called by a connection: a client has connected."""
        self._connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        """Called by a connection: a client is gone."""
        self._connections.discard(connection)
        if self.on_connection_lost is not None:
            self.on_connection_lost()

    def pre_shutdown(self) -> None:
        """Close the idle connections, and the others after their answers."""
        for connection in self.connections:
            connection.close()

    async def shutdown(self, patience: float) -> None:
        """End all connections; see `Connection.shutdown`."""
        self.guard.stop()
        await asyncio.gather(*[connection.shutdown(patience) for connection in self.connections])


def build_server(deps: ServerServices, native: Sequence[HttpRoute] = (), *, hot: bool = True) -> MeshServer:
    """Return the server of one worker. Call it in a running loop, then `loop.create_server(server,
    sock=...)`.

    Stop it with `server.pre_shutdown()` and `await server.shutdown(timeout)`, after the listening socket is
    closed. `hot` enables the fast path.
    """
    authenticator = Authenticator(deps.sessions, deps.clock, sigv2=deps.http.sigv2)
    admission = RequestAdmission(authenticator, deps.access)
    routes = NativeRoutes(
        native, admission, deps.peer_authenticator, deps.mesh, deps.clock, deps.audit, deps.http
    )
    dispatcher = RequestDispatcher(
        S3Endpoint(deps, admission, authenticator).handle,
        routes,
        None
        if deps.web_identity is None
        else StsQueryEndpoint(
            deps.web_identity, authenticator, deps.mesh, deps.clock, deps.audit, deps.http
        ).handle,
        VirtualHosts(deps.http.domains),
        None if deps.console_sessions is None else ConsoleEndpoint(deps, deps.console_sessions, routes),
    )
    return make_server(dispatcher.handle, deps.clock, deps.http, FastPath(deps, admission) if hot else None)


def make_server(
    handler: RequestHandler, clock: Clock, http: HttpSettings, hot: FastPath | None = None
) -> MeshServer:
    """Return a server whose requests are all answered by `handler`."""
    return MeshServer(
        handler,
        clock=clock,
        hot=hot,
        guard=ConnectionLimiter(http, _connection_limit(http.max_connections)),
        keepalive_timeout=http.idle_timeout,
    )


def _connection_limit(wanted: int) -> int:
    """Return the connection limit: `wanted`, or what the limit of open files allows. A quarter of the free
    descriptors is reserved for data files and for connections to other nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - len(os.listdir("/proc/self/fd"))
    return max(1, min(wanted, free * 3 // 4))


_LOOK_AGAIN = 0.02
_LAST_WORD = 0.5  # seconds for cancelled handlers


async def drain_server(server: MeshServer, clock: Clock, grace: float) -> None:
    """Close idle connections at once and busy ones after their response; after `grace` seconds cut the rest.

    Call it when the listening socket is closed.
    """
    deadline = clock.monotonic() + grace
    while server.connections and clock.monotonic() < deadline:
        for connection in server.connections:
            connection.close_when_idle()
        await asyncio.sleep(_LOOK_AGAIN)
    server.pre_shutdown()
    await server.shutdown(_LAST_WORD)
