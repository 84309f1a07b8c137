"""The HTTP reader against what servers really send, and the pool's manners."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.client import endpoint_socket, retry
from meshsdk.client.arena import Waker
from meshsdk.client.connection_pool import Pool
from meshsdk.client.http_connection import Connection
from meshsdk.client.request import Request
from meshsdk.client.s3_client import Client
from meshsdk.client.settings import load_settings, parse_endpoint
from meshsdk.client.transport import InFlightRequests, Transport
from meshsdk.errors import AccessError, ConnectError, DeadlineError, NotFoundError, ServerError
from meshsdk.transfers import stream
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meshsdk.client.settings import Endpoint


class Canned:
    """Answers each request on any connection with the next of `answers`; None hangs up without a word."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.accepted = 0
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: Endpoint = parse_endpoint(f"http://127.0.0.1:{self._listener.getsockname()[1]}")
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            while request := connection.recv(1 << 20):
                self.requests.append(request)
                answer = self.answers.pop(0)
                if answer is None:
                    return
                connection.sendall(answer)
                if b"connection: close" in answer.lower() or answer.startswith(b"HTTP/1.0"):
                    return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            await_end(thread)


@pytest.fixture
def canned() -> Iterator[Canned]:
    server = Canned()
    yield server
    server.close()


@pytest.fixture
def transport(canned: Canned) -> Iterator[Transport]:
    settings = load_settings(
        endpoint=str(canned.endpoint), access_key="k", secret_key="s", env={}, deadline=5.0, timeout=5.0
    )
    transport = Transport(settings, sleep=lambda _: None)
    yield transport
    transport.close()


GET = Request("GET", "/b/k")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
        b"HTTP/1.1 200 OK\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n6;x=y\r\nhello \r\n5\r\nworld\r\n0\r\nA: 1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello world",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 9000 + b"\r\ncontent-length: 11\r\n\r\nhello world",
    ],
)
def test_bodies_in_every_framing(canned: Canned, transport: Transport, answer: bytes) -> None:
    canned.answers.append(answer)
    assert transport.text(GET) == b"hello world"


@pytest.mark.parametrize(
    "garbage",
    [
        "HTTP/1.1 ²²² OK\r\ncontent-length: 0\r\n\r\n".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello",
        b'HTTP/1.1 503 Busy\r\ncontent-length: 100010\r\n\r\n{"error": ' + b"[" * 100_000,
    ],
)
def test_numbers_that_are_none_are_one_failed_attempt(
    canned: Canned, transport: Transport, garbage: bytes
) -> None:
    canned.answers += [garbage, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
    assert transport.text(GET) == b"ok"


def test_a_map_version_of_thousands_of_digits_is_none(canned: Canned, transport: Transport) -> None:
    head = b"HTTP/1.1 200 OK\r\nx-mesh-map: " + b"9" * 5000
    canned.answers.append(head + b"\r\ncontent-length: 2\r\n\r\nok")
    assert transport.text(GET) == b"ok"


class PacedSocket:
    """Receives one piece after another, each `pause` seconds after the last by a clock of its own: what comes
    too slowly does not depend on the machine."""

    def __init__(self, pieces: Iterable[bytes], pause: float) -> None:
        self._pieces, self._pause, self._now = list(pieces), pause, 0.0

    def connection(self, monkeypatch: pytest.MonkeyPatch, timeout: float) -> Connection:
        module = "meshsdk.client.http_connection"
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: self._now))
        monkeypatch.setattr(f"{module}.open_socket", lambda *_: self)
        return Connection(parse_endpoint("http://127.0.0.1:1"), timeout, 5.0)

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        received, rest = piece[: len(view)], piece[len(view) :]
        view[: len(received)] = received
        if rest:
            self._pieces.insert(0, rest)
        else:
            self._now += self._pause
        return len(received)

    def close(self) -> None:
        """Nothing is open."""


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("at_once", "then", "told"),
    [
        (
            b"HTTP/1.1 200 OK\r\n",
            b"x: " + b"y" * 400 + b"\r\ncontent-length: 0\r\n\r\n",
            "head came too slowly",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n", b"y" * 400, "less than 1024 bytes per second"),
        (b"HTTP/1.1 100 Go\r\n\r\n", b"HTTP/1.1 100 Go\r\n\r\n" * 20, "head came too slowly"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"y" * 100, "less than 1024 bytes per second"),
        (_CHUNKED, b"1\r\ny\r\n" * 30, "less than 1024 bytes per second"),
        (_CHUNKED, b"1;" + b"x" * 100, "chunked body came too slowly"),
    ],
)
def test_a_node_that_sends_a_byte_now_and_then_is_given_up(
    monkeypatch: pytest.MonkeyPatch, at_once: bytes, then: bytes, told: str
) -> None:
    """It is never silent for as long as the timeout."""
    pieces = [at_once, *(bytes([byte]) for byte in then)]
    connection = PacedSocket(pieces, 0.05).connection(monkeypatch, timeout=0.5)
    with closing(connection), pytest.raises(ConnectError, match=told):
        connection.receive().read()


