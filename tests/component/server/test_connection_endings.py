"""Connections that the node wants to end: they do, whatever their clients leave unread or never begin."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from meshd.config import HttpSettings
from meshd.server.accept_balancer import Acceptor, ConnectionCounts
from meshd.server.connection import Connection
from meshd.server.http_server import drain_server, make_server
from meshd.server.response import Reply
from meshd.server.tls import ServerTls, TlsFiles, tls_listen_options
from meshd.util.clock import SystemClock
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.certificates import Authority
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from meshd.server.http_server import MeshServer
    from meshd.server.request import MeshRequest

ANSWER = 10_000
ASK = b"GET /-/x HTTP/1.1\r\nHost: x\r\n\r\n"


async def _answer(request: MeshRequest) -> Reply:
    return Reply(200, [("Content-Length", str(ANSWER))], bytes(ANSWER), 0)


@asynccontextmanager
async def serving(
    http: HttpSettings, handler: Callable[[MeshRequest], Awaitable[Reply]] = _answer
) -> AsyncIterator[tuple[MeshServer, int]]:
    """A server that answers everything with ANSWER bytes, or as `handler` does, and its port. Its sockets'
    buffers are small."""
    server = make_server(handler, SystemClock(), http)
    door = socket.create_server(("127.0.0.1", 0))
    door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener = await asyncio.get_running_loop().create_server(server, sock=door)
    try:
        yield server, door.getsockname()[1]
    finally:
        await stop_listening(listener)
        server.pre_shutdown()
        await server.shutdown(0.1)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT):
        while not found():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.01)


async def leave_unread(server: MeshServer, port: int) -> tuple[socket.socket, Connection]:
    """A client that asks until a little of an answer waits in the server's memory, then for nothing more; and
    the server's end of it, idle."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await until(lambda: bool(server.connections))
    (connection,) = server.connections
    assert isinstance(connection, Connection)
    while connection.unsent_bytes < 2 * ANSWER:  # the kernel takes some more of it in a moment
        asked = connection._request_count
        await loop.sock_sendall(client, ASK)
        await until(lambda: connection._request_count > asked and connection.is_idle)  # noqa: B023
    return client, connection


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_an_idle_client_that_leaves_its_answer_unread() -> None:
    """Closed for idling, it is not forgotten before it has gone."""

    async def scene() -> None:
        async with serving(HttpSettings(idle_timeout=60)) as (server, port):
            client, connection = await leave_unread(server, port)
            server.guard.stop()
            server.guard._http = HttpSettings(idle_timeout=60, body_timeout=0.4)
            server.guard.start()
            connection.force_close()  # as when its time is up
            assert server.connection_count == 1
            await until(lambda: not server.connection_count)
            client.close()

    run(scene)


