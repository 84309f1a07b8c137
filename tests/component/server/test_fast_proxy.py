"""Reads that a node hands over to another one in the callback that brought them: answers are those of the
node that holds the object, whatever either side does meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from meshd.rpc.http_connection import duplicate_socket
from meshd.server.connection import Connection
from meshd.server.http_server import drain_server
from tests.support.bounded_wait import await_end
from tests.support.certificates import Authority
from tests.support.mesh_nodes import ROOT, NodesBeside
from tests.support.s3_raw import Wire, read_answer, read_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshd.rpc.http_connection import HttpConnection as PeerWire

MIB = 1 << 20
LARGE = os.urandom(24 * MIB)  # more than the buffers of three sockets and a pipe


class Pair:
    """Two nodes: `asked` passes on what `owner` answers for."""

    def __init__(self, beside: NodesBeside) -> None:
        self.beside = beside
        self.asked, self.owner = beside.nodes
        self.objects = {
            beside.key_of(1, "small"): os.urandom(10_000),
            beside.key_of(1, "middle"): os.urandom(MIB),
            beside.key_of(1, "large"): LARGE,
            beside.key_of(1, "empty"): b"",
        }
        self.small, self.middle, self.large, self.empty = self.objects
        self.own = beside.key_of(0, "own")
        client = self.owner.client()
        for key, body in (self.objects | {self.own: b"own"}).items():
            client.put_object(Bucket="bench", Key=key, Body=body, Metadata={"a": "b"})
        client.close()
        self.wire = Wire(self.asked.member.endpoint, *ROOT)
        self.direct = Wire(self.owner.member.endpoint, *ROOT)
        self.answer(self.small)  # there is a connection between the two now

    def get(self, key: str, **headers: str) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.wire.head("GET", f"/bench/{key}", headers=named)

    def settled(self, receive_buffer: int | None = None) -> socket.socket:
        """A connection that has had an answer: the first request of one takes the ordinary way at times."""
        sock = self.wire.connect(receive_buffer)
        self.settle(sock, self.wire)
        return sock

    def settle(self, sock: socket.socket, wire: Wire) -> None:
        sock.sendall(wire.head("GET", f"/bench/{self.own}"))
        assert read_answer(sock).body == b"own"
        self.until(lambda: all(c.is_idle for c in self._clients()) or None)

    def _clients(self) -> list[Connection]:
        return [c for c in self.asked.server.connections if isinstance(c, Connection)]

    def answer(self, key: str) -> bytes:
        answer = self.wire.exchange(self.get(key), method="GET")
        assert answer.status == 200
        return answer.body

    @property
    def passed(self) -> int:
        """How many were handed over."""
        hot = self.asked.server.hot
        assert hot is not None
        return hot.passed_on

    def under_way(self) -> list[Connection]:
        """Connections of clients that wait for the owner."""
        return [connection for connection in self._clients() if connection._passed is not None]

    def await_under_way(self, number: int) -> list[Connection]:
        found: list[Connection] = self.until(
            lambda: ones if len(ones := self.under_way()) == number else None
        )
        return found

    def until(self, found: Callable[[], Any]) -> Any:
        """What `found` gives on the nodes' loop, once it is something."""
        pause = threading.Event()
        for _ in range(6000):
            value = self.beside.do(found)
            if value is not None:
                return value
            pause.wait(0.01)
        raise AssertionError("it did not happen")

    def cut(self) -> None:
        """The owner ends the connections of its peers."""

        def work() -> None:
            for connection in self.owner.server.connections:
                if connection.transport is not None:
                    with duplicate_socket(connection.transport) as sock, contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

        self.beside.do(work)


@pytest.fixture(scope="module")
def _pair() -> Iterator[Pair]:
    with NodesBeside(2) as beside:
        yield Pair(beside)


@pytest.fixture
def pair(_pair: Pair) -> Iterator[Pair]:
    _pair.answer(_pair.small)
    yield _pair
    _pair.wire.close()
    _pair.direct.close()
    _pair.await_under_way(0)


