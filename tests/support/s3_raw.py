"""Requests as bytes on a socket, signed by hand: what no S3 client would let a test send."""

from __future__ import annotations

import hashlib
import http.client
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit
from xml.etree import ElementTree

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign

if TYPE_CHECKING:
    from collections.abc import Mapping

REGION = "us-east-1"


def now() -> int:
    """Seconds since the epoch: the daemon compares with its own clock."""
    return int(datetime.now(UTC).timestamp())


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The error code of an S3 error document."""
        return ElementTree.fromstring(self.body).findtext("Code") or ""


@dataclass
class Wire:
    """A credential at an endpoint; over https `ca_cert` is believed."""

    endpoint: str
    access_key: str
    secret_key: str
    ca_cert: str = ""
    sockets: list[socket.socket] = field(default_factory=list)
    session_token: str | None = None
    timeout: float = 60.0

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint).netloc

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A connection with a time limit, closed with the test."""
        parts = urlsplit(self.endpoint)
        sock = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(self.timeout)
        sock.connect((parts.hostname, parts.port))
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_cert)
            sock = context.wrap_socket(sock, server_hostname=parts.hostname)
        self.sockets.append(sock)
        return sock

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()

    def head(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        payload_hash: str = "UNSIGNED-PAYLOAD",
        when: int | None = None,
        unsigned: Mapping[str, str] | None = None,
        drop: tuple[str, ...] = (),
    ) -> bytes:
        """A signed request head. `unsigned` headers are added after signing; `drop` removes signed ones."""
        path, _, query = target.partition("?")
        given = {"host": self.host, **(headers or {})}
        credential = Credential(self.access_key, self.secret_key, self.session_token)
        request = RequestHead(method, path, query, given)
        added = sign(
            request,
            credential,
            region=REGION,
            timestamp=now() if when is None else when,
            payload_hash=payload_hash,
        )
        fields = {**given, **added, **(unsigned or {})}
        lines = [f"{name}: {value}" for name, value in fields.items() if name not in drop]
        return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()

    def put(
        self, target: str, body: bytes, *, headers: Mapping[str, str] | None = None, **options: object
    ) -> bytes:
        """A whole signed PUT whose payload hash is that of `body`."""
        payload = {"payload_hash": hashlib.sha256(body).hexdigest(), **options}
        fields = {"content-length": str(len(body)), **(headers or {})}
        return self.head("PUT", target, headers=fields, **payload) + body  # type: ignore[arg-type]  # passed on

    def exchange(self, request: bytes, *, method: str = "PUT") -> Answer:
        """Send on a fresh connection, then read one final answer: which may come, and the connection end,
        before all is sent."""
        sock = self.connect()
        with suppress(ConnectionError):
            sock.sendall(request)
        return read_answer(sock, method)

    def call(self, method: str, target: str, body: bytes = b"", **options: object) -> Answer:
        """One signed request."""
        if method in ("PUT", "POST"):
            payload = hashlib.sha256(body).hexdigest()
            fields = {"content-length": str(len(body)), **(options.pop("headers", None) or {})}  # type: ignore[dict-item]
            head = self.head(method, target, headers=fields, payload_hash=payload, **options)  # type: ignore[arg-type]
            return self.exchange(head + body, method=method)
        return self.exchange(self.head(method, target, **options), method=method)  # type: ignore[arg-type]


def read_answer(sock: socket.socket, method: str = "GET") -> Answer:
    """The next final answer on a connection (interim ones are skipped)."""
    with http.client.HTTPResponse(sock, method=method) as response:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())


def read_answers(sock: socket.socket, count: int) -> list[Answer]:
    """Several answers of one connection. One buffered reader is needed: http.client reads ahead."""
    with sock.makefile("rb") as stream:
        return [_read_one(stream) for _ in range(count)]


def _read_one(stream: BinaryIO) -> Answer:
    status = int(stream.readline().split()[1])
    headers = {}
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return Answer(status, headers, stream.read(int(headers.get("content-length", "0"))))


def chunked_body(pieces: list[bytes], trailers: Mapping[str, str] | None = None) -> bytes:
    """An unsigned aws-chunked body."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    tail = "".join(f"{name}:{value}\r\n" for name, value in (trailers or {}).items())
    return chunks + b"0\r\n" + tail.encode() + b"\r\n"
