"""Large answers: sendfile past slow clients, cold files, vanished clients and replaced objects."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import uvloop

from meshd.config import HttpSettings
from meshd.server import sendfile, sendfile_preload
from meshd.server.http_server import make_server
from meshd.server.response import StreamedReply
from meshd.store.records import Span
from meshd.util.clock import SystemClock
from tests.support.bounded_wait import await_true
from tests.support.s3_raw import read_answer
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from meshd.server.request import MeshRequest
    from tests.support.daemons import Daemon
    from tests.support.s3_raw import Wire

MIB = 1 << 20
DATA = os.urandom(6 * MIB + 12_345)


# --- send_spans by itself --------------------------------------------------------------------------------


@pytest.fixture(params=["uvloop", "asyncio"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop


@pytest.fixture
def data_file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@asynccontextmanager
async def serving(handle: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of one handler."""
    loop = asyncio.get_running_loop()
    server = make_server(handle, SystemClock(), HttpSettings())
    listener = await loop.create_server(server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=64 << 10)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        await stop_listening(listener)
        await server.shutdown(1)


async def fetch(spans: list[Span], requests: int, pace: int) -> bytes:
    """What a client reads from a server that answers every request with `spans`; `pace` bytes a read."""
    total = sum(span.length for span in spans)

    async def handle(request: MeshRequest) -> StreamedReply:
        headers = [("content-length", str(total))]
        try:
            keep_alive = await sendfile.send_spans(request, 200, headers, spans, 0)
        except OSError as error:
            raise ConnectionAbortedError from error
        return StreamedReply(200, keep_alive=keep_alive)

    bodies = b""
    async with serving(handle) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * requests)
        for _ in range(requests):
            head = await reader.readuntil(b"\r\n\r\n")
            assert f"content-length: {total}".encode() in head
            left = total
            while left:
                piece = await reader.read(min(pace, left))
                if not piece:
                    raise EOFError(f"{left} bytes short")
                left -= len(piece)
                bodies += piece
                await asyncio.sleep(0)
    return bodies


def spans_of(fd: int, *ranges: tuple[int, int]) -> list[Span]:
    return [Span(fd, offset, length) for offset, length in ranges]


def run(new_loop: Any, coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


@pytest.mark.parametrize("pace", [1 << 20, 3000])
def test_spans_arrive_in_order(new_loop: Any, data_file: int, pace: int) -> None:
    spans = spans_of(data_file, (5, 3 * MIB), (0, 0), (4 * MIB, 17), (100, MIB))
    expected = DATA[5 : 5 + 3 * MIB] + DATA[4 * MIB : 4 * MIB + 17] + DATA[100 : 100 + MIB]
    assert run(new_loop, fetch(spans, 2, pace)) == expected * 2


def test_cold_pages_take_the_other_path(
    new_loop: Any, data_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    read_pages = sendfile_preload.read_pages
    monkeypatch.setattr(sendfile, "is_resident", lambda *_: False)

    def counted(*arguments: Any) -> Any:
        fetched.append(arguments[1])
        return read_pages(*arguments)

    monkeypatch.setattr(sendfile, "read_pages", counted)
    assert run(new_loop, fetch(spans_of(data_file, (0, len(DATA))), 1, MIB)) == DATA
    assert fetched


def test_a_file_that_is_too_short_breaks_the_connection(new_loop: Any, data_file: int) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        run(new_loop, fetch(spans_of(data_file, (MIB, len(DATA))), 1, MIB))


def test_a_client_that_takes_nothing_is_given_up(
    new_loop: Any, data_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sendfile, "_IDLE_SECONDS", 0.05)

    async def stall() -> str:
        given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def handle(request: MeshRequest) -> StreamedReply:
            try:
                await sendfile.send_spans(request, 200, [], spans_of(data_file, *[(0, 6 * MIB)] * 8), 0)
            except ConnectionError as error:
                given_up.set_result(str(error))
                raise
            return StreamedReply(200, keep_alive=False)

        async with serving(handle) as (_, writer), asyncio.timeout(60):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            return await given_up

    assert "read nothing" in run(new_loop, stall())


# --- through the daemon ----------------------------------------------------------------------------------


def worker_of(daemon: Daemon) -> psutil.Process:
    return psutil.Process(daemon.children()["worker-0"])


def test_a_slow_client_gets_every_byte(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=DATA)
    sock = wire.connect(receive_buffer=4096)
    sock.sendall(wire.head("GET", f"/{bucket}/k"))
    assert read_answer(sock).body == DATA


def test_vanishing_clients_leave_nothing_open(daemon: Daemon, wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=DATA * 4)
    s3.get_object(Bucket=bucket, Key="k")["Body"].read()
    worker = worker_of(daemon)
    before = worker.num_fds()
    for reset in (False, True) * 5:
        sock = wire.connect(receive_buffer=4096)
        sock.sendall(wire.head("GET", f"/{bucket}/k"))
        sock.recv(1000)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    await_true(lambda: worker.num_fds() <= before)


def test_a_reader_keeps_the_version_it_began_with(wire: Wire, s3: Any, bucket: str) -> None:
    data = os.urandom(8 * MIB)
    s3.put_object(Bucket=bucket, Key="k", Body=data)
    socks = [wire.connect(receive_buffer=32_768) for _ in range(2)]
    for sock in socks:
        sock.sendall(wire.head("GET", f"/{bucket}/k"))
        assert sock.recv(1) == b"H"
    s3.put_object(Bucket=bucket, Key="k", Body=os.urandom(8 * MIB))
    s3.delete_object(Bucket=bucket, Key="k")
    for sock in socks:
        stream = b"H"
        while len(stream) < len(data) or not stream.endswith(data[-16:]):
            piece = sock.recv(MIB)
            assert piece, "the connection ended early"
            stream += piece
        assert stream.partition(b"\r\n\r\n")[2] == data
