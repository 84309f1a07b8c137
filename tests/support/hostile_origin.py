"""An S3 origin that lies: a server on loopback that answers each request as it is told to, byte for byte."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Answer = Callable[["Asked"], Iterator[bytes]]

DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


class Asked:
    """A request: its method, its path with its query, its lower-case headers."""

    def __init__(self, line: str, headers: dict[str, str]) -> None:
        self.method, self.target, _ = line.split(" ", 2)
        self.headers = headers

    def __repr__(self) -> str:
        return f"<{self.method} {self.target} {self.headers.get('range', '')}>"

    @property
    def lists(self) -> bool:
        """Whether it is a listing."""
        return "list-type" in self.target

    def range(self, size: int) -> tuple[int, int]:
        """The first byte asked for, and the one after the last."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if found is None:
            return 0, size
        return int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)


class HostileOrigin:
    """`with HostileOrigin() as origin: origin.answer = …`. `asked`: the requests so far."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answer: Answer = honest(b"")
        self.stopping = threading.Event()
        owner = self

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    while owner._one(self):
                        pass

        class Server(ThreadingTCPServer):
            daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _one(self, handler: StreamRequestHandler) -> bool:
        line = handler.rfile.readline(1 << 16).decode("latin-1").strip()
        if not line:
            return False
        headers = {}
        while text := handler.rfile.readline(1 << 16).decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        handler.rfile.read(int(headers.get("content-length", 0)))
        asked = Asked(line, headers)
        self.asked.append(asked)
        for piece in self.answer(asked):
            if self.stopping.is_set():
                return False
            handler.wfile.write(piece)
        return False  # every connection is used once

    def __enter__(self) -> HostileOrigin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def head(status: str, *headers: str) -> bytes:
    """The first lines of an answer, after which its connection ends."""
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "connection: close", "", "")).encode()


def whole(data: bytes, asked: Asked, *headers: str, etag: str = "e1") -> bytes:
    """An honest answer about an object."""
    start, stop = asked.range(len(data))
    about = [f"content-length: {stop - start}", f'etag: "{etag}"', f"last-modified: {DATE}", *headers]
    if "range" in asked.headers:
        about.append(f"content-range: bytes {start}-{stop - 1}/{len(data)}")
    body = b"" if asked.method == "HEAD" else data[start:stop]
    return head("206 Partial Content" if "range" in asked.headers else "200 OK", *about) + body


def honest(data: bytes) -> Answer:
    """What an S3 server does whose every object is `data`."""

    def answer(asked: Asked) -> Iterator[bytes]:
        yield listing("k") if asked.lists else whole(data, asked)

    return answer


def listing(*keys: str, token: str = "", more: bytes = b"") -> bytes:
    """A page of keys; with a `token`, there are more."""
    entries = "".join(
        f'<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00Z</LastModified><ETag>"e1"</ETag>'
        "<Size>5</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key in keys
    )
    next_ = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>b</Name><KeyCount>1</KeyCount>'
        f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{next_}{entries}"
    ).encode()
    body += more + b"</ListBucketResult>"
    return head("200 OK", f"content-length: {len(body)}", "content-type: application/xml") + body
