"""Bytes moved from socket to socket: all of them in order, or an error and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from meshd.rpc.peer_client import PeerUnreachableError
from meshd.server.proxy import splice
from meshd.server.proxy.splice import Splice

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

BODY = os.urandom(9 << 20)
PATIENCE = 60.0


class Ends:
    """`given` → (`source`, `drain` of the splice) → `taken`."""

    def __init__(self, stack: ExitStack) -> None:
        self.given, self.source = (stack.enter_context(closing(end)) for end in _pair())
        self.drain, self.taken = (stack.enter_context(closing(end)) for end in _pair())
        self.outcome: asyncio.Future[Exception | None] | None = None

    def begin(self, left: int) -> Splice:
        self.outcome = asyncio.get_running_loop().create_future()
        splice = Splice(self.source, self.drain, left, lambda: None, self.outcome.set_result)
        splice.start()
        return splice

    async def end(self) -> Exception | None:
        assert self.outcome is not None
        async with asyncio.timeout(PATIENCE):
            return await self.outcome

    @property
    def least(self) -> int:
        """How many bytes the source is to have to be readable."""
        return self.source.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for end in (one, other):
        end.setblocking(False)
    return one, other


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await work()

    asyncio.run(within())


async def take(sock: socket.socket, count: int, piece: int, pause: float = 0.0) -> bytes:
    loop, got = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(PATIENCE):
        while len(got) < count:
            data = await loop.sock_recv(sock, min(piece, count - len(got)))
            assert data, "it ended early"
            got += data
            await asyncio.sleep(pause)
    return bytes(got)


@pytest.mark.parametrize(("piece", "pause"), [(1 << 20, 0.0), (300_001, 0.002)])
def test_all_bytes_come_in_order(ends: Ends, piece: int, pause: float) -> None:
    async def work() -> None:
        splice = ends.begin(len(BODY))
        giving = asyncio.create_task(asyncio.get_running_loop().sock_sendall(ends.given, BODY + b"next"))
        assert await take(ends.taken, len(BODY), piece, pause) == BODY
        assert await ends.end() is None
        await giving
        assert splice.bytes_sent == len(BODY)
        assert ends.least == 1
        assert await take(ends.source, 4, 4) == b"next"  # what follows was left alone

    run(work)


def test_few_bytes_do_not_wait_for_many(ends: Ends) -> None:
    async def work() -> None:
        ends.begin(10)
        for byte in BODY[:10]:
            await asyncio.sleep(0)
            ends.given.send(bytes([byte]))
        assert await take(ends.taken, 10, 10) == BODY[:10]
        assert await ends.end() is None

    run(work)


def test_source_that_ends_early_is_told(ends: Ends) -> None:
    async def work() -> None:
        ends.begin(1000)
        ends.given.send(b"some")
        ends.given.close()
        assert await take(ends.taken, 4, 4) == b"some"
        assert isinstance(await ends.end(), PeerUnreachableError)

    run(work)


def test_drain_that_is_gone_is_told_and_its_pipe_not_used_again(ends: Ends) -> None:
    async def work() -> None:
        splice._Pipe._kept.clear()
        ends.begin(len(BODY))
        giving = asyncio.create_task(asyncio.get_running_loop().sock_sendall(ends.given, BODY))
        await take(ends.taken, 1 << 20, 1 << 20)
        ends.taken.close()
        assert isinstance(await ends.end(), OSError)
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        assert all(_holds_nothing(pipe.reader) for pipe in splice._Pipe._kept)

    run(work)


def _holds_nothing(reader: int) -> bool:
    try:
        return not os.read(reader, 1)
    except BlockingIOError:
        return True


def test_closed_it_moves_nothing_and_says_nothing(ends: Ends) -> None:
    async def work() -> None:
        splice = ends.begin(1000)
        splice.close()
        splice.close()
        ends.given.send(b"some")
        assert await take(ends.source, 4, 4) == b"some"
        assert ends.outcome is not None
        assert not ends.outcome.done()

    run(work)


def test_nobody_moves_for_too_long(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "_IDLE_SECONDS", 0.05)

    async def work() -> None:
        ends.begin(1000)
        assert isinstance(await ends.end(), TimeoutError)

    run(work)