def test_room_is_made_of_clients_that_read_nothing() -> None:
    """None of them stays beyond the limit."""

    async def scene() -> None:
        async with serving(HttpSettings()) as (server, port):
            server.guard.limit = 1
            client, old = await leave_unread(server, port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await until(lambda: server.connection_count == 1)
            assert old.transport is None
            writer.close()
            client.close()

    run(scene)


def test_handshakes_that_do_not_end_make_room_for_new_ones(tmp_path: Path) -> None:
    """Connections are counted when their handshake is done: those before it must be few, too."""
    authority = Authority(tmp_path)
    pair = authority.issue()

    async def scene() -> None:
        clock, door = SystemClock(), socket.create_server(("127.0.0.1", 0), backlog=64)
        server, port = make_server(_answer, clock, HttpSettings()), door.getsockname()[1]
        server.guard.limit = 100
        tls = ServerTls(TlsFiles(pair.cert, pair.key), clock)
        porter = Acceptor(door, server, ConnectionCounts(1), 0, tls_listen_options(tls, 60.0))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        trust = ssl.create_default_context(cafile=authority.cert)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(ASK)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(WAIT_TIMEOUT):
            for oldest, _ in silent[:5]:
                assert await oldest.read() == b""
        assert not any(late.at_eof() for late, _ in silent[5:])
        for _, each in [*silent, (reader, writer)]:
            each.transport.abort()
        porter.close()
        server.pre_shutdown()
        await server.shutdown(0.1)

    run(scene)


def test_who_is_connected_when_a_node_stops_is_answered() -> None:
    """Connections that nobody has accepted yet, and their requests, are not reset with the listener."""

    async def scene() -> None:
        clock, door = SystemClock(), socket.create_server(("127.0.0.1", 0), backlog=64)
        server = make_server(_answer, clock, HttpSettings())
        porter = Acceptor(door, server, ConnectionCounts(1), 0, {})
        clients = [socket.create_connection(door.getsockname()) for _ in range(20)]
        porter.close()  # in the same turn of the loop: it has accepted none
        await porter.wait_for_handshakes()
        ending = asyncio.create_task(drain_server(server, clock, 30.0))
        for client in clients:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, ASK)
        for client in clients:
            said = await asyncio.get_running_loop().sock_recv(client, 100)
            assert said.startswith(b"HTTP/1.1 200")
            client.close()
        async with asyncio.timeout(WAIT_TIMEOUT):
            await ending

    run(scene)


def test_a_request_that_comes_as_its_client_goes() -> None:
    """It is not begun, and nobody is told of an error."""

    async def scene() -> None:
        begun, told = list[str](), list[dict[str, Any]]()

        async def answer(request: MeshRequest) -> Reply:
            begun.append(request.path)
            return await _answer(request)

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        async with serving(HttpSettings(), answer) as (server, port):
            client = socket.create_connection(("127.0.0.1", port))
            await until(lambda: bool(server.connections))
            (connection,) = server.connections
            assert isinstance(connection, Connection)
            await until(lambda: connection.is_idle)
            assert connection.transport is not None
            connection.transport.abort()
            connection.data_received(ASK)  # before the loop says that it is gone
            await until(lambda: not server.connection_count)
            await asyncio.sleep(0)
            client.close()
        gc.collect()  # of a task's error the loop hears when the task goes
        assert (begun, told) == ([], [])

    run(scene)


def test_who_says_nothing_does_not_keep_a_node() -> None:
    async def scene() -> None:
        async with serving(HttpSettings()) as (server, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: bool(server.connections))
            async with asyncio.timeout(WAIT_TIMEOUT):
                await drain_server(server, SystemClock(), 3600)
            writer.close()

    run(scene)


def test_a_head_without_end_is_refused() -> None:
    """Though each of its lines is short enough: together they are more than is ever read."""

    async def scene() -> None:
        async with serving(HttpSettings(max_header_bytes=8 << 10)) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
            for number in range(100):
                writer.write(b"X-%d: %b\r\n" % (number, b"y" * 1000))
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.readline()).startswith(b"HTTP/1.1 431")
            writer.close()
            await until(lambda: not server.connection_count)

    run(scene)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_whose_next_request_has_arrived_is_not_idle(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A full server closes another one: the request, which may be one not to be sent twice, is answered."""

    async def scene() -> None:
        async with serving(HttpSettings(max_connections=2)) as (server, port):
            first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in (first, second):
                await _one_answer(reader, writer)
            await until(lambda: all(one.is_idle for one in _connections(server)))
            sock = first[1].get_extra_info("socket")
            os.write(sock.fileno(), ASK)  # in the kernel; the loop has not had a turn since
            assert server.guard.evict_idle()
            assert (await first[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await first[0].readexactly(ANSWER)
            assert await second[0].read() == b""  # had been idle for a shorter time
            os.write(sock.fileno(), ASK)
            assert not server.guard.evict_idle()  # the newcomer is refused
            for _, writer in (first, second):
                writer.close()
                await writer.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())


async def _one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(ASK)
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(ANSWER)


def _connections(server: MeshServer) -> list[Connection]:
    return [one for one in server.connections if isinstance(one, Connection)]
