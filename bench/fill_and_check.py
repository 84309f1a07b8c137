"""Fills a contender before its measurement, and looks once at what it answers.

Invariant: after `check` the server has shown the right status, length and bytes for the request that will be
timed.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.presigned_requests import EMPTY, UNSIGNED, Request, headers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.servers import Server

BUCKET = "bench"


class AnswerError(RuntimeError):
    """A server answered a request of the bench otherwise than it must; such a row has no figure."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and whole body."""

    status: int
    body: bytes


def pattern(size: int) -> bytes:
    """`size` bytes that do not compress and repeat only after 64 KiB."""
    block = b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(2048))
    return (block * (size // len(block) + 1))[:size]


def path_of(key: str) -> str:
    """Path style."""
    return f"/{BUCKET}/{key}"


def ask(server: Server, request: Request, body: bytes | None = None) -> Answer:
    """One request on a connection of its own."""
    with closing(http.client.HTTPConnection(server.host, timeout=120)) as connection:
        return ask_on(connection, server, request, body)


def ask_on(
    connection: http.client.HTTPConnection, server: Server, request: Request, body: bytes | None
) -> Answer:
    """One request on a kept connection."""
    connection.request(request.method, request.target, body, headers(request, server.host, server.account))
    response = connection.getresponse()
    return Answer(response.status, response.read())


def put_request(key: str, body: bytes, *, signed_body: bool = True) -> Request:
    """A PutObject whose payload is signed, or declared unsigned."""
    payload = hashlib.sha256(body).hexdigest() if signed_body else UNSIGNED
    return Request("PUT", path_of(key), length=len(body), payload_hash=payload)


def make_bucket(server: Server, bucket: str = BUCKET) -> None:
    """The bench's bucket, or the directory for a server of plain files."""
    if server.files is not None:
        (server.files / bucket).mkdir(exist_ok=True)
        return
    answer = ask(server, Request("PUT", f"/{bucket}", length=0), b"")
    if answer.status not in (200, 409):
        raise AnswerError(f"{server.name}: PUT bucket answered {answer.status}: {answer.body[:200]!r}")


def _fill_files(server: Server, keys: Sequence[str], body: bytes) -> None:
    for key in keys:
        target = server.files / BUCKET / key  # type: ignore[operator]  # only called with files
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)


def _fill_share(server: Server, keys: Iterator[str], lock: threading.Lock, body: bytes) -> None:
    request_hash = hashlib.sha256(body).hexdigest()
    with closing(http.client.HTTPConnection(server.host, timeout=120)) as connection:
        while True:
            with lock:
                key = next(keys, None)
            if key is None:
                return
            request = Request("PUT", path_of(key), length=len(body), payload_hash=request_hash)
            answer = ask_on(connection, server, request, body)
            if answer.status != 200:
                raise AnswerError(f"{server.name}: PUT {key} answered {answer.status}: {answer.body[:200]!r}")


def fill(server: Server, keys: Sequence[str], body: bytes, threads: int = 16) -> None:
    """Put the same body under every key."""
    if server.files is not None:
        _fill_files(server, keys, body)
        return
    lock, remaining = threading.Lock(), itertools.chain(keys)
    with ThreadPoolExecutor(threads) as pool:
        shares = [pool.submit(_fill_share, server, remaining, lock, body) for _ in range(threads)]
        for share in shares:
            share.result()


def check_get(server: Server, key: str, body: bytes) -> None:
    """Raise AnswerError unless a GET gives exactly the body."""
    answer = ask(server, Request("GET", path_of(key)))
    if (answer.status, answer.body) != (200, body):
        raise AnswerError(
            f"{server.name}: GET {key} gave {answer.status} with {len(answer.body)} bytes, not {len(body)}"
        )


def check_put(server: Server, key: str, body: bytes, *, signed_body: bool) -> None:
    """Raise AnswerError unless a PUT is accepted and read back the same, and a forged one is refused."""
    request = put_request(key, body, signed_body=signed_body)
    answer = ask(server, request, body)
    if answer.status != 200:
        raise AnswerError(f"{server.name}: PUT {key} answered {answer.status}: {answer.body[:200]!r}")
    check_get(server, key, body)


def check_refusal(server: Server, key: str) -> None:
    """Raise AnswerError when a server that is said to verify signatures serves an unsigned GET."""
    if server.account is None:
        return
    with closing(http.client.HTTPConnection(server.host, timeout=60)) as connection:
        connection.request("GET", path_of(key), headers={"x-amz-content-sha256": EMPTY})
        status = connection.getresponse().status
    if status != 403:
        raise AnswerError(f"{server.name}: an unsigned GET answered {status}, not 403: it verifies nothing")
