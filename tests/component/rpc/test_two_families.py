"""A name with addresses of two families, of which one does not answer: peers and the SDK use the other."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from meshd.rpc.peer_connector import CONNECT_TIMEOUT, PeerConnector
from meshd.util.clock import SystemClock
from meshsdk.client.endpoint_socket import open_socket
from meshsdk.client.settings import Endpoint
from meshwire.cluster import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "two-families.test"
SILENT, ANSWERS = "127.0.0.1", "::1"


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[str]]]:
    """The port of a name whose first address drops the packets of new connections; a list to fill."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.create_server((ANSWERS, 0), family=socket.AF_INET6)))
        found = int(server.getsockname()[1])
        silent = stack.enter_context(closing(socket.create_server((SILENT, found), backlog=0)))
        for _ in range(4):  # more than its queue holds: the kernel drops what follows
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        resolve = socket.getaddrinfo

        def resolved(host: Any, *args: Any, **named: Any) -> Any:
            if host not in (NAME, NAME.encode()):
                return resolve(host, *args, **named)
            return [*resolve(SILENT, *args, **named), *resolve(ANSWERS, *args, **named)]

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        yield found, []


def test_peers_use_the_family_that_answers_and_try_it_first_from_then_on(
    name: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, tried = name
    node = Node("n2", f"http://{NAME}:{port}")

    async def connect() -> list[str]:
        connector, loop = PeerConnector(SystemClock()), asyncio.get_running_loop()
        monkeypatch.setattr(loop, "sock_connect", _recorded(loop.sock_connect, tried))
        found = []
        for _ in range(2):
            wire = await connector.open_connection(node, lambda _: None, CONNECT_TIMEOUT)
            assert wire.transport is not None
            found.append(wire.transport.get_extra_info("peername")[0])
            wire.transport.abort()
        return found

    assert asyncio.run(connect()) == [ANSWERS, ANSWERS]
    assert tried == [SILENT, ANSWERS, ANSWERS]


def test_the_sdk_uses_the_family_that_answers_and_tries_it_first_from_then_on(
    name: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, tried = name
    connect = socket.create_connection

    def recorded(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address[0])
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", recorded)
    for _ in range(2):
        with closing(open_socket(Endpoint("http", NAME, port), 20.0, 5.0)) as sock:
            assert sock.getpeername()[0] == ANSWERS
    assert tried == [SILENT, ANSWERS, ANSWERS]


def _recorded(connect: Any, tried: list[str]) -> Any:
    async def recorded(sock: socket.socket, address: tuple[Any, ...]) -> None:
        tried.append(address[0])
        await connect(sock, address)

    return recorded


@pytest.mark.parametrize(("timeout", "idle"), [(3.0, 1), (0.2, 1), (60.0, 30)])
def test_the_kernel_notices_a_machine_that_is_gone(timeout: float, idle: int) -> None:
    """Each signal that a process handles begins the time limit of a read anew: with five a second, reads from
    a machine without power did not end."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(open_socket(Endpoint("http", *server.getsockname()), timeout, 1.0)) as sock,
    ):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == timeout * 1000
