"""Sockets on which the operator serves the webhook and its health."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. `::` takes connections of both families, whatever the kernel's
    default is. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")
