"""Messages and descriptors over Unix sockets: both sides, both event loops, hostile peers."""

from __future__ import annotations

import array
import asyncio
import errno
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from meshd.rpc.unix_messages import (
    BlockingMessageStream,
    MessageDecoder,
    MessageError,
    MessageStream,
    StreamClosedError,
    accept_sockets,
    connect,
    encode_message,
    listen,
)
from tests.support.bounded_wait import await_end
from tests.support.old_garbage import clear_old_garbage

if TYPE_CHECKING:
    from pathlib import Path

Runner = Callable[[Coroutine[Any, Any, None]], None]
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on either event loop, within bounds."""

    def runner(work: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await work

        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(bounded())

    return runner


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def take(fd: int) -> bytes:
    """The content of a descriptor, which is closed."""
    content = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    return content


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """uvloop keeps some descriptors from its first loop on."""
    uvloop.new_event_loop().close()
    clear_old_garbage()


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Any:
    gc.collect()  # what earlier tests left to the collector must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_messages_with_descriptors_arrive_in_order(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        fds = [memfd(b"%d" % number) for number in range(6)]
        await one.send({"n": 0})
        await one.send({"n": 1}, fds[:2])
        await one.send({"n": 2}, fds[2:])
        await one.send({"n": 3})
        for fd in fds:
            os.close(fd)  # sent: the sender's may go
        got = [await two.receive() for _ in range(4)]
        assert [body["n"] for body, _ in got] == [0, 1, 2, 3]
        contents = [[take(fd) for fd in received] for _, received in got]
        assert contents == [[], [b"0", b"1"], [b"2", b"3", b"4", b"5"], []]
        one.close()
        two.close()

    run(check())


def test_large_messages_from_many_tasks_do_not_mix(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        bodies = [str(number) * 700_000 for number in range(5)]
        sending = [asyncio.ensure_future(one.send(body)) for body in bodies]
        got = [(await two.receive())[0] for _ in bodies]
        await asyncio.gather(*sending)
        assert sorted(got) == sorted(bodies)
        one.close()
        two.close()

    run(check())


def test_a_cancelled_receive_loses_nothing(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        waiting = asyncio.ensure_future(two.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await one.send("kept")
        assert await two.receive() == ("kept", [])
        one.close()
        two.close()

    run(check())


def test_a_cancelled_half_sent_message_closes_the_stream(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        sending = asyncio.ensure_future(one.send("x" * (8 << 20)))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(StreamClosedError):
            await two.receive()
        with pytest.raises(StreamClosedError):
            await one.send("more")
        two.close()

    run(check())


def test_the_other_end_closing_is_an_error_on_both_sides(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        waiting = asyncio.ensure_future(two.receive())
        await asyncio.sleep(0)
        one.close()
        with pytest.raises(StreamClosedError):
            await waiting
        with pytest.raises(StreamClosedError):
            await two.send("x")
        two.close()
        two.close()

    run(check())


def test_closing_ends_ones_own_waiting_receive(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        waiting = asyncio.ensure_future(two.receive())
        await asyncio.sleep(0)
        two.close()
        with pytest.raises(StreamClosedError):
            await waiting
        one.close()

    run(check())


def test_descriptors_nobody_took_are_closed(run: Runner) -> None:
    async def check() -> None:
        one, two = (MessageStream(sock) for sock in socket.socketpair())
        fd = memfd(b"x")
        await one.send("first")
        await one.send("second", [fd])
        os.close(fd)
        await two.receive()  # most likely brought the second along
        two.close()
        one.close()

    run(check())


def test_a_server_and_its_clients_whatever_the_length_of_the_path(run: Runner, tmp_path: Path) -> None:
    place = tmp_path / ("d" * 120)
    place.mkdir()
    path = place / "service.sock"

    async def serve(sock: socket.socket) -> None:
        stream = MessageStream(sock)
        while True:
            body, fds = await stream.receive()
            await stream.send({"echo": body}, fds)
            for fd in fds:
                os.close(fd)

    async def check() -> None:
        listener = listen(path)
        serving = asyncio.ensure_future(accept_sockets(listener, serve))
        streams = [await connect(path) for _ in range(3)]
        for number, stream in enumerate(streams):
            fd = memfd(b"%d" % number)
            await stream.send(number, [fd])
            os.close(fd)
        for number, stream in enumerate(streams):
            body, fds = await stream.receive()
            assert body == {"echo": number}
            assert [take(fd) for fd in fds] == [b"%d" % number]
        streams[0].close()
        await streams[1].send("still there")
        assert (await streams[1].receive())[0] == {"echo": "still there"}
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        with pytest.raises(StreamClosedError):
            await streams[1].receive()
        for stream in streams[1:]:
            stream.close()
        listener.close()

    run(check())


def test_nobody_listening_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(connect(tmp_path / "none.sock"))


def test_the_blocking_side_speaks_with_the_asynchronous_one(run: Runner) -> None:
    mine, theirs = socket.socketpair()

    def echo() -> None:
        stream = BlockingMessageStream(theirs)
        body, fds = stream.receive()
        stream.send(body, fds)
        for fd in fds:
            os.close(fd)
        stream.close()

    async def check() -> None:
        stream, fd = MessageStream(mine), memfd(b"shared")
        await stream.send(["x" * 1_000_000], [fd])
        os.close(fd)
        body, fds = await stream.receive()
        assert body == ["x" * 1_000_000]
        assert take(fds[0]) == b"shared"
        with pytest.raises(StreamClosedError):
            await stream.receive()
        stream.close()

    helper = threading.Thread(target=echo)
    helper.start()
    run(check())
    await_end(helper)


def test_a_blocking_receive_ends_when_the_peer_does() -> None:
    mine, theirs = socket.socketpair()
    stream = BlockingMessageStream(mine)
    theirs.close()
    with pytest.raises(StreamClosedError):
        stream.receive()
    with pytest.raises(StreamClosedError):
        stream.send("x")
    stream.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!IH", 1 << 31, 0),
        struct.pack("!IH", 2, 999) + b"{}",
        struct.pack("!IH", 3, 0) + b"{x}",
        struct.pack("!IH", 3, 0) + b'"\xff"',
        struct.pack("!IH", 200_000, 0) + b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=["too long", "too many descriptors", "no JSON", "no UTF-8", "too deep"],
)
def test_broken_framing_is_refused(data: bytes) -> None:
    assembly = MessageDecoder()
    assembly.feed(data, [])
    with pytest.raises(MessageError):
        assembly.next_message()


def test_promised_descriptors_must_come() -> None:
    assembly = MessageDecoder()
    assembly.feed(struct.pack("!IH", 2, 1) + b"{}", [])
    with pytest.raises(MessageError, match="1 descriptors, and 0 arrived"):
        assembly.next_message()


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "begun",
    [b"", struct.pack("!IH", 1000, 1)[:3], struct.pack("!IH", 1000, 1), struct.pack("!IH", 1000, 0)],
    ids=["nothing", "half a header", "a header", "a header without descriptors"],
)
def test_descriptors_do_not_pile_up(begun: bytes) -> None:
    """A peer that sends some with every byte is refused before it has us out of open files."""
    mine, theirs = socket.socketpair()
    before = _open_files()
    stream = BlockingMessageStream(mine)
    fd = memfd(b"")
    if begun:
        theirs.sendmsg([begun])
    for _ in range(12):
        rights = array.array("i", [fd] * 100)
        theirs.sendmsg([b" " if begun else b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(MessageError, match="descriptors"):
        stream.receive()
    assert _open_files() - before <= 2 * 253 + 1
    stream.close()
    os.close(fd)
    theirs.close()
    assert _open_files() < before


@pytest.mark.parametrize("size", [2, 400_000])
def test_descriptors_of_messages_that_come_at_once(size: int) -> None:
    """What is sent as it should be is taken, however it lies in the socket."""
    mine, theirs = socket.socketpair()
    sender, stream = BlockingMessageStream(theirs), BlockingMessageStream(mine)
    fd = memfd(b"x")

    def send() -> None:
        for number in range(9):
            sender.send("x" * size, [fd] * (number % 3 * 126))

    helper = threading.Thread(target=send)
    helper.start()
    for number in range(9):
        body, fds = stream.receive()
        assert (len(body), len(fds)) == (size, number % 3 * 126)
        for each in fds:
            os.close(each)
    await_end(helper)
    os.close(fd)
    sender.close()
    stream.close()


BODIES = st.lists(st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1) | st.text()), max_size=5)


@given(BODIES, st.data())
def test_messages_survive_any_cutting(bodies: list[Any], data: st.DataObject) -> None:
    stream = b"".join(encode_message(body, ()) for body in bodies)
    assembly, got = MessageDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        assembly.feed(stream[:size], [])
        stream = stream[size:]
        while (message := assembly.next_message()) is not None:
            got.append(message[0])
    assert got == bodies


def test_sockets_are_accepted_and_read_after_a_time_without_descriptors(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a socket takes a descriptor more."""
    failures, dup = [errno.EMFILE, errno.ENFILE], os.dup

    def short_of(fd: int) -> int:
        if failures:
            raise OSError(failures.pop(), "no descriptor")
        return dup(fd)

    async def check() -> None:
        async def answer(sock: socket.socket) -> None:
            stream = MessageStream(sock)
            body, _ = await stream.receive()
            await stream.send(body)

        listener = listen(tmp_path / "s")
        serving = asyncio.ensure_future(accept_sockets(listener, answer))
        monkeypatch.setattr(os, "dup", short_of)
        await asyncio.sleep(0)
        client = await connect(tmp_path / "s")
        await client.send("hello")
        assert await client.receive() == ("hello", [])
        assert not failures
        client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()

    run(check())


class Overcrowded(socket.socket):
    """Too many descriptors of this user are under way."""

    def sendmsg(self, *_: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")


def test_a_stream_on_which_nothing_can_be_sent_ends_for_its_reader(run: Runner) -> None:
    async def check() -> None:
        mine, theirs = socket.socketpair()
        stream = MessageStream(Overcrowded(fileno=mine.detach()))
        receiving = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        with pytest.raises(StreamClosedError):
            await stream.send("hello")
        with pytest.raises(StreamClosedError):
            await asyncio.wait_for(receiving, 5)
        stream.close()
        theirs.close()

    run(check())
