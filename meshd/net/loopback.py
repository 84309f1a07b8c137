"""Connections between processes of one host.

Law: over loopback nothing is lost and nobody shares the way, so nothing is paced there: the timers of BBR,
where it is the system's congestion control, cost more than all the copying (a third of the rate was left).
"""

from __future__ import annotations

import socket
from contextlib import suppress

_UNPACED = b"reno"  # compiled into every kernel, and every user may choose it


def unpace(sock: socket.socket, address: object) -> None:
    """Has a TCP connection with `address`, as `accept` or `getpeername` gave it, send as fast as it is read,
    if that is this host."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    if host == "::1" or host.removeprefix("::ffff:").startswith("127."):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
