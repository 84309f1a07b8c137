"""Ports that stay whose they are while nobody listens on them.

Invariant: the kernel gives a port that is bound to nobody who asks for any; a server that says SO_REUSEADDR,
as ours and etcd do, binds it all the same, and clients are refused until it listens.
"""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a port of the kernel's choice, which is held until it is closed. Raises OSError for
    an address that is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError:
        held.close()
        raise
    return held


def port_of(held: socket.socket) -> int:
    """Its number."""
    return int(held.getsockname()[1])
