"""A proxy between the operator and a server that it writes to, an API server or a mesh: it knows when a write
has been carried out and its answer has not been heard.

Law: bytes are passed on as they are; only the answer to a write may be withheld. What is not a write is never
counted, nor what is said all the time: Leases, and events, which no pass reads.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")
_PATIENCE: Final = 300.0  # of a watch
_HOP: Final = ("connection", "transfer-encoding", "content-length", "keep-alive")


class WriteProxy:
    """HTTP on loopback in front of `server`, a URL. `on_write` gets "METHOD path" of each write that changed
    something; if it returns True, the answer is withheld and the connection ends."""

    def __init__(self, server: str, on_write: Callable[[str], bool], token: str = "") -> None:
        self._server, self._on_write, self.token = urlsplit(server), on_write, token
        self._versions: dict[str, str] = {}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = False
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="write-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self.cut()
        self._http.server_close()
        self._thread.join(30)

    def cut(self) -> None:
        """End all connections."""
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def add(self, connection: socket.socket) -> None:
        """Note a connection that `cut` ends."""
        self._open.add(connection)

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection."""
        self._open.discard(connection)

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to the server. Certificates of servers of tests are not checked."""
        where = self._server.hostname or "", self._server.port
        if self._server.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                *where, timeout=_PATIENCE, context=context
            )
        else:
            made = http.client.HTTPConnection(*where, timeout=_PATIENCE)
        made.connect()
        return made

    def withholds(self, method: str, target: str, status: int, body: bytes) -> bool:
        """Return whether the answer to a write is withheld."""
        path = target.partition("?")[0]
        if status >= 300 or path.rstrip("/").rpartition("/")[2] == "events" or "/leases" in path:
            return False
        with self._lock:
            return self._changed(method, path, body) and self._on_write(f"{method} {path}")

    def _changed(self, method: str, path: str, body: bytes) -> bool:
        """Return whether a write made a new version of its object, as far as the answer says."""
        try:
            metadata: dict[str, Any] = json.loads(body)["metadata"]
            place, version = path.removesuffix("/status"), str(metadata["resourceVersion"])
            if "/statefulsets/" in path:  # old API servers make a version of each, whatever is applied
                version = str(metadata["generation"])
        except (ValueError, KeyError, TypeError):  # a daemon, or a Status
            return True
        before, self._versions[place] = self._versions.get(place), version
        return method != "PATCH" or before != version


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: WriteProxy
    upstream: http.client.HTTPConnection | None = None
    below: socket.socket | None = None

    def setup(self) -> None:
        super().setup()
        self.proxy.add(self.connection)

    def finish(self) -> None:
        self.proxy.remove(self.connection)
        if self.upstream is not None:
            if self.below is not None:
                self.proxy.remove(self.below)
            self.upstream.close()
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests print what the operator says."""

    def handle(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):  # either end has gone
            super().handle()

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.upstream is None:
            self.upstream = self.proxy.connect()
            self.below = self.upstream.sock
            if self.below is not None:
                self.proxy.add(self.below)
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP and not (self.proxy.token and name.lower() == "authorization"):
                self.upstream.putheader(name, value)
        if self.proxy.token:
            self.upstream.putheader("Authorization", f"Bearer {self.proxy.token}")
        if body or self.command in ("POST", "PUT", "PATCH"):
            self.upstream.putheader("Content-Length", str(len(body)))
        self.upstream.endheaders(body or None)
        answer = self.upstream.getresponse()
        if self.command in (*WRITES, "HEAD") or answer.length is not None:
            self._give(answer, answer.read())
        else:
            self._stream(answer)

    def _give(self, answer: http.client.HTTPResponse, data: bytes) -> None:
        if self.command in WRITES and self.proxy.withholds(self.command, self.path, answer.status, data):
            self.close_connection = True
            return
        self._head(answer)
        length = answer.headers.get("content-length") if self.command == "HEAD" else str(len(data))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        """Of a watch, event by event."""
        self._head(answer)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _head(self, answer: http.client.HTTPResponse) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on
