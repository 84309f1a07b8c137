"""Listen sockets of a node: one TCP socket for all workers, one Unix socket per internal service.

The supervisor owns them, so connections to a process that is being replaced wait in the kernel's queue
instead of being refused. They are bound early, so that errors appear early, and listen once the store is
ready.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.config import ConfigError
from meshd.rpc.unix_messages import listen
from meshd.server.accept_balancer import ConnectionCounts
from meshd.server.tls import ServerTls, TlsFiles
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from meshd.config import HttpSettings, NodeSettings

_RELEASE_S: Final = 1.0
"""The lock of a node that was killed is free a moment before its port."""


class ListenSockets(msgspec.Struct, frozen=True):
    """Every listening socket of a node, the TLS state of the HTTP one, and how busy its workers are."""

    http: socket.socket
    coordinator: socket.socket
    rebalancer: socket.socket
    transforms: tuple[socket.socket, ...]
    tally: ConnectionCounts
    tls: ServerTls | None = None

    def fds(self) -> list[int]:
        """Return the descriptors of the sockets that are still open in this process."""
        every = (self.http, self.coordinator, self.rebalancer, *self.transforms)
        return [sock.fileno() for sock in every if sock.fileno() >= 0]

    def listen_http(self, backlog: int) -> None:
        """Start to accept HTTP clients."""
        self.http.listen(backlog)

    def close_http(self) -> None:
        """Close the HTTP socket in this process. Idempotent."""
        self.http.close()


def open_listen_sockets(settings: NodeSettings) -> ListenSockets:
    """Bind all sockets. Raises ConfigError when the address is taken or not one of this machine, or when the
    TLS pair cannot be used."""
    tls = _tls(settings.http)
    return ListenSockets(
        http=bind_http(settings.http),
        coordinator=listen(settings.coordinator_socket),
        rebalancer=listen(settings.rebalancer_socket),
        transforms=tuple(
            listen(settings.transform_socket(index)) for index in range(settings.transform.processes)
        ),
        tally=ConnectionCounts(settings.workers),
        tls=tls,
    )


def _tls(http: HttpSettings) -> ServerTls | None:
    if http.tls_cert is None or http.tls_key is None:
        return None
    return ServerTls(TlsFiles(http.tls_cert, http.tls_key), SystemClock())


def bind_http(http: HttpSettings) -> socket.socket:
    """Return a bound socket; for port 0 the system chooses one. Raises ConfigError, after a second if the
    address is taken."""
    clock = SystemClock()
    until = clock.monotonic() + _RELEASE_S
    while True:
        try:
            return _bind(*_resolve(http.host, http.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and clock.monotonic() < until:
                threading.Event().wait(_RELEASE_S / 20)
                continue
            reason = error.strerror or str(error)
            where = f"[{http.host}]:{http.port}" if ":" in http.host else f"{http.host}:{http.port}"
            raise ConfigError(f"cannot listen on {where}: {reason}; choose another --listen") from error


def local_endpoint(sockets: ListenSockets) -> str:
    """Return the URL under which a client on this machine reaches the port."""
    scheme = "http" if sockets.tls is None else "https"
    host, port = sockets.http.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)  # "::" accepts IPv4, too
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # of a kernel without IPv6, these are all addresses
    name = host.encode() if host.isascii() else host  # a `str` loads the tables of IDNA
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, address


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the kernel's default is
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
