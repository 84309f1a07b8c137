"""The call between processes: descriptors, streams, errors, cancellation and lost processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

from meshd.errors import MeshdError
from meshd.rpc.process_client import ProcessClient, Reconnect
from meshd.rpc.process_rpc import ErrorTypes, ErrorValue, Method, ProcessLostError, StreamMethod
from meshd.rpc.process_server import ProcessServer, serve_blocking
from meshd.rpc.unix_messages import MessageStream, accept_sockets, connect, listen
from tests.support.bounded_wait import await_end
from tests.support.old_garbage import clear_old_garbage

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from meshd.rpc.process_server import ServerCall

Runner = Callable[[Coroutine[Any, Any, None]], None]
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Question(msgspec.Struct, frozen=True):
    text: str
    count: int = 0


class Reply(msgspec.Struct, frozen=True):
    text: str


class OddError(MeshdError):
    pass


class VeryOddError(OddError):
    pass


class DocumentError(Exception):
    """An error with more than a message."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def to_document(self) -> dict[str, Any]:
        return {"code": self.code}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> DocumentError:
        return cls(document["code"])


ECHO: Method[Question, Reply] = Method("echo", Question, Reply)
FAIL: Method[Question, None] = Method("fail", Question, None)
WAIT: Method[Question, None] = Method("wait", Question, None)
HOLD: Method[Question, Reply] = Method("hold", Question, Reply)
NOTE: Method[Question, None] = Method("note", Question, None, ordered=True)
COUNT: StreamMethod[Question, int, int] = StreamMethod("count", Question, int, int)
ERRORS = ErrorTypes([OddError, DocumentError], unexpected=lambda: OddError("see the log"))


class Service:
    """What the tests call. `gate`: handlers that wait do so for it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.server = ProcessServer(ERRORS, max_calls=64)
        self.server.register(ECHO, self._echo)
        self.server.register(FAIL, self._fail)
        self.server.register(WAIT, self._wait)
        self.server.register(HOLD, self._hold)
        self.server.register(NOTE, self._wait)
        self.server.register(COUNT, self._count)

    async def _echo(self, question: Question, call: ServerCall) -> Reply:
        for fd in call.fds:
            call.attach(memfd(os.pread(fd, 100, 0).upper()))
        return Reply(question.text)

    async def _fail(self, question: Question, call: ServerCall) -> None:
        call.attach(memfd(b"nobody gets this"))
        raise {
            "odd": OddError("odd"),
            "very odd": VeryOddError("very odd"),
            "document": DocumentError(42),
            "cancelled": asyncio.CancelledError(),
        }.get(question.text, ZeroDivisionError("secret"))

    async def _wait(self, question: Question, call: ServerCall) -> None:
        self.begun.append(question.text)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(question.text)
            raise
        self.ended.append(question.text)

    async def _hold(self, question: Question, call: ServerCall) -> Reply:
        self.begun.append(question.text)
        fd = memfd(question.text.encode())

        def on_release() -> None:
            os.close(fd)
            self.released.append(question.text)

        call.attach(fd, on_release)
        return Reply(question.text)

    async def _count(self, question: Question, call: ServerCall) -> int:
        fd = memfd(b"shared")
        try:
            for number in range(question.count):
                await call.update(number, [fd])
            if question.text == "wait":
                await self._wait(question, call)
        finally:
            os.close(fd)
        return question.count


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Runs a coroutine on either event loop, within bounds."""

    def runner(work: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(100):
                await work

        with asyncio.Runner(loop_factory=request.param) as loop:
            loop.run(bounded())

    return runner


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """uvloop keeps some descriptors from its first loop on."""
    uvloop.new_event_loop().close()
    clear_old_garbage()


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Any:
    with warnings.catch_warnings():  # what the tests before left unclosed is not of these
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Service]:
    service = Service()
    with listen(path) as listener:
        serving = asyncio.create_task(service.server.serve_forever(listener))
        try:
            yield service
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def both(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Service, ProcessClient]]:
    path = tmp_path / "service.sock"
    async with served(path) as service:
        client = ProcessClient(path, ERRORS, **options)
        try:
            yield service, client
        finally:
            await client.aclose()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def take(fd: int) -> bytes:
    """The content of a descriptor, which is closed."""
    content = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    return content


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the other side's state has no event to wait for
            await asyncio.sleep(0.001)


