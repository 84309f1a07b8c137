"""Fills a bucket with a great many small objects, as fast as a server takes them.

Law: ordinary signed PUTs of the S3 interface, so that every contender builds its index in its own way;
several are under way on each connection. Signed here, for botocore takes longer than the servers do.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bench.fill_and_check import AnswerError
from bench.presigned_requests import REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.presigned_requests import Account
    from bench.servers import Server

_DEPTH = 8
_SIGNED = "host;x-amz-content-sha256;x-amz-date"


class Signer:
    """Heads of PUTs of one body, signed for one server; a new time is taken for every batch."""

    def __init__(self, host: str, account: Account, body: bytes) -> None:
        self._host, self._account, self._length = host, account, len(body)
        self._payload = hashlib.sha256(body).hexdigest()

    def heads(self, paths: Sequence[str]) -> bytes:
        """All heads behind each other; `paths` need no percent-encoding."""
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
        key = b"AWS4" + self._account.secret_key.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        block = f"host:{self._host}\nx-amz-content-sha256:{self._payload}\nx-amz-date:{stamp}\n"
        return b"".join(self._head(path, stamp, scope, key, block) for path in paths)

    def _head(self, path: str, stamp: str, scope: str, key: bytes, block: str) -> bytes:
        canonical = f"PUT\n{path}\n\n{block}\n{_SIGNED}\n{self._payload}"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        credential = f"AWS4-HMAC-SHA256 Credential={self._account.access_key}/{scope}"
        return (
            f"PUT {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {self._length}\r\n"
            f"X-Amz-Date: {stamp}\r\nX-Amz-Content-SHA256: {self._payload}\r\n"
            f"Authorization: {credential}, SignedHeaders={_SIGNED}, Signature={signature}\r\n\r\n"
        ).encode()


def _share(server: Server, signer: Signer, batches: Iterator[Sequence[str]], lock: threading.Lock) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as sock:
        while True:
            with lock:
                paths = next(batches, None)
            if paths is None:
                return
            sock.sendall(signer.heads(paths))
            _await(server, sock, len(paths))


def _await(server: Server, sock: socket.socket, count: int) -> None:
    """`count` answers without bodies, each with status 200."""
    seen = b""
    while seen.count(b"\r\n\r\n") < count or not seen.endswith(b"\r\n\r\n"):
        got = sock.recv(1 << 16)
        if not got:
            raise AnswerError(f"{server.name} closed the connection after {seen[-200:]!r}")
        seen += got
    if seen.count(b"HTTP/1.1 200") != count:
        raise AnswerError(f"{server.name}: a PUT of an empty object failed: {seen[:400]!r}")


def stock(server: Server, paths: Sequence[str], say: Callable[[int], None], connections: int = 24) -> None:
    """Put an empty object under every path. `say` is told how many have been dealt out, now and then."""
    if server.account is None:
        raise ValueError(f"{server.name} speaks no S3")
    signer, lock = Signer(server.host, server.account, b""), threading.Lock()
    batches = _dealt(paths, say)
    with ThreadPoolExecutor(connections) as pool:
        shares = [pool.submit(_share, server, signer, batches, lock) for _ in range(connections)]
        for share in shares:
            share.result()


def _dealt(paths: Sequence[str], say: Callable[[int], None]) -> Iterator[Sequence[str]]:
    for start in range(0, len(paths), _DEPTH):
        if start % (_DEPTH * 5000) == 0:
            say(start)
        yield paths[start : start + _DEPTH]
