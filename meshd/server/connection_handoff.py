"""Handoff of connections that rebalancing uses to the rebalance process.

A connection is handed off whole, between two responses, and its request is authenticated again in the new
process. TLS connections and connections used for other calls stay.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import TYPE_CHECKING, Final, cast

import msgspec

from meshd.errors import MeshdError
from meshd.rpc.peer_client import POOL_HEADER
from meshd.rpc.process_rpc import Method
from meshd.server.direct_sender import is_encrypted
from meshd.server.http_server import drain_server, make_server
from meshd.server.peer_endpoint import peer_route
from meshd.server.request import CLIENT_GONE, RequestTrace
from meshd.server.response import Reply, StreamedReply, finish_response
from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.cluster.rebalance.worker import WorkerSocket
    from meshd.config import HttpSettings
    from meshd.server.http_route import HttpRoute
    from meshd.server.peer_endpoint import PeerAuthenticator, PeerCaller, PeerHandler
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock


_MAX_HANDED_BODY: Final = 5 << 20
_LAST_WORD: Final = 0.5


class HandedConnection(msgspec.Struct, frozen=True):
    """Accompanies a connection; contains the bytes of a request that were already read from it."""

    request: bytes


HAND_OFF: Method[HandedConnection, None] = Method("hand-off", HandedConnection, None)


def handoff_routes(routes: Sequence[HttpRoute], worker_socket: WorkerSocket) -> list[HttpRoute]:
    """Return the same routes, with handlers that hand the connection to the process at `worker_socket`."""
    return [
        peer_route(route.method, route.prefix, _HandoffHandler(route, worker_socket).hand_off)
        for route in routes
    ]


class _HandoffHandler:
    """Hands off the calls of one route."""

    def __init__(self, route: HttpRoute, worker_socket: WorkerSocket) -> None:
        self._here, self._worker_socket = cast("PeerHandler", route.handler), worker_socket

    async def hand_off(self, request: MeshRequest, call: PeerCaller) -> Reply:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the peer closed the connection")
        headers = request.headers
        whole = "Content-Length" in headers and "Expect" not in headers
        if is_encrypted(transport) or not whole or POOL_HEADER not in headers:
            return await self._here(request, call)
        body = await call.read_raw_body(request, _MAX_HANDED_BODY)
        if transport.is_closing() or transport.get_write_buffer_size():
            raise ConnectionResetError("the peer closed the connection")
        fd = os.dup(transport.get_extra_info("socket").fileno())
        client = self._worker_socket.client()
        try:
            await client.notify(HAND_OFF, HandedConnection(_head(request) + body), [fd])
            # At once, or it would read the other process's input; the descriptor there stays open.
            transport.abort()
        except MeshdError as error:
            raise S3Error("ServiceUnavailable", f"The connection cannot be handed off: {error}") from error
        finally:
            await client.aclose()
            os.close(fd)
        return StreamedReply(200, keep_alive=False)


def _head(request: MeshRequest) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), percent_encoding.to_bytes(request.raw_path))]
    lines += [b"%s: %s" % field for field in request.raw_headers]
    return b"\r\n".join([*lines, b"", b""])


class HandoffServer:
    """Serves connections that were handed off. Create it in the running loop."""

    def __init__(
        self, routes: Sequence[HttpRoute], gate: PeerAuthenticator, clock: Clock, http: HttpSettings
    ) -> None:
        self._routes, self._gate, self._clock = tuple(routes), gate, clock
        self._server = make_server(self._handle, clock, http)
        self.requests_in_flight = 0
        """Requests in progress."""

    def __repr__(self) -> str:
        return f"<HandoffServer, {self._server.connection_count} connections>"

    async def adopt_connection(self, guest: HandedConnection, fds: Sequence[int]) -> None:
        """Take a connection over."""
        if len(fds) != 1:
            return
        sock = socket.socket(fileno=os.dup(fds[0]))
        sock.setblocking(False)
        try:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.connect_accepted_socket(self._server, sock)
        except OSError:  # the peer closed it
            sock.close()
            return
        protocol.data_received(guest.request)

    async def aclose(self) -> None:
        """Close all connections."""
        await drain_server(self._server, self._clock, _LAST_WORD)

    async def _handle(self, request: MeshRequest) -> Reply:
        path = request.raw_path.partition("?")[0]
        request.trace = trace = RequestTrace(self._clock, None, request.remote)
        trace.target = path
        self.requests_in_flight += 1
        try:
            response = await self._answer(request, path)
            if isinstance(response, Reply):
                await finish_response(request, response)
                trace.sent += response.body_length
        except BaseException:
            trace.finish(CLIENT_GONE)
            raise
        finally:
            self.requests_in_flight -= 1
        trace.finish(response.status)
        return response

    def _route(self, method: str, path: str) -> HttpRoute:
        for route in self._routes:
            if route.matches(method, path):
                return route
        raise S3Error("NoSuchKey", "Only rebalance calls are answered on this connection.")

    async def _answer(self, request: MeshRequest, path: str) -> Reply:
        try:
            route = self._route(request.method, path)
            request.trace.operation = f"{route.method} {route.prefix}"
            return await self._gate.answer(request, cast("PeerHandler", route.handler))
        except S3Error as error:
            request.trace.code = error.code
            body = json.dumps({"error": {"code": error.code, "message": error.message}}).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            return Reply(error.status, headers, body, self._clock.now_ms() // 1000)
