"""Connections of other nodes that a worker hands over to the process that moves data, with the request that
came on them; and that process's server for them.

Law: a connection is handed over whole, between two answers: nothing of it stays behind, and what comes on it
later comes to the new process. The request is verified again there. An encrypted connection cannot be handed
over, nor one on which its owner may ask for something else: their calls are answered where they came.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import TYPE_CHECKING, Final, cast

import msgspec

from meshd.net.peers import LANE_HEADER
from meshd.net.unixmessages import StreamClosedError
from meshd.web.draining import drain
from meshd.web.encrypting import is_encrypted
from meshd.web.peers import peer_route
from meshd.web.replies import Reply, SentReply
from meshd.web.server import make_server
from meshd.web.settling import CLIENT_GONE, Trace, settle
from meshwire import percents
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from meshd.cluster.carrying import MoverDoor
    from meshd.config import HttpSettings
    from meshd.kit.clock import Clock
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall, PeerGate
    from meshd.web.server import NativeRoute, OpenHandler

_LIMIT: Final = 5 << 20
_LAST_WORD: Final = 0.5


class Guest(msgspec.Struct, frozen=True, tag="guest"):
    """Somebody's connection comes with this, and the bytes of a request that were read from it already."""

    request: bytes


def handed_over(routes: Sequence[NativeRoute], door: MoverDoor) -> list[NativeRoute]:
    """The same doors, of which all calls go on behind `door`."""
    return [peer_route(route.method, route.prefix, _Handing(route, door).hand) for route in routes]


class _Handing:
    """One door."""

    def __init__(self, route: NativeRoute, door: MoverDoor) -> None:
        self._here, self._door = cast("OpenHandler", route.handler), door

    async def hand(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the peer closed the connection")
        headers = request.headers
        whole = "Content-Length" in headers and "Expect" not in headers
        if is_encrypted(transport) or not whole or LANE_HEADER not in headers:
            return await self._here(request)
        body = await call.raw(request, _LIMIT)
        if transport.is_closing() or transport.get_write_buffer_size():
            raise ConnectionResetError("the peer closed the connection")
        fd = os.dup(transport.get_extra_info("socket").fileno())
        try:
            stream = await self._door.enter()
            try:
                await stream.send(Guest(_head(request) + body), [fd])
            finally:
                stream.close()
        except (OSError, StreamClosedError) as error:
            raise S3Error("ServiceUnavailable", f"Nobody moves data here at the moment: {error}") from error
        finally:
            os.close(fd)
        transport.abort()  # closes this process's descriptor, and nothing else
        return SentReply(200, keep_alive=False)


def _head(request: MeshRequest) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), percents.to_bytes(request.raw_path))]
    lines += [b"%s: %s" % field for field in request.raw_headers]
    return b"\r\n".join([*lines, b"", b""])


class GuestServer:
    """Answers connections that were handed over. Make it in the running loop."""

    def __init__(
        self, routes: Sequence[NativeRoute], gate: PeerGate, clock: Clock, http: HttpSettings
    ) -> None:
        self._routes, self._gate, self._clock = tuple(routes), gate, clock
        self._server = make_server(self._handle, clock, http)
        self.answering = 0
        """Requests under way."""

    def __repr__(self) -> str:
        return f"<GuestServer, {self._server.open_ones} connections>"

    async def welcome(self, guest: Guest, fds: Sequence[int]) -> None:
        """Takes the connection over."""
        if len(fds) != 1:
            return
        sock = socket.socket(fileno=os.dup(fds[0]))
        sock.setblocking(False)
        try:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.connect_accepted_socket(self._server, sock)
        except OSError:  # it went away
            sock.close()
            return
        protocol.data_received(guest.request)

    async def aclose(self) -> None:
        """End all connections."""
        await drain(self._server, self._clock, _LAST_WORD)

    async def _handle(self, request: MeshRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        request.trace = trace = Trace(self._clock, None, request.remote)
        trace.target = path
        self.answering += 1
        try:
            response = await self._answer(request, path)
            if isinstance(response, Reply):
                await settle(request, response)
                trace.sent += response.body_length
        except BaseException:
            trace.finish(CLIENT_GONE)
            raise
        finally:
            self.answering -= 1
        trace.finish(response.status)
        return response

    def _route(self, method: str, path: str) -> NativeRoute:
        for route in self._routes:
            if route.takes(method, path):
                return route
        raise S3Error("NoSuchKey", "Only what moves data is answered on this connection.")

    async def _answer(self, request: MeshRequest, path: str) -> web.StreamResponse:
        try:
            route = self._route(request.method, path)
            request.trace.operation = f"{route.method} {route.prefix}"
            request.gate = self._gate
            return await cast("OpenHandler", route.handler)(request)
        except S3Error as error:
            request.trace.code = error.code
            body = json.dumps({"error": {"code": error.code, "message": error.message}}).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            return Reply(error.status, headers, body, self._clock.now_ms() // 1000)
