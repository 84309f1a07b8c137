"""TCP congestion control of loopback connections: no pacing between processes of one host.

Law: loopback loses nothing, so pacing there only costs: under BBR its timers take more CPU than all
copying, and a third of the rate remains. A socket that once used BBR stays paced (Linux keeps
`sk_pacing_status`), so pacing is disabled before connecting, and on a listener for the sockets it
accepts.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache

_UNPACED_ALGORITHM = b"reno"  # compiled into every kernel, and every user may choose it


def is_loopback(host: str) -> bool:
    """Whether an address, as `getpeername` gives it, is this host's own."""
    return host == "::1" or host.removeprefix("::ffff:").startswith("127.")


def disable_pacing(sock: socket.socket) -> None:
    """Has a socket that is not connected yet, or what a listener accepts, send as fast as it is read."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED_ALGORITHM)


def restore_pacing(sock: socket.socket, address: object) -> None:
    """Has a connection that a listener after `unpace` accepted from `address` keep to the system's congestion
    control, unless it comes from this host."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if not is_loopback(host):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _system_congestion_control())


@cache
def _system_congestion_control() -> bytes:
    """The system's congestion control."""
    with socket.socket() as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def unpaced_socket(host: str) -> socket.socket | None:
    """A socket to be connected to `host`; None when that is no address of this host."""
    if not is_loopback(host):
        return None
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    disable_pacing(sock)
    return sock
