"""Connections between processes of one host.

Law: over loopback nothing is lost and nobody shares the way, so nothing is paced there: the timers of BBR,
where it is the system's congestion control, cost more than all the copying (a third of the rate was left).
A connection that was BBR's once stays paced (Linux keeps its `sk_pacing_status`): what is to be unpaced is so
before it is connected, an accepted one because its listener is.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache

_UNPACED = b"reno"  # compiled into every kernel, and every user may choose it


def is_loopback(host: str) -> bool:
    """Whether an address, as `getpeername` gives it, is this host's own."""
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")


def unpace(sock: socket.socket) -> None:
    """Has a socket that is not connected yet, or what a listener accepts, send as fast as it is read."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def pace(sock: socket.socket, address: object) -> None:
    """Has a connection that a listener after `unpace` accepted from `address` keep to the system's congestion
    control, unless it comes from this host."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if not is_loopback(host):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _usual())


@cache
def _usual() -> bytes:
    """The system's congestion control."""
    with socket.socket() as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def unpaced_to(host: str) -> socket.socket | None:
    """A socket to be connected to `host`; None when that is no address of this host."""
    if not is_loopback(host):
        return None
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    unpace(sock)
    return sock
