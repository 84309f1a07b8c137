"""The sockets a node listens on: one TCP socket a worker on one port, one Unix socket an inner service.

Law: the supervisor owns them all, so that what dies is replaced behind an open door: connections wait in the
kernel's queue instead of being refused. Bound early (errors come early), listening once the store is ready.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshd.config import ConfigError
from meshd.kit.clock import SystemClock
from meshd.net.unixmessages import listen
from meshd.web.tls import Tls, TlsFiles

if TYPE_CHECKING:
    from meshd.config import HttpSettings, NodeSettings


@dataclass(frozen=True, slots=True)
class Doors:
    """Every listening socket of a node, and what is spoken on those of HTTP."""

    http: tuple[socket.socket, ...]
    steward: socket.socket
    transforms: tuple[socket.socket, ...]
    tls: Tls | None = None

    def fds(self) -> list[int]:
        """Descriptors of those still open here."""
        every = (*self.http, self.steward, *self.transforms)
        return [sock.fileno() for sock in every if sock.fileno() >= 0]

    def listen(self, backlog: int) -> None:
        """Let HTTP clients in."""
        for sock in self.http:
            sock.listen(backlog)

    def close_http(self) -> None:
        """Let go of the port in this process. Idempotent."""
        for sock in self.http:
            sock.close()


def open_doors(settings: NodeSettings) -> Doors:
    """Bind everything. Raises ConfigError when the address is taken or not this machine's, or when the TLS
    pair cannot be used."""
    tls = _tls(settings.http)
    return Doors(
        http=bind_http(settings.http, settings.workers),
        steward=listen(settings.steward_socket),
        transforms=tuple(
            listen(settings.transform_socket(index)) for index in range(settings.transform.processes)
        ),
        tls=tls,
    )


def _tls(http: HttpSettings) -> Tls | None:
    if http.tls_cert is None or http.tls_key is None:
        return None
    return Tls(TlsFiles(http.tls_cert, http.tls_key), SystemClock())


def bind_http(http: HttpSettings, count: int) -> tuple[socket.socket, ...]:
    """`count` bound sockets on one port, chosen by the first when the port is 0. Raises ConfigError."""
    where = f"{http.host}:{http.port}"
    try:
        family, address = _resolve(http.host, http.port)
        if http.port:
            # SO_REUSEPORT would let us share another daemon's port in silence; without it the kernel objects.
            _bind(family, address, shared=False).close()
        sockets = [_bind(family, address)]
        address = (address[0], sockets[0].getsockname()[1], *address[2:])
        sockets += [_bind(family, address) for _ in range(count - 1)]
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {where}: {reason}; choose another --listen") from error
    return tuple(sockets)


def endpoint(doors: Doors) -> str:
    """The URL under which a client on this machine reaches the port."""
    scheme = "http" if doors.tls is None else "https"
    host, port = doors.http[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address


def _bind(family: socket.AddressFamily, address: tuple[Any, ...], *, shared: bool = True) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