def test_a_kernel_that_waits_for_all_of_a_slow_body_returns_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = parse_endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def trickle() -> None:
            taken, _ = listener.accept()
            with taken, contextlib.suppress(OSError):
                taken.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n")
                for _ in range(4000):
                    taken.sendall(b"y")
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        with (
            closing(Connection(endpoint, 2.0, 5.0)) as connection,
            pytest.raises(ConnectError, match="less than 1024 bytes per second"),
        ):
            connection.receive().read()
        await_end(thread)


def test_blank_chunks_of_a_store_that_works_on_a_request_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Amazon S3 sends them while it completes a large upload."""
    pieces = [_CHUNKED, *[b"1\r\n \r\n"] * 8, b"4\r\n<a/>\r\n0\r\n\r\n"]
    with closing(PacedSocket(pieces, 0.1).connection(monkeypatch, timeout=0.5)) as connection:
        assert connection.receive().read() == b" " * 8 + b"<a/>"


def test_a_large_body_goes_straight_into_the_buffer(canned: Canned, transport: Transport) -> None:
    body = os.urandom(3 << 20)
    canned.answers.append(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    target = bytearray(len(body))
    transport.call(GET, lambda response: response.readinto(memoryview(target)))
    assert target == body


@pytest.mark.parametrize("size", [1, (64 << 10) - 1, 64 << 10, (1 << 20) + 7])
def test_a_body_that_breaks_off_is_asked_for_again(canned: Canned, transport: Transport, size: int) -> None:
    body = os.urandom(size)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % size
    whole, half = head + b"\r\n" + body, head + b"Connection: close\r\n\r\n" + body[: size // 2]
    canned.answers += [whole, half, whole, whole]
    for _ in range(3):
        found = transport.text(GET)
        assert type(found) is bytes
        assert found == body
    assert (canned.answers, canned.accepted) == ([], 2)


def test_a_connection_is_used_again_and_a_closing_one_is_not(canned: Canned, transport: Transport) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    canned.answers += [ok, ok, ok[:-2] + b"connection: close\r\n\r\n", ok]
    for _ in range(3):
        transport.text(GET)
    assert canned.accepted == 1
    transport.text(GET)
    assert canned.accepted == 2


def test_answers_without_a_body(canned: Canned, transport: Transport) -> None:
    canned.answers += [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ]
    assert transport.text(Request("HEAD", "/b/k")) == b""
    assert transport.text(Request("DELETE", "/b/k")) == b""
    assert canned.accepted == 1


def test_a_server_that_hangs_up_is_asked_again(canned: Canned, transport: Transport) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    canned.answers += [None, b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\no", ok]
    assert transport.text(GET) == b"ok"
    assert transport.retries == 2


def test_what_is_not_idempotent_is_asked_once(canned: Canned, transport: Transport) -> None:
    canned.answers.append(None)
    with pytest.raises(
        ConnectError, match="closed the connection without an answer; if it speaks TLS, use https"
    ):
        transport.text(Request("POST", "/b", idempotent=False))
    assert len(canned.requests) == 1


def test_an_idle_connection_the_server_closed_costs_no_retry(canned: Canned, transport: Transport) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    canned.answers += [ok, ok]
    transport.text(GET)
    idle = transport.pool._idle[0]
    idle._socket.shutdown(socket.SHUT_RDWR)
    assert not idle.idle()
    transport.text(GET)
    assert transport.retries == 0
    assert canned.accepted == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
def test_nonsense_is_a_connect_error(canned: Canned, answer: bytes) -> None:
    canned.answers.append(answer)
    connection = Connection(canned.endpoint, 5.0, 5.0)
    connection.send([b"GET / HTTP/1.1\r\n\r\n"])
    with pytest.raises(ConnectError):
        connection.receive().read()
    connection.close()


def test_silence_ends_at_the_timeout(canned: Canned) -> None:
    connection = Connection(canned.endpoint, 0.05, 5.0)
    with pytest.raises(ConnectError, match="timeout"):
        connection.receive()


def test_nobody_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectError, match="Check that the server is up"):
        Connection(parse_endpoint(f"http://127.0.0.1:{port}"), 1.0, 1.0)


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """An address that drops packets, as those of pods that are gone do: its queue of connections is full."""
    with contextlib.ExitStack() as ends, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = ends.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield parse_endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_silent_address_is_left_soon_where_others_can_answer(
    canned: Canned, silent: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[Endpoint, float]] = []

    def open_socket(endpoint: Endpoint, timeout: float, connect_timeout: float) -> socket.socket:
        waited.append((endpoint, connect_timeout))
        return endpoint_socket.open_socket(endpoint, timeout, connect_timeout)

    monkeypatch.setattr("meshsdk.client.http_connection.open_socket", open_socket)
    settings = load_settings(endpoint=str(silent), access_key="A", secret_key="S")
    silent = settings.endpoint
    transport = Transport(replace(settings, others=(canned.endpoint,), connect_timeout=2.0))
    canned.answers += [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"] * 4
    assert transport.text(Request("GET", "/b/k")) == b"hello"
    assert waited[0] == (silent, 1.5)
    assert {endpoint for endpoint, _ in waited[1:]} == {canned.endpoint}
    assert transport.connect_timeout(silent) == 2.0, "it may only be slow, and is asked last"
    alone = Transport(replace(settings, connect_timeout=2.0))
    assert alone.connect_timeout(silent) == 2.0
    transport.close()


def test_a_node_that_takes_a_request_and_says_nothing_is_asked_whether_it_lives(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose cable is out; where others can answer, that is soon and not after half of the deadline."""
    monkeypatch.setattr("meshsdk.client.transport.QUIET", 0.2)
    monkeypatch.setattr("meshsdk.client.transport.PRESENCE", 0.2)
    waited: list[tuple[Endpoint, float]] = []

    def await_answer(connection: Connection, limit: float, *more: Any) -> None:
        waited.append((connection.endpoint, limit))
        retry.await_answer(connection, limit, *more)

    monkeypatch.setattr("meshsdk.client.transport.await_answer", await_answer)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        settings = load_settings(endpoint=endpoint, access_key="A", secret_key="S")
        transport = Transport(replace(settings, others=(canned.endpoint,)))
        transport.router.directory._wanted = 0  # no map is asked for
        canned.answers += [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"] * 4
        assert transport.text(Request("GET", "/b/k")) == b"hello"
        assert (settings.endpoint, 0.2) in waited
        assert transport.retries == 1
        transport.close()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b'{"error": {"code": "NoSuchPlan", "message": "no plan", "help": "Register it."}}',
         NotFoundError, "no plan .*NoSuchPlan.* Register it"),
        (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>gone</Message></Error>",
         NotFoundError, "gone .*mesh ls"),
        (b"<html>proxy says no</html>", NotFoundError, "proxy says no"),
        (b"{torn", NotFoundError, "torn"),
        (b"", NotFoundError, "404"),
    ],
)  # fmt: skip
def test_refusals(
    canned: Canned, transport: Transport, answer: bytes, kind: type[ServerError], words: str
) -> None:
    canned.answers.append(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
    with pytest.raises(kind, match=words):
        transport.text(GET)


def test_the_refusal_of_a_head_names_what_it_was_for(canned: Canned, transport: Transport) -> None:
    """It has no body with a reason."""
    canned.answers.append(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nx-amz-request-id: R7\r\n\r\n")
    with pytest.raises(AccessError, match=r"s3://bkt/a b: access denied .*s3:GetObject") as caught:
        Client(transport.settings).head("bkt", "a b")
    assert (caught.value.code, caught.value.request_id) == ("Forbidden", "R7")


def test_a_refusal_that_comes_while_the_body_is_still_sent(canned: Canned, transport: Transport) -> None:
    body = b"<Error><Code>EntityTooLarge</Code><Message>too large</Message></Error>"
    canned.answers.append(
        b"HTTP/1.1 400 Bad\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    with pytest.raises((ServerError, ConnectError)):
        transport.text(Request("PUT", "/b/k", "", {}, bytes(64 << 20), None, idempotent=False))


def test_a_broken_stream_goes_on_where_it_was(canned: Canned, transport: Transport) -> None:
    data = os.urandom(3 << 20)
    head = b'HTTP/1.1 200 OK\r\netag: "e1"\r\nconnection: close\r\ncontent-length: %d\r\n\r\n'
    canned.answers += [head % len(data) + data[: (2 << 20) + 5], head % (1 << 20) + data[2 << 20 :]]
    client = Client(transport.settings)
    assert b"".join(stream(client, "bkt", "k")) == data
    assert b"range: bytes=2097152-\r\n" in canned.requests[1]
    assert b'if-match: "e1"' in canned.requests[1]
    client.close()


def test_a_stream_that_gets_nowhere_gives_up(canned: Canned, transport: Transport) -> None:
    canned.answers.append(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\n")
    with pytest.raises(ConnectError):
        list(stream(Client(transport.settings), "bkt", "k"))


def test_a_forked_child_starts_with_an_empty_pool(canned: Canned, transport: Transport) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    canned.answers += [ok, ok, ok]
    transport.text(GET)
    in_child(lambda: transport.text(GET))
    assert canned.accepted == 2
    transport.text(GET)  # the parent's connection was not shut down by the child
    assert canned.accepted == 2
    assert transport.retries == 0


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child, and fails if it fails there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_pools_and_transports_travel_without_sockets(transport: Transport) -> None:
    again = pickle.loads(pickle.dumps(transport))
    assert again.settings == transport.settings
    pool = pickle.loads(pickle.dumps(Pool(transport.settings.endpoint, 3.0)))
    assert (pool.endpoint, pool.timeout) == (transport.settings.endpoint, 3.0)


def test_a_server_that_takes_connections_and_says_nothing_is_noticed_before_the_deadline() -> None:
    """As one that was stopped: the kernel goes on accepting for it. It would be 60 s by `timeout`."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        settings = load_settings(endpoint=endpoint, access_key="k", secret_key="s", env={}, deadline=3.0)
        with closing(Transport(settings)) as transport:
            began = time.monotonic()
            with pytest.raises(DeadlineError, match="no reply to a liveness check"):
                transport.text(GET)
            assert 3.0 <= time.monotonic() - began < 30


def test_a_loader_does_not_use_a_connection_that_its_node_closed_meanwhile(
    canned: Canned, transport: Transport
) -> None:
    """As it closes one that is idle while the job validates: this is no failure of the node."""
    canned.answers += [b"HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\nconnection: close"] * 2
    waker = Waker()
    flights = InFlightRequests[str](transport, waker, 5.0)
    for _ in range(2):  # after each response the server closes the connection
        flights.send_request("frame", GET, canned.endpoint)
        [flight] = flights.answered(10.0) or []
        response = flight.connection.receive()
        assert response.read() == b"connection: close"
        assert response.reusable
        select.select([flight.connection], [], [], 10.0)  # until it is closed
        flights.finish_request(flight, keep=True)
    assert canned.accepted == 2
    flights.close()
    waker.close()
