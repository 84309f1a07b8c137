"""Sockets on which the operator serves the webhook and its health."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. `::` takes connections of both families, whatever the kernel's
    default is, and of IPv4 if the kernel has no other. Raises OSError."""
    host = usable_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=host == "::")


def usable_host(host: str) -> str:
    """Return the host, or for `::` every address of IPv4 where the kernel has no IPv6."""
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host