def test_many_calls_and_descriptors_in_both_directions(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (_, client):
            replies = await asyncio.gather(*(client.call(ECHO, Question(str(n))) for n in range(50)))
            assert [reply.text for reply in replies] == [str(number) for number in range(50)]
            fds = [memfd(b"one"), memfd(b"two")]
            answer = await client.open(ECHO, Question("x" * 1_000_000), fds)
            assert answer.message.text == "x" * 1_000_000
            assert [take(fd) for fd in answer.fds] == [b"ONE", b"TWO"]
            await client.call(ECHO, Question("descriptors that nobody wants are closed"), fds)
            for fd in fds:
                os.close(fd)

    run(check())


def test_errors_are_values(run: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with both(tmp_path) as (_, client):
            with pytest.raises(OddError, match=r"^odd$"):
                await client.call(FAIL, Question("odd"))
            with pytest.raises(OddError, match=r"^very odd$") as caught:
                await client.call(FAIL, Question("very odd"))
            assert type(caught.value) is OddError  # the nearest class that is listed
            with pytest.raises(DocumentError) as document:
                await client.call(FAIL, Question("document"))
            assert document.value.code == 42
            assert not caplog.records
            for text in ("unlisted", "cancelled"):
                with pytest.raises(OddError, match="see the log"):
                    await client.call(FAIL, Question(text))
            assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
            assert (await client.call(ECHO, Question("goes on"))).text == "goes on"

    run(check())


def test_an_error_of_an_unknown_class_is_the_unexpected_one() -> None:
    assert str(ERRORS.decode(ErrorValue("NewError", "x"))) == "see the log"
    assert ERRORS.encode(ValueError()) is None


def test_updates_come_in_order_before_the_reply(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (_, client):
            seen: list[int] = []

            def on_update(number: int, fds: list[int]) -> None:
                assert [take(fd) for fd in fds] == [b"shared"]
                seen.append(number)

            assert (await client.stream(COUNT, Question("", 500), on_update)).message == 500
            assert seen == list(range(500))

    run(check())


def test_cancelling_a_call_cancels_its_handler(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (service, client):
            waiting = asyncio.create_task(client.call(WAIT, Question("call")))
            seen: list[int] = []

            def on_update(number: int, fds: list[int]) -> None:
                os.close(fds[0])
                seen.append(number)

            stream = asyncio.create_task(client.stream(COUNT, Question("wait", 3), on_update))
            await until(lambda: len(service.begun) == 2 and len(seen) == 3)
            for task in (waiting, stream):
                task.cancel()
            await until(lambda: sorted(service.cancelled) == ["call", "wait"])
            early = asyncio.create_task(client.call(WAIT, Question("early")))
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.gather(waiting, stream, early, return_exceptions=True)
            assert (await client.call(ECHO, Question("goes on"))).text == "goes on"

    run(check())


def test_what_a_reply_holds_is_kept_until_the_client_releases_it(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (service, client):
            answers = [await client.open(HOLD, Question(str(number))) for number in range(3)]
            assert [take(answer.fds.pop()) for answer in answers] == [b"0", b"1", b"2"]
            await client.call(ECHO, Question(""))
            assert service.released == []
            answers[1].release()
            await until(lambda: service.released == ["1"])
            answers[0].close()
            await until(lambda: service.released == ["1", "0"])
            for number in range(20):  # cancelled at any moment: before, while and after it is answered
                call = asyncio.create_task(client.open(HOLD, Question(f"c{number}")))
                for _ in range(number):
                    await asyncio.sleep(0)
                call.cancel()
                with suppress(asyncio.CancelledError):
                    (await call).close()
            await until(lambda: len(service.released) == len(service.begun) - 1)
            await client.aclose()
            await until(lambda: service.released[-1] == "2")
            assert sorted(service.released) == sorted(service.begun)

    run(check())


def test_a_process_that_ends_fails_its_calls_and_the_next_call_connects_again(
    run: Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        client = ProcessClient(path := tmp_path / "service.sock")
        with pytest.raises(ProcessLostError, match=r"service\.sock"):
            await client.call(ECHO, Question(""))
        async with served(path) as service:
            calls = [asyncio.create_task(client.call(WAIT, Question(str(n)))) for n in range(3)]
            await until(lambda: len(service.begun) == 3)
            os.close((await client.open(HOLD, Question("held"))).fds[0])
        assert sorted(service.cancelled) == ["0", "1", "2"]
        assert service.released == ["held"]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, ProcessLostError)
        await client.wait_until_lost()
        with pytest.raises(ProcessLostError):
            await client.notify(NOTE, Question(""))
        async with served(path):
            assert (await client.call(ECHO, Question("again"))).text == "again"
            await client.aclose()

    run(check())


def test_a_client_that_goes_away_ends_its_handlers(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (service, client):
            calls = [asyncio.create_task(client.call(WAIT, Question(str(n)))) for n in range(3)]
            await until(lambda: len(service.begun) == 3)
            await client.aclose()
            await until(lambda: len(service.cancelled) == 3)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ProcessLostError)

    run(check())


def test_reconnecting(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        path = tmp_path / "service.sock"
        few = ProcessClient(path, reconnect=Reconnect((0.001, 0.001)))
        with pytest.raises(ProcessLostError, match="no process listens"):
            await few.connect()
        patient = ProcessClient(path, reconnect=Reconnect((0.001, 0.002), forever=True))
        calls = [asyncio.create_task(patient.call(ECHO, Question(str(number)))) for number in range(3)]
        await asyncio.sleep(0.02)
        async with served(path):
            assert [reply.text for reply in await asyncio.gather(*calls)] == ["0", "1", "2"]
            await patient.aclose()

    run(check())


def test_calls_ahead_need_the_connection_they_depend_on(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (_, client):
            with pytest.raises(ProcessLostError, match="no connection"):
                await client.start(ECHO, Question(""), connect=False)
            await client.connect()
            ahead = [await client.start(ECHO, Question(str(n)), connect=False) for n in range(3)]
            assert [(await call.answer).message.text for call in ahead] == ["0", "1", "2"]

    run(check())


def test_a_client_has_a_bounded_number_of_calls_under_way(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path, max_calls=4) as (service, client):
            calls = [asyncio.create_task(client.call(WAIT, Question(str(n)))) for n in range(10)]
            await until(lambda: len(service.begun) == 4)
            calls[0].cancel()
            await until(lambda: len(service.begun) == 5)
            service.gate.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] + [type(None)] * 9

    run(check())


def test_a_server_closes_a_connection_that_has_too_many_calls(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (service, client):
            calls = [asyncio.create_task(client.call(WAIT, Question(str(n)))) for n in range(65)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ProcessLostError)
            assert not service.ended

    run(check())


def test_ordered_calls_run_to_their_end_one_after_the_other(run: Runner, tmp_path: Path) -> None:
    async def check() -> None:
        async with both(tmp_path) as (service, client):
            await client.notify(NOTE, Question("first"))
            second = asyncio.create_task(client.call(NOTE, Question("second")))
            third = asyncio.create_task(client.call(NOTE, Question("third")))
            await until(lambda: service.begun == ["first"])
            await asyncio.sleep(0.01)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            service.gate.set()
            await third
            assert service.ended == ["first", "second", "third"]
            assert not service.cancelled

    run(check())


@pytest.mark.parametrize(
    "message",
    [[1, "unknown", {}], [1, "echo", {"text": 1}], [1, "echo"], {"number": 1}],
    ids=["no such method", "a request of another type", "no body", "no array"],
)
def test_a_malformed_request_ends_its_connection_alone(run: Runner, tmp_path: Path, message: Any) -> None:
    async def check() -> None:
        async with both(tmp_path) as (_, client):
            await client.connect()
            hostile, fd = await connect(tmp_path / "service.sock"), memfd(b"")
            await hostile.send(message, [fd])
            os.close(fd)
            with pytest.raises(ConnectionError):
                await hostile.receive()
            hostile.close()
            assert (await client.call(ECHO, Question("others go on"))).text == "others go on"

    run(check())


@pytest.mark.parametrize(
    ("kind", "body"),
    [("reply", {"text": 1}), ("update", "one"), ("error", {"kind": "OddError"}),
     ("error", {"kind": "DocumentError", "message": "", "document": {}})],
    ids=["reply", "update", "error", "document of an error"],
)  # fmt: skip
def test_a_malformed_response_fails_the_calls_of_its_connection(
    run: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, body: Any
) -> None:
    path, fd = tmp_path / "service.sock", memfd(b"")

    async def respond(sock: socket.socket) -> None:
        stream = MessageStream(sock)
        (_, _, question), (count, _, _) = [(await stream.receive())[0] for _ in range(2)]
        assert question == {"text": "waits", "count": 0}
        await stream.send([count, kind, body], [fd])
        with pytest.raises(ConnectionError):
            await stream.receive()

    async def check() -> None:
        client, updates = ProcessClient(path, ERRORS), []
        serving = asyncio.create_task(accept_sockets(listener, respond))
        waiting = await client.start(ECHO, Question("waits"))
        malformed = await client.start(COUNT, Question(""), on_update=lambda *got: updates.append(got))
        async with asyncio.timeout(20):
            for call in (malformed, waiting):
                with pytest.raises(ProcessLostError, match=f"the {kind} of 'count' is malformed"):
                    await call.answer
        assert not updates
        await client.aclose()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    with listen(path) as listener:
        run(check())
    os.close(fd)
    [record] = caplog.records
    assert "closing the connection to another process" in record.getMessage()


def test_a_server_without_an_event_loop(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "service.sock"

    def handler(question: Question, fds: Sequence[int]) -> tuple[Reply, Sequence[int]]:
        if question.text == "die":
            raise ZeroDivisionError
        return Reply(question.text), [memfd(os.pread(fd, 100, 0).upper()) for fd in fds]

    def serve(listener: socket.socket) -> None:
        serve_blocking(listener.accept()[0], ECHO, handler)
        with pytest.raises(ZeroDivisionError):
            serve_blocking(listener.accept()[0], ECHO, handler)

    async def check() -> None:
        client, fd = ProcessClient(path), memfd(b"one")
        await client.connect()
        ahead = [await client.start(ECHO, Question(str(number)), [fd]) for number in range(3)]
        answers = [await call.answer for call in ahead]
        assert [answer.message.text for answer in answers] == ["0", "1", "2"]
        assert [take(answer.fds[0]) for answer in answers] == [b"ONE"] * 3
        await client.aclose()
        with pytest.raises(ProcessLostError):
            await client.call(ECHO, Question("die"), [fd])
        os.close(fd)
        await client.aclose()

    with listen(path) as listener:
        helper = threading.Thread(target=serve, args=(listener,))
        helper.start()
        run(check())
        await_end(helper)