_OURS = {"date", "x-amz-request-id"}
_ASKED: list[tuple[str, dict[str, str], bool]] = [
    ("GET", {}, True),
    ("HEAD", {}, True),
    ("GET", {"range": "bytes=3-700"}, True),
    ("GET", {"range": "bytes=-5"}, True),
    ("HEAD", {"range": "bytes=0-0"}, True),
    ("GET", {"range": "bytes=99999999-"}, True),
    ("GET", {"if-none-match": "*"}, True),
    ("GET", {"if-match": '"x"'}, True),
    ("HEAD", {"if-modified-since": "Sat, 01 Jan 2050 00:00:00 GMT"}, True),
    ("GET", {"x-amz-checksum-mode": "ENABLED"}, True),
    ("GET", {"connection": "close"}, False),
    ("GET", {"origin": "http://x"}, False),
    ("GET", {"x-amz-expected-bucket-owner": "nobody"}, False),
]


@pytest.mark.parametrize(("method", "headers", "hot"), _ASKED)
def test_answers_are_those_of_the_node_that_holds_it(
    pair: Pair, method: str, headers: dict[str, str], hot: bool
) -> None:
    sock = pair.settled()
    before, keys = pair.passed, [*pair.objects, pair.beside.key_of(1, "missing")]
    for key in keys:
        sock.sendall(pair.wire.head(method, f"/bench/{key}", headers=headers))
        passed = read_answer(sock, method)
        if headers.get("connection") == "close":
            sock = pair.settled()
        there = pair.direct.exchange(
            pair.direct.head(method, f"/bench/{key}", headers=headers), method=method
        )
        assert passed.status == there.status
        if there.status < 400:
            assert passed.body == there.body
        assert set(passed.headers) == set(there.headers)
        for name in set(there.headers) - _OURS - {"content-length" if there.status >= 400 else ""}:
            assert passed.headers[name] == there.headers[name]
    assert pair.passed - before == (len(keys) if hot else 0)


def test_refusals_come_through_and_the_connection_stays(pair: Pair) -> None:
    sock = pair.settled()
    stranger = Wire(pair.wire.endpoint, ROOT[0], "another secret")
    for _ in range(2):
        sock.sendall(stranger.head("GET", f"/bench/{pair.small}"))
        assert read_answer(sock).code == "SignatureDoesNotMatch"
        sock.sendall(pair.get(pair.small))
        assert read_answer(sock).body == pair.objects[pair.small]


def test_pipelined_requests_are_answered_in_order(pair: Pair) -> None:
    keys = [pair.large, pair.small, pair.own, pair.middle, pair.empty, pair.large, pair.small]
    sock = pair.settled()
    sock.sendall(pair.get(keys[0]))
    pair.await_under_way(1)
    for key in keys[1:]:
        sock.sendall(pair.get(key))
    sock.sendall(pair.wire.put(f"/bench/{pair.own}", b"own"))
    *answers, put = read_answers(sock, len(keys) + 1)
    assert [answer.body for answer in answers] == [(pair.objects | {pair.own: b"own"})[key] for key in keys]
    assert put.status == 200


def test_a_client_that_sends_without_reading_is_made_to_wait(pair: Pair) -> None:
    one, number = pair.get(pair.small), 2000
    sock = pair.settled(8192)
    sock.sendall(pair.get(pair.large))
    connection = pair.await_under_way(1)[0]
    sender = threading.Thread(target=sock.sendall, args=(one * number,))
    sender.start()
    held = pair.until(lambda: size if (size := len(connection._passed.held)) > 64 << 10 else None)  # type: ignore[union-attr]
    assert held < 400 << 10
    answers = read_answers(sock, number + 1)
    await_end(sender)
    assert answers[0].body == LARGE
    assert all(answer.body == pair.objects[pair.small] for answer in answers[1:])


def test_half_a_request_behind_one_that_is_passed_on(pair: Pair) -> None:
    sock, then = pair.settled(), pair.get(pair.small)
    sock.sendall(pair.get(pair.large))
    connection = pair.await_under_way(1)[0]
    sock.sendall(then[:30])
    pair.until(lambda: (connection._passed is not None and connection._passed.held) or None)
    assert not connection.head_since
    assert read_answer(sock).body == LARGE
    assert pair.until(lambda: connection.head_since or None)  # from now on its time runs
    sock.sendall(then[30:])
    assert read_answer(sock).body == pair.objects[pair.small]
    assert not connection.head_since


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_client_that_ends_its_side_gets_its_answers(pair: Pair, behind: int) -> None:
    sock = pair.settled()
    sock.sendall(pair.get(pair.large))
    pair.await_under_way(1)
    sock.sendall(pair.get(pair.small) * behind)
    sock.shutdown(socket.SHUT_WR)
    with sock.makefile("rb") as stream:
        everything = stream.read()
    assert LARGE in everything
    assert everything.count(b"HTTP/1.1 200 OK") == 1 + behind
    assert everything.count(pair.objects[pair.small]) == behind


