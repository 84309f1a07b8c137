"""Ports for servers that others are told of before they are up, and that come back where they were.

Law: none of those that the system gives away itself, to whoever asks for any and to clients' ends of
connections: while its server is down, or not yet up, such a port is soon somebody else's.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
from typing import Final

FIRST: Final = 20_000
LAST: Final = 32_000
"""Below Linux' `ip_local_port_range`, 32768 and up."""
_STRIDE: Final = 7919  # processes that run at a time begin far from each other
_turns = itertools.count(os.getpid() * _STRIDE)


def own_port(host: str = "127.0.0.1") -> int:
    """One that nobody has, and that this process gives nobody else; 0, the system's choice, for an address of
    another network namespace. Raises OSError where every port is taken."""
    for _ in range(LAST - FIRST):
        port = FIRST + next(_turns) % (LAST - FIRST)
        try:
            _require_free(host, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return 0
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {FIRST} to {LAST} is free; end what listens there")


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.bind((host, port))
