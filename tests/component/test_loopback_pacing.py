"""Connections over loopback are not paced; others keep the system's congestion control."""

from __future__ import annotations

import socket

import pytest

from meshd.net.loopback import unpace


def control_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_not_paced(host: str) -> None:
    with socket.socket() as sock:
        unpace(sock, (host, 9000))
        assert control_of(sock) == "reno"


@pytest.mark.parametrize("address", [("10.1.2.3", 9000), ("::2", 9000, 0, 0), ("", 0), "", None])
def test_others_keep_what_they_have(address: object) -> None:
    with socket.socket() as sock:
        before = control_of(sock)
        unpace(sock, address)
        assert control_of(sock) == before


def test_what_has_no_congestion_control_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        unpace(one, ("127.0.0.1", 9000))