def test_a_client_that_goes_away(pair: Pair) -> None:
    for _ in range(3):
        pair.answer(pair.small)  # the connection between the nodes ends with the client's
        sock = pair.settled(8192)
        sock.sendall(pair.get(pair.large))
        connection = pair.await_under_way(1)[0]
        wire: PeerWire = connection._passed.relay._wire  # type: ignore[union-attr]
        sock.close()
        pair.until(partial(_is_closed, wire))
    assert pair.answer(pair.large) == LARGE


def _is_closed(wire: PeerWire) -> bool | None:
    return wire.closed or None


def test_the_other_node_has_closed_the_connection(pair: Pair) -> None:
    for _ in range(5):
        pair.cut()
        assert pair.answer(pair.small) == pair.objects[pair.small]


def test_the_other_node_goes_away_in_the_middle(pair: Pair) -> None:
    sock = pair.settled(8192)
    sock.sendall(pair.get(pair.large))
    pair.await_under_way(1)
    assert sock.recv(12) == b"HTTP/1.1 200"
    pair.cut()
    got = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 20):
            got.append(data)
    assert sum(map(len, got)) < len(LARGE)
    assert b"HTTP/1.1" not in b"".join(got)


def test_keep_alive_does_not_end_an_answer(pair: Pair) -> None:
    sock = pair.settled(8192)
    sock.sendall(pair.get(pair.large))
    connection = pair.await_under_way(1)[0]

    def due() -> None:
        connection._idle_timer._due = 0
        connection._idle_timer._check()

    pair.beside.do(due)
    assert read_answer(sock).body == LARGE
    sock.sendall(pair.get(pair.small))
    assert read_answer(sock).body == pair.objects[pair.small]


def test_clients_over_tls(pair: Pair, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair_of_files = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair_of_files.cert, pair_of_files.key)

    async def listen() -> int:
        loop = pair.asked.loop
        listener = await loop.create_server(pair.asked.server, "127.0.0.1", 0, ssl=context)
        listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    listeners: list[Any] = []
    port = pair.beside.run(listen())
    wire = Wire(f"https://127.0.0.1:{port}", *ROOT, ca_cert=str(authority.cert))
    try:
        sock = wire.connect()
        pair.settle(sock, wire)
        before = pair.passed
        for key in (pair.small, pair.middle, pair.large):
            sock.sendall(wire.head("GET", f"/bench/{key}"))
            assert read_answer(sock).body == pair.objects[key]
        assert pair.passed == before + 3
        sock.sendall(wire.head("GET", f"/bench/{pair.large}"))
        pair.await_under_way(1)
        sock.close()  # there is no half of a connection here
    finally:
        wire.close()
        pair.beside.do(listeners[0].close)


@pytest.mark.parametrize("behind", [0, 2, 40])
def test_a_server_that_ends_finishes_its_answers(behind: int) -> None:
    with NodesBeside(2) as beside:
        pair = Pair(beside)
        sock, free = pair.settled(8192), pair.settled()
        sock.sendall(pair.get(pair.large))
        connection = pair.await_under_way(1)[0]
        more = pair.get(pair.small) * behind
        sock.sendall(more)
        pair.until(lambda: True if len(connection._passed.held) == len(more) else None)  # type: ignore[union-attr]
        ending = threading.Thread(
            target=beside.run, args=(drain_server(pair.asked.server, pair.asked.node.clock, 60),)
        )
        ending.start()
        assert free.recv(1) == b""  # idle ones go at once
        with sock.makefile("rb") as stream:
            everything = stream.read()
        await_end(ending)
        assert LARGE in everything
        assert everything.count(pair.objects[pair.small]) == behind
        pair.wire.close()
