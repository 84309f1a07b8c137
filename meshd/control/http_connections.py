"""HTTP/1.1 connections to a server of a control store: requests and streams. Blocking: for threads.

Law: a request that gets no answer says whether the server may have executed it. An idle connection that the
server has closed is replaced without an error.
Invariant: after `close` no connection stays open, and a stream that another thread reads ends soon.
"""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

_CONNECT_SECONDS: Final = 2.0


class NoAnswerError(Exception):
    """No usable answer arrived. `sent`: the server may have executed the request."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why, self.sent = why, sent


class HttpConnections:
    """The connections to a server. `tls`: None for plain HTTP; `timeout`: seconds of silence that end a
    request; `max_bytes`: limit of a response."""

    def __init__(
        self, host: str, port: int, *, timeout: float, max_bytes: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._timeout, self._max_bytes = timeout, max_bytes
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self.streams: set[http.client.HTTPConnection] = set()
        self.closed = False

    def __repr__(self) -> str:
        return f"<HttpConnections to {self._host}:{self._port}, {len(self._idle)} idle>"

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Returns the status and the body of the response. Raises NoAnswerError."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._connection(self._timeout)
        fresh = connection.sock is None
        try:
            connect(connection)
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            data = response.read(self._max_bytes)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not fresh and isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError)):
                return self.request(method, target, body, headers)  # the server had closed it while idle
            raise NoAnswerError(f"{type(error).__name__}: {error}", sent=True) from None
        with self._lock:
            keep = not self.closed and not response.will_close
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        return response.status, data

    @contextmanager
    def stream(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], idle: float
    ) -> Iterator[http.client.HTTPResponse | None]:
        """Open a response that ends after `idle` seconds of silence; None after `close`.

        Raises NoAnswerError if no connection is made; OSError, http.client.HTTPException.
        """
        connection = self._connection(idle)
        try:
            connect(connection)
            with self._lock:  # `close` ends what is here; a socket is replaced while TLS is set up
                if not self.closed:
                    self.streams.add(connection)
            if connection not in self.streams:
                yield None
                return
            connection.request(method, target, body, dict(headers))
            with connection.getresponse() as response:
                yield response
        finally:
            self.streams.discard(connection)
            connection.close()

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        for connection in tuple(self.streams):
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)


def connect(connection: http.client.HTTPConnection) -> None:
    """Connect unless it is connected. Raises NoAnswerError, not sent."""
    if connection.sock is not None:
        return
    timeout, connection.timeout = connection.timeout, _CONNECT_SECONDS
    try:
        connection.connect()
    except OSError as error:
        raise NoAnswerError(str(error), sent=False) from None
    finally:
        connection.timeout = timeout
    sock = cast("socket.socket", connection.sock)
    sock.settimeout(timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
