"""PUTs on the short way whose clients or buckets go away, or whose bodies do not end."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from meshd.config import HttpSettings
from meshd.control.buckets import Bucket
from meshd.objects.service import ObjectService
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.hot_servers import NOW, ROOT, Pair, counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Any

HOST = "127.0.0.1:9000"
BODY = b"small" * 2000
_STEP = 20.0  # seconds for a step that takes milliseconds


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(embedded=True)
    yield pair
    pair.close()


def head(key: str, bucket: str = "bench", **more: str) -> bytes:
    fields = {"host": HOST}
    request = RequestHead("PUT", f"/{bucket}/{key}", "", fields)
    payload = hashlib.sha256(BODY).hexdigest()
    fields |= sign(request, Credential(*ROOT), region="us-east-1", timestamp=NOW, payload_hash=payload)
    fields |= {"content-length": str(len(BODY)), **more}
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"PUT /{bucket}/{key} HTTP/1.1", *lines, "", ""]).encode()


def run(pair: Pair, steps: Awaitable[Any]) -> Any:
    return pair.loop.run_until_complete(asyncio.wait_for(steps, _STEP))


async def connect(pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", pair.hot.port)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(int(_STEP / 0.01)):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")


def statuses() -> dict[str, float]:
    """How many PUTs were counted, by status."""
    return {
        name[2]: value
        for name, value in counted()
        if name[:2] == ("meshd_http_requests_total", "('operation', 'PutObject')")
    }


def test_continue_is_sent_before_the_body_comes(pair: Pair) -> None:
    async def steps() -> bytes:
        reader, writer = await connect(pair)
        writer.write(head("asked", expect="100-continue"))
        first = await reader.readuntil(b"\r\n\r\n")
        assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY[:100])
        await asyncio.sleep(0.01)
        writer.write(BODY[100:])
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return answer

    assert run(pair, steps()).startswith(b"HTTP/1.1 200")
    record = pair.store.get("bench", "asked")
    assert record is not None
    assert pair.store.read_range(record, 0, record.size) == BODY


def test_a_body_that_its_client_ends_early_is_refused(pair: Pair) -> None:
    async def steps() -> bytes:
        reader, writer = await connect(pair)
        writer.write(head("early", expect="100-continue") + BODY[:100])
        before = await reader.readuntil(b"\r\n\r\n")
        assert before.startswith(b"HTTP/1.1 100")
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    answer = run(pair, steps())
    assert answer.startswith(b"HTTP/1.1 400")  # and no second 100
    assert b"IncompleteBody" in answer
    assert pair.store.get("bench", "early") is None


def test_a_body_that_does_not_come_is_given_up() -> None:
    """Also of the second client, when the first one's is complete."""
    hasty = Pair(embedded=True, http=HttpSettings(body_timeout=0.2))

    async def steps() -> bytes:
        (first, writing), (second, waiting) = await connect(hasty), await connect(hasty)
        for writer in (writing, waiting):
            writer.write(head("given-up", expect="100-continue") + BODY[:100])
        for reader in (first, second):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writing.write(BODY[100:])
        assert (await first.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await hasty.store.delete("bench", "given-up")
        answer = await second.read()
        for writer in (writing, waiting):
            writer.close()
        return answer

    try:
        answer = run(hasty, steps())
        assert answer.startswith(b"HTTP/1.1 400")  # and no second 100
        assert b"RequestTimeout" in answer
        assert hasty.store.get("bench", "given-up") is None
    finally:
        hasty.close()


def test_a_client_that_leaves_before_its_body_stores_nothing(pair: Pair) -> None:
    counts, before = statuses(), pair.answered

    async def steps() -> None:
        _, writer = await connect(pair)
        writer.write(head("left") + BODY[:100])
        await until(lambda: pair.answered > before)
        reset = struct.pack("ii", 1, 0)  # no FIN, which would end the body
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        await until(lambda: statuses() != counts)

    run(pair, steps())
    changed = {status: n - counts.get(status, 0) for status, n in statuses().items()}
    assert {status: n for status, n in changed.items() if n} == {"('status', '499')": 1}
    assert pair.store.get("bench", "left") is None


def test_a_client_that_leaves_after_its_body_stores_it(pair: Pair) -> None:
    counts, before = statuses(), pair.answered

    async def steps() -> None:
        _, writer = await connect(pair)
        writer.write(head("whole") + BODY)
        await until(lambda: pair.answered > before)
        writer.transport.abort()
        await until(lambda: pair.store.get("bench", "whole") is not None)
        await until(lambda: statuses() != counts)

    run(pair, steps())
    assert sum(statuses().values()) == sum(counts.values()) + 1


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made-again"])
def test_a_bucket_that_goes_away_meanwhile_stores_nothing(pair: Pair, again: bool) -> None:
    """Not even into another bucket that has the name by then."""
    name = f"fleeting-{again}".lower()
    buckets = pair.buckets

    async def steps() -> bytes:
        await buckets.create(Bucket(name, "root", 1))
        reader, writer = await connect(pair)
        writer.write(head("object", name, expect="100-continue"))
        await reader.readuntil(b"\r\n\r\n")
        await buckets.delete(name)
        if again:
            await buckets.create(Bucket(name, "root", 2))
        writer.write(BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return answer

    assert run(pair, steps()).startswith(b"HTTP/1.1 404")
    assert pair.store.get(name, "object") is None


def test_a_failure_after_the_commit_is_answered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection serves the next request, too."""

    def fail(*_: object) -> None:
        raise RuntimeError("of the test")

    async def steps() -> list[bytes]:
        reader, writer = await connect(pair)
        with monkeypatch.context() as broken:
            broken.setattr(ObjectService, "stored", fail)
            writer.write(head("failed") + BODY)
            said = await reader.readuntil(b"</Error>")
        writer.write(head("next") + BODY)
        answers = [said, await reader.readuntil(b"\r\n\r\n")]
        writer.close()
        return answers

    failed, following = run(pair, steps())
    assert failed.startswith(b"HTTP/1.1 500")
    assert following.startswith(b"HTTP/1.1 200")
