"""What a small request may cost: calls of functions in the worker's thread, which no machine makes faster.

The budgets are those of docs/request-costs.md. A server of this process, over its real store and control
state, is given requests by a transport that keeps what it is sent; only calls of the server are counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import pytest

from meshd.store.records import Upload
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.call_counts import Calls
from tests.support.hot_servers import BODY, NOW, ROOT, Pair
from tests.support.walks import ROOT as CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WARM, TIMES = 20, 20
HOST = "127.0.0.1:9000"
PAGE = (CHECKOUT / "docs" / "request-costs.md").read_text()
BUDGETS = {
    name.strip(): int(most.replace(",", ""))
    for name, most in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d,]+) \|", PAGE, re.MULTILINE)
}
LEAST_USED = 0.8
"""A budget far above what is used bounds nothing: then the page gets a lower one."""
OURS: Final = tuple(f"{CHECKOUT}/{name}/" for name in ("meshd", "sdk/meshwire"))


class Kept(asyncio.Transport):
    """Keeps what a server sends to its client."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5)})
        self.sent, self.answered = b"", asyncio.Event()

    def write(self, data: Any) -> None:
        self.sent += bytes(data)
        self.answered.set()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(embedded=True)
    yield pair
    pair.close()


def signed(method: str, target: str, body: bytes = b"", **others: str) -> bytes:
    """A request with a signature, of which `others` are headers."""
    path, _, query = target.partition("?")
    fields = {"Host": HOST} | {name.replace("_", "-"): value for name, value in others.items()}
    head = RequestHead(method, path, query, {name.lower(): value for name, value in fields.items()})
    payload = hashlib.sha256(body).hexdigest()
    fields |= sign(head, Credential(*ROOT), region="us-east-1", timestamp=NOW, payload_hash=payload)
    if body:
        fields["Content-Length"] = str(len(body))
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode() + body


def calls_of(pair: Pair, requests: list[bytes]) -> float:
    """Calls for one of the last TIMES requests, the others being for warmth."""

    async def main() -> int:
        connection, transport, calls = pair.hot.server(), Kept(), Calls(OURS)
        connection.connection_made(transport)
        for number, request in enumerate(requests):
            if number == WARM:
                calls.count = 0
            transport.answered.clear()
            transport.sent = b""
            head, _, body = request.partition(b"\r\n\r\n")
            with calls:
                if b"Expect: " in head:
                    connection.data_received(head + b"\r\n\r\n")
                    assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
                    transport.answered.clear()
                    transport.sent = b""
                    connection.data_received(body)
                else:
                    connection.data_received(request)
                await transport.answered.wait()
            assert transport.sent.startswith(b"HTTP/1.1 20"), transport.sent[:300]
            await asyncio.sleep(0)  # what runs after an answer belongs to no request
        connection.connection_lost(None)
        return calls.count

    return pair.loop.run_until_complete(asyncio.wait_for(main(), 60)) / TIMES


def _fill(pair: Pair) -> None:
    async def put() -> None:
        for number in range(WARM + TIMES):
            await pair.put("bench", f"small/{number:02}", BODY)

    pair.loop.run_until_complete(put())


def _numbered(method: str, prefix: str, body: bytes = b"") -> list[bytes]:
    return [signed(method, f"/bench/{prefix}/{number:02}", body) for number in range(WARM + TIMES)]


def _by_boto3(_: Pair) -> list[bytes]:
    """As boto3 sends a small object: the body after `100 Continue`, with a checksum."""
    others = {
        "Accept_Encoding": "identity",
        "User_Agent": "Boto3/1.40 md/Botocore#1.40 ua/2.1",
        "x_amz_sdk_checksum_algorithm": "CRC32",
        "x_amz_checksum_crc32": b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode(),
        "Expect": "100-continue",
        "amz_sdk_invocation_id": "0b2f6a3e-9a64-4b3f-8f6e-2f1d2c3b4a59",
        "amz_sdk_request": "attempt=1",
    }
    targets = [f"/bench/expected/{number:02}" for number in range(WARM + TIMES)]
    return [signed("PUT", target, BODY, **others) for target in targets]


def _parts(pair: Pair) -> list[bytes]:
    upload = pair.loop.run_until_complete(pair.store.create_upload(Upload("", "bench", "big")))
    numbers = range(1, WARM + TIMES + 1)
    return [
        signed("PUT", f"/bench/big?partNumber={number}&uploadId={upload.upload_id}", BODY)
        for number in numbers
    ]


REQUESTS: Final[dict[str, Callable[[Pair], list[bytes]]]] = {
    "GET 10 KiB": lambda _: _numbered("GET", "small"),
    "HEAD": lambda _: _numbered("HEAD", "small"),
    "LIST of 40 keys": lambda _: [signed("GET", "/bench?list-type=2&prefix=small%2F")] * (WARM + TIMES),
    "PUT 10 KiB": lambda _: _numbered("PUT", "new", BODY),
    "PUT 10 KiB by boto3: a checksum, and the body after `100 Continue`": _by_boto3,
    "part of 10 KiB": _parts,
    "DELETE": lambda _: _numbered("DELETE", "small"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_keeps_its_budget(pair: Pair, kind: str) -> None:
    _fill(pair)
    used, most = calls_of(pair, REQUESTS[kind](pair)), BUDGETS[kind]
    assert most * LEAST_USED <= used <= most, f"{kind}: {used:.0f} calls; docs/request-costs.md says {most}"
