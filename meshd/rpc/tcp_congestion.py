"""TCP congestion control of loopback connections: no pacing between processes of one host.

Loopback loses no packets, so pacing only costs there: under BBR its timers take more CPU than all copying,
and a third of the rate remains. A socket that once used BBR stays paced (Linux keeps `sk_pacing_status`), so
pacing is disabled before connecting, and on a listener for the sockets it accepts.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache

_UNPACED_ALGORITHM = b"reno"  # built into every kernel, and allowed for every user


def is_loopback(host: str) -> bool:
    """Whether an address, as `getpeername` returns it, belongs to this host."""
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")


def disable_pacing(sock: socket.socket) -> None:
    """Disable pacing on a socket that is not connected yet, or for the sockets that a listener accepts."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED_ALGORITHM)


def restore_pacing(sock: socket.socket, address: object) -> None:
    """Restore the system's congestion control on a connection from `address`, accepted by a listener after
    `disable_pacing`, unless it comes from this host."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if not is_loopback(host):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _system_congestion_control())


@cache
def _system_congestion_control() -> bytes:
    """Return the system's congestion control."""
    with socket.socket() as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def unpaced_socket(host: str) -> socket.socket | None:
    """Return a socket for a connection to `host`; None if that is not an address of this host."""
    if not is_loopback(host):
        return None
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    disable_pacing(sock)
    return sock
