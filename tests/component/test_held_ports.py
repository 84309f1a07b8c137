"""Ports are their servers' while nobody listens on them: what restarts comes back where it was."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

import pytest

from meshd.kit.ports import hold_port
from meshd.testing.daemons import Daemon


def is_taken(address: tuple[str, int]) -> bool:
    """Whether somebody who wants the port for himself is refused."""
    with socket.socket() as other:
        try:
            other.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def test_a_held_port_is_its_servers_again_and_again() -> None:
    with hold_port() as held:
        address = held.getsockname()
        assert is_taken(address)
        for _ in range(2):
            with socket.create_server(address) as server, socket.create_connection(address):
                server.accept()[0].close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)


def test_a_daemon_that_is_down_keeps_its_port() -> None:
    with Daemon.start() as daemon:
        where = urlsplit(daemon.endpoint)
        daemon.kill()
        assert is_taken((str(where.hostname), int(where.port or 0)))
        daemon.up()
        assert urlsplit(daemon.endpoint) == where
        assert daemon.request("GET", "/").status == 200
