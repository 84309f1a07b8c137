"""Bytes on a real connection: whatever is sent, the daemon answers in HTTP or closes, and lives.

Law: the daemon is a real one; nothing here knows how it reads. Invariant: no answer is a 500, and after every
batch a signed request works.
"""

from __future__ import annotations

import re
import socket
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_PATIENCE_S = 20.0  # it ends by itself: it is told that nothing more comes


class WireError(AssertionError):
    """An answer that must not be. Carries it, cut short."""


def send(daemon: Daemon, data: bytes) -> bytes:
    """All bytes of the answer until the daemon closes, or has nothing more to say. Raises WireError."""
    where = urlsplit(daemon.endpoint)
    answer = b""
    with socket.create_connection((where.hostname, where.port), timeout=_PATIENCE_S) as plain:
        sock = plain
        if where.scheme == "https":
            context = ssl.create_default_context(cafile=daemon.ca_cert)
            sock = context.wrap_socket(plain, server_hostname=where.hostname)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass  # it waits for the rest of a head or body, or has hung up on us
    check(answer)
    return answer


def check(answer: bytes) -> None:
    """Raise WireError for what is no HTTP, and for a 500."""
    if not answer:
        return
    match = _STATUS.match(answer)
    if match is None:
        raise WireError(f"not HTTP: {answer[:200]!r}")
    if match[1] == b"500":
        raise WireError(f"an internal error: {answer[:600]!r}")


def alive(daemon: Daemon) -> None:
    """Raise WireError unless a signed request is answered as ever."""
    answer = daemon.request("GET", "/")
    if answer.status != 200 or not daemon.running:
        raise WireError(f"the daemon does not serve any more: {answer.status}")
    if "Traceback" in daemon.output():
        raise WireError(f"a traceback in the log\n{daemon.output()[-4000:]}")
