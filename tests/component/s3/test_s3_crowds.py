"""Clients that cost more than they bring: crowds, slow heads, dribbled bodies, answers nobody reads."""

from __future__ import annotations

import os
import re
import resource
import urllib.request
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

CROWD = 10_000
KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def impatient() -> Iterator[Daemon]:
    """Waits two seconds for a head, for a body, or for an answer to be taken."""
    with Daemon.start(env={"MESHD_HEAD_TIMEOUT": "2", "MESHD_BODY_TIMEOUT": "2"}) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="crowd")
        client.put_object(Bucket="crowd", Key="k", Body=bytes(100 * KIB))
        yield daemon


@pytest.fixture
def raw(impatient: Daemon) -> Iterator[Wire]:
    wire = Wire(impatient.endpoint, impatient.access_key, impatient.secret_key)
    yield wire
    wire.close()


def turned_away(daemon: Daemon, why: str) -> float:
    with urllib.request.urlopen(f"{daemon.endpoint}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(rf'^meshd_http_turned_away_total{{why="{why}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def is_closed(sock: socket.socket) -> bool:
    """Whether the node ended the connection (waits for it)."""
    try:
        while sock.recv(MIB):
            pass
    except ConnectionResetError:
        return True
    return True


def test_a_head_that_does_not_end(impatient: Daemon, raw: Wire) -> None:
    sock = raw.connect()
    head = raw.head("GET", "/crowd/k")
    sock.sendall(head)
    assert read_answer(sock).status == 200  # it is not the connection's age that counts
    before = turned_away(impatient, "slow head")
    sock.sendall(head[: len(head) // 2])
    answer = read_answer(sock)
    assert (answer.status, answer.code) == (400, "RequestTimeout")
    assert is_closed(sock)
    assert turned_away(impatient, "slow head") == before + 1


def test_a_head_in_pieces_is_no_attack(raw: Wire) -> None:
    sock = raw.connect()
    head = raw.head("GET", "/crowd/k")
    for at in range(0, len(head), 40):
        sock.sendall(head[at : at + 40])
    assert read_answer(sock).status == 200


@pytest.mark.parametrize("length", ["100000", "1000"], ids=["large", "small"])
def test_a_dribbled_body(impatient: Daemon, raw: Wire, length: str) -> None:
    sock = raw.connect()
    sock.settimeout(0.2)
    sock.sendall(raw.head("PUT", "/crowd/slow", headers={"content-length": length}))
    said = b""
    for _ in range(100):
        with suppress(ConnectionError):  # it may have hung up meanwhile; what it said can be read
            sock.sendall(b"x")
        try:
            said += sock.recv(4096)
        except TimeoutError:
            continue
        break
    assert b"<Code>RequestTimeout</Code>" in said
    assert "Contents" not in impatient.client().list_objects_v2(Bucket="crowd", Prefix="slow")


def test_answers_nobody_reads(impatient: Daemon, raw: Wire) -> None:
    before = turned_away(impatient, "stalled")
    sock = raw.connect(receive_buffer=4096)
    sock.sendall(raw.head("GET", "/crowd/k") * 40)
    sock.settimeout(60)
    await_true(lambda: turned_away(impatient, "stalled") > before)
    assert is_closed(sock)


def test_a_full_house_makes_room() -> None:
    with Daemon.start(workers=1, args=("--max-connections", "30")) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="crowd")
        with closing(Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)) as wire:
            idlers = [wire.connect() for _ in range(60)]
            client.put_object(Bucket="crowd", Key="k", Body=b"fine")
            assert is_closed(idlers[0])
            assert turned_away(daemon, "idle") >= 30
            busy = [wire.connect() for _ in range(30)]
            for number, sock in enumerate(busy):
                headers = {"content-length": "10", "expect": "100-continue"}
                sock.sendall(wire.head("PUT", f"/crowd/{number}", headers=headers))
                assert sock.recv(1024).startswith(b"HTTP/1.1 100")  # now it is being answered
            for answer in [read_answer(wire.connect()) for _ in range(2)]:
                assert (answer.status, answer.code) == (503, "ServiceUnavailable")
            for sock in busy:
                sock.sendall(b"1234567890")
            assert {read_answer(sock).status for sock in busy} == {200}


@pytest.fixture
def open_files() -> Iterator[int]:
    """As many open files as the system allows; how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_idle_connections(open_files: int) -> None:
    if open_files < CROWD + 4_000:
        pytest.skip(f"the system allows {open_files} open files")
    with Daemon.start() as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="crowd")
        client.put_object(Bucket="crowd", Key="k", Body=b"here")
        worker = psutil.Process(daemon.children()["worker-0"])
        with closing(Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)) as wire:
            before = worker.memory_info().rss
            crowd = [wire.connect() for _ in range(CROWD)]
            assert client.get_object(Bucket="crowd", Key="k")["Body"].read() == b"here"
            assert worker.memory_info().rss - before < CROWD * 20 * KIB
            for sock in crowd[:: CROWD // 20]:
                sock.sendall(wire.head("GET", "/crowd/k"))
                assert read_answer(sock).body == b"here"
        assert client.get_object(Bucket="crowd", Key="k")["Body"].read() == b"here"


def test_many_who_do_not_read_cost_little_memory(open_files: int) -> None:
    lazy, size = 2_400, 120 * KIB
    if open_files < lazy + 1_000:
        pytest.skip(f"the system allows {open_files} open files")
    with Daemon.start() as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="crowd")
        client.put_object(Bucket="crowd", Key="k", Body=os.urandom(size))
        worker = psutil.Process(daemon.children()["worker-0"])
        with closing(Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)) as wire:
            before = worker.memory_info().rss
            sockets = [wire.connect(receive_buffer=4096) for _ in range(lazy)]
            for sock in sockets:
                sock.sendall(wire.head("GET", "/crowd/k") * 2)
            assert client.head_object(Bucket="crowd", Key="k")["ContentLength"] == size
            assert worker.memory_info().rss - before < 150 * MIB  # a kept answer each would be 280 MiB
            sockets[0].settimeout(60)
            assert read_answer(sockets[0]).status == 200
