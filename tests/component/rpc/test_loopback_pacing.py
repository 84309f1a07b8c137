"""Connections over loopback are not paced; others keep the system's congestion control."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from meshd.rpc.tcp_congestion import disable_pacing, restore_pacing, unpaced_socket


def control_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.fixture
def usual() -> str:
    with socket.socket() as sock:
        return control_of(sock)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_not_paced(host: str) -> None:
    sock = unpaced_socket(host)
    assert sock is not None
    with sock:
        assert control_of(sock) == "reno"


@pytest.mark.parametrize("host", ["10.1.2.3", "::2", "localhost", "", "mesh-0.mesh.svc"])
def test_others_keep_what_they_have(host: str) -> None:
    assert unpaced_socket(host) is None


@pytest.mark.parametrize(
    ("address", "paced"),
    [(("127.0.0.1", 9000), False), (("10.1.2.3", 9000), True), (("::2", 9000, 0, 0), True), ("", True)],
)
def test_what_a_listener_accepts(address: object, paced: bool, usual: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        disable_pacing(listener)
        with closing(socket.create_connection(listener.getsockname())):
            accepted, _ = listener.accept()
            with accepted:
                assert control_of(accepted) == "reno"
                restore_pacing(accepted, address)
                assert control_of(accepted) == (usual if paced else "reno")


def test_what_has_no_congestion_control_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        disable_pacing(one)
        restore_pacing(other, "")
        one.sendall(b"as before")
        assert other.recv(99) == b"as before"
