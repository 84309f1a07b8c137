"""Connections to other nodes: TLS with the authorities that this node trusts, loopback without pacing.

A certificate that this node refuses stays refused until an operator acts, so the reason is logged, at most
once a minute for each node.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from meshd.rpc.http_connection import HttpConnection, PeerUnreachableError
from meshd.rpc.tcp_congestion import unpaced_socket
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_log = logging.getLogger("meshd.peers")
CONNECT_TIMEOUT: Final = 3.0
_ADDRESS_TIMEOUT: Final = 1.0
"""Seconds for each address of a name but the last: of two families, perhaps only one is routed."""
_LOG_INTERVAL: Final = 60.0  # seconds between two log lines about one certificate


class PeerConnector:
    """Opens connections to other nodes. `ca` is a file of certificates that are trusted for nodes with an
    https endpoint, in addition to those that the machine trusts; it is read again when it changes."""

    def __init__(self, clock: Clock, ca: Path | None = None) -> None:
        self._clock, self._ca = clock, ca
        self._told: dict[str, float] = {}
        self._families: dict[str, int] = {}
        """The family by which a name with several addresses was reached last."""
        self._tls: ssl.SSLContext | None = None
        self._ca_seen: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"<PeerConnector, trusting {self._ca or 'the machine'}>"

    async def open_connection(
        self, node: Node, when_free: Callable[[HttpConnection], None], patience: float = CONNECT_TIMEOUT
    ) -> HttpConnection:
        """Connect to a node. Raises PeerUnreachableError."""
        try:
            async with timeout(patience):
                return await self._connect(
                    node.endpoint, lambda: HttpConnection(node.node_id, when_free), patience
                )
        except (OSError, TimeoutError) as error:
            why = self._reason(node, error)
            raise PeerUnreachableError(f"node {node.node_id} at {node.endpoint}: {why}") from error

    async def _connect(
        self, endpoint: str, protocol: Callable[[], HttpConnection], patience: float
    ) -> HttpConnection:
        """Connect to an endpoint. Raises OSError."""
        where, loop = urlsplit(endpoint), asyncio.get_running_loop()
        tls = self._context() if where.scheme == "https" else None
        host, port = where.hostname or "", where.port or (443 if tls else 80)
        own = unpaced_socket(host)
        if own is None:
            return await self._connect_to_name(host, port, protocol, tls, patience)
        try:
            await loop.sock_connect(own, (host, port))
            name = host if tls else None
            _, wire = await loop.create_connection(protocol, sock=own, ssl=tls, server_hostname=name)
        except BaseException:
            own.close()
            raise
        return wire

    async def _connect_to_name(
        self,
        host: str,
        port: int,
        protocol: Callable[[], HttpConnection],
        tls: ssl.SSLContext | None,
        patience: float,
    ) -> HttpConnection:
        """Connect to the first address of a host that accepts the connection. Raises OSError of the last."""
        loop, name = asyncio.get_running_loop(), host if tls else None
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys((info[0], str(info[4][0])) for info in infos))
        if len(found) > 1:
            found.sort(key=lambda each: each[0] != self._families.get(host))
        for family, address in found[:-1]:
            with suppress(OSError):
                async with timeout(min(_ADDRESS_TIMEOUT, patience / 2)):
                    _, wire = await loop.create_connection(
                        protocol, address, port, ssl=tls, server_hostname=name
                    )
                self._families[host] = family
                return wire
        family, address = found[-1]
        _, wire = await loop.create_connection(protocol, address, port, ssl=tls, server_hostname=name)
        if len(found) > 1:
            self._families[host] = family
        return wire

    async def certificate_error(self, node: Node, patience: float = CONNECT_TIMEOUT) -> str:
        """Return why this node refuses another node's certificate; "" if it accepts it, if there is none, and
        if the node does not answer."""
        where = urlsplit(node.endpoint)
        if where.scheme != "https":
            return ""
        try:
            async with timeout(patience):
                _, writer = await asyncio.open_connection(
                    where.hostname, where.port or 443, ssl=self._context()
                )
        except ssl.SSLCertVerificationError as error:
            return self._reason(node, error)
        except (OSError, TimeoutError):
            return ""
        writer.transport.abort()
        return ""

    def _reason(self, node: Node, error: OSError) -> str:
        """Return the reason in words. A refused certificate is logged, because it stays refused until an
        operator acts."""
        if isinstance(error, TimeoutError):
            return "it does not answer"
        if not isinstance(error, ssl.SSLCertVerificationError):
            return str(error)
        why = (
            f"its certificate is refused ({error.verify_message}): renew it, issue it for the name under "
            "which nodes reach it (--advertise), or add its authority to --peer-ca"
        )
        now = self._clock.monotonic()
        if now - self._told.get(node.node_id, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._told[node.node_id] = now
            _log.warning(
                "the certificate of another node is refused", extra={"node": node.node_id, "why": why}
            )
        return why

    def _context(self) -> ssl.SSLContext:
        seen = _file_state(self._ca)
        if self._tls is None or seen != self._ca_seen:
            found = ssl.create_default_context()
            try:
                if self._ca is not None and seen is not None:
                    found.load_verify_locations(self._ca)
            except ssl.SSLError as error:  # perhaps being written: it is read again when it changes
                _log.warning(
                    "peer-ca has no usable certificates", extra={"file": str(self._ca), "why": str(error)}
                )
            self._tls, self._ca_seen = found, seen
        return self._tls


def _file_state(ca: Path | None) -> tuple[int, int] | None:
    """Return a value that changes with the file; None: it is missing or empty."""
    if ca is None:
        return None
    try:
        found = ca.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_size else None
