"""Uploads that are refused: their clients come to read the answer, whenever they look for it, and cost the
node no more than a body's buffer and a bounded time."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import boto3
import psutil
import pytest
import uvloop
from botocore.config import Config
from botocore.exceptions import ClientError

from meshd.config import HttpSettings
from meshd.server.connection import Connection
from meshd.server.http_server import drain_server
from meshd.server.response import Reply
from meshd.util.clock import SystemClock
from tests.component.server.test_connection_endings import serving, until
from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.server.http_server import MeshServer
    from meshd.server.request import MeshRequest

MIB = 1 << 20
LARGE = 48 * MIB  # more than the buffers of both ends hold, many times


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, MIB, LARGE])
@pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
def test_boto3_is_told_why(daemon: Daemon, tmp_path: Path, size: int, checksums: str) -> None:
    config = Config(retries={"total_max_attempts": 1}, request_checksum_calculation=checksums)
    keys = {"aws_access_key_id": daemon.access_key, "aws_secret_access_key": daemon.secret_key}
    where = {"endpoint_url": daemon.endpoint, "region_name": "us-east-1"}
    client = boto3.client("s3", config=config, **keys, **where)
    with sparse(tmp_path / "body", size).open("rb") as body, pytest.raises(ClientError) as refused:
        client.put_object(Bucket="not-there", Key="k", Body=body)
    assert refused.value.response["Error"]["Code"] == "NoSuchBucket"
    client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("framing", ["X-A: b", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("waiting", ["Expect:", "Expect: 100-continue"])
def test_curl_is_told_why(daemon: Daemon, tmp_path: Path, framing: str, waiting: str) -> None:
    body = sparse(tmp_path / "body", LARGE)
    command = ["curl", "-sS", "-w", "%{http_code}", "-o", str(tmp_path / "answer"), "-T", str(body)]
    command += ["-H", framing, "-H", waiting, f"{daemon.endpoint}/not-there/k"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"404", b"")
    assert b"NoSuchBucket" in (tmp_path / "answer").read_bytes()


def test_a_disk_that_becomes_full_under_uploads(tmp_path: Path) -> None:
    """Each client sends all of its body and reads then. Some have their objects, the others are told of the
    room, on a connection that they find whole."""
    answers: list[int] = []

    def upload(wire: Wire, key: str) -> None:
        sock = wire.connect()
        sock.sendall(wire.head("PUT", f"/full/{key}", headers={"content-length": str(LARGE)}))
        for _ in range(LARGE // MIB):
            sock.sendall(bytes(MIB))
        answers.append(read_answer(sock, "PUT").status)

    with Daemon.start(
        tmp_path, env={"MESHD_FAILPOINTS": "store.own.before_write=error(28):after 200"}
    ) as node:
        s3 = node.client()
        s3.create_bucket(Bucket="full")
        wire = Wire(node.endpoint, node.access_key, node.secret_key)
        clients = [threading.Thread(target=upload, args=(wire, f"k{number}")) for number in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        wire.close()
        kept = [entry["Key"] for entry in s3.list_objects_v2(Bucket="full").get("Contents", [])]
        assert len(answers) == 8
        assert set(answers) <= {200, 507}
        assert answers.count(200) == len(kept) < 8
        assert not list(tmp_path.rglob("*.draft*"))


def test_a_body_that_never_ends_takes_no_memory(wire: Wire, daemon: Daemon, bucket: str) -> None:
    """256 MiB of it, and the process has not grown by a tenth of that. Then the client leaves, and nothing of
    it stays."""
    worker = psutil.Process(daemon.pid)
    family = [worker, *worker.children(recursive=True)]
    before = sum(process.memory_info().rss for process in family)
    sock = wire.connect()
    sock.sendall(wire.head("PUT", "/not-there/k", headers={"content-length": str(1 << 42)}))
    block = bytes(MIB)
    for _ in range(256):
        sock.sendall(block)
    assert sum(process.memory_info().rss for process in family) < before + 25 * MIB
    assert read_answer(sock, "PUT").code == "NoSuchBucket"
    sock.close()


MALFORMED = {
    "line": (b"GARBAGE\r\n\r\n", 400),
    "header": (b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * (32 << 10), 431),
    "chunk": (b"PUT /b/k HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n", 0),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_who_sends_what_is_no_http_is_told_so(wire: Wire, what: str) -> None:
    """Also when all of it is sent before the answer is looked for: what follows is dropped."""
    begun, status = MALFORMED[what]
    sock, block = wire.connect(), bytes(MIB)
    sock.sendall(begun)
    for _ in range(16):
        sock.sendall(block)
    answer = read_answer(sock, "PUT")
    assert answer.status == status or (not status and 400 <= answer.status < 500)
    assert sock.recv(1) == b""


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\n", b"5\r\nhello!\r\n"])
def test_a_body_whose_chunks_are_none_is_incomplete(wire: Wire, bucket: str, chunk: bytes) -> None:
    """At once, not when the patience with it is over."""
    sock = wire.connect()
    sock.settimeout(20)
    sock.sendall(wire.head("PUT", f"/{bucket}/k", headers={"transfer-encoding": "chunked"}) + chunk)
    assert read_answer(sock, "PUT").code in ("IncompleteBody", "BadRequest")
    assert wire.call("HEAD", f"/{bucket}/k").status == 404


def test_who_has_ended_with_what_is_no_http_is_told_so(wire: Wire) -> None:
    sock = wire.connect()
    sock.sendall(b"GARBAGE\r\n\r\n")
    sock.shutdown(socket.SHUT_WR)
    assert read_answer(sock).status == 400


# --- limits, of a server of its own -----------------------------------------------------------------------


async def _refuse(request: MeshRequest) -> Reply:
    reply = Reply(403, [("Content-Length", "2")], b"no", 0)
    reply.force_close()
    return reply


HEAD = b"PUT /k HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


async def refused(server: MeshServer, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent a part of its body, and whose refusal is out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + bytes(1000))
    await until(lambda: any(one.is_evictable and not one.is_idle for one in ours(server)))
    return reader, writer


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        if writer.is_closing():  # uvloop's transport would raise RuntimeError
            raise ConnectionResetError
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def ours(server: MeshServer) -> list[Connection]:
    return [connection for connection in server.connections if isinstance(connection, Connection)]


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_the_rest_is_dropped_and_the_connection_closed() -> None:
    async def scene() -> None:
        async with serving(HttpSettings(), _refuse) as (server, port):
            reader, writer = await refused(server, port)
            for _ in range(99):
                writer.write(bytes(1_000_000))
                await writer.drain()
            writer.write(bytes(1_000_000 - 1000))
            assert (await reader.read()).startswith(b"HTTP/1.1 403")
            writer.close()

    run(scene)


def test_who_goes_on_for_ever_is_cut() -> None:
    """After `body_timeout` in all, though bytes never cease to come."""

    async def scene() -> None:
        async with serving(HttpSettings(body_timeout=0.5), _refuse) as (server, port):
            _, writer = await refused(server, port)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ConnectionError):
                await send_for_ever(writer)
            assert asyncio.get_running_loop().time() - began < 60
            await until(lambda: not server.connection_count)

    run(scene)


def test_who_falls_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.server.lingering_close._SILENCE", 0.2)

    async def scene() -> None:
        async with serving(HttpSettings(body_timeout=3600), _refuse) as (server, port):
            _, writer = await refused(server, port)
            await until(lambda: not server.connection_count)
            writer.close()

    run(scene)


def test_who_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task waits for the rest of a body whose client is gone."""
    monkeypatch.setattr("meshd.server.lingering_close._SILENCE", 3600.0)

    async def scene() -> None:
        async with serving(HttpSettings(body_timeout=3600), _refuse) as (server, port):
            _, writer = await refused(server, port)
            client = writer.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # with a reset
            writer.transport.abort()
            await until(lambda: not server.connection_count)
            await until(lambda: not [task for task in asyncio.all_tasks() if "start" in repr(task)])

    run(scene)


def test_room_is_made_of_those_that_still_send() -> None:
    async def scene() -> None:
        async with serving(HttpSettings(), _refuse) as (server, port):
            server.guard.limit = 1
            _, sending = await refused(server, port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 403")
            for each in (sending, writer):
                each.close()

    run(scene)


def test_a_node_that_stops_waits_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.server.lingering_close._SHORTENED", 0.2)
    monkeypatch.setattr("meshd.server.lingering_close._SILENCE", 3600.0)

    async def scene() -> None:
        async with serving(HttpSettings(body_timeout=3600), _refuse) as (server, port):
            _, writer = await refused(server, port)
            async with asyncio.timeout(60):
                await drain_server(server, SystemClock(), 3600)
            writer.close()

    run(scene)
