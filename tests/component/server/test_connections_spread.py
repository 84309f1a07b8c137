"""New connections go to the worker that has the fewest, wherever they come from and whoever left."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.component.process.test_daemon_life import wait_until
from tests.support.daemons import Daemon
from tests.support.priority import preferred
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def many() -> Iterator[Daemon]:
    with Daemon.start(workers=3) as daemon:
        yield daemon


def connect(daemon: Daemon) -> socket.socket:
    """A connection that a worker has taken: it answered on it."""
    host, _, port = daemon.endpoint.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return sock


def spread(daemon: Daemon, state: str = "ESTABLISHED") -> Counter[str]:
    """How many connections in this state each worker has."""
    port = int(daemon.endpoint.rpartition(":")[2])
    found: Counter[str] = Counter()
    for name, pid in daemon.children().items():
        if name.startswith("worker"):
            every = psutil.Process(pid).net_connections("tcp")
            found[name] = sum(c.status == state and c.laddr.port == port for c in every)
    return found


def test_connections_are_spread(many: Daemon) -> None:
    """Exactly evenly where no worker is late; a worker that gets no processor for 10 ms is."""
    with preferred():
        open_ones = [connect(many) for _ in range(12)]
    counts = spread(many)
    assert (len(counts), sum(counts.values())) == (3, 12)
    assert min(counts.values()) >= 2
    for sock in open_ones:
        sock.close()


def test_a_worker_that_lost_its_own_gets_the_next(many: Daemon) -> None:
    open_ones = [connect(many) for _ in range(9)]
    port = int(many.endpoint.rpartition(":")[2])
    of_one = {
        c.raddr.port
        for c in psutil.Process(many.children()["worker-1"]).net_connections("tcp")
        if c.status == "ESTABLISHED" and c.laddr.port == port
    }
    for sock in open_ones:
        if sock.getsockname()[1] in of_one:
            sock.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while sock.recv(1 << 16):
                pass
            sock.close()
    open_ones += [connect(many) for _ in of_one]
    assert spread(many)["worker-1"] >= 1
    for sock in open_ones:
        sock.close()


def test_nobody_waits_for_a_worker_that_stands_still(many: Daemon) -> None:
    """It has the fewest, and cannot take them: the others do."""
    stopped = many.signal_child("worker-1", signal.SIGSTOP)
    open_ones = [connect(many) for _ in range(6)]
    os.kill(stopped, signal.SIGCONT)
    open_ones += [connect(many) for _ in range(3)]
    assert sum(spread(many).values()) == 9
    for sock in open_ones:
        sock.close()


def test_connections_of_clients_that_leave_at_once_end(many: Daemon) -> None:
    """A client may hang up before the server has put its own request aside."""
    many.client().create_bucket(Bucket="brief")
    wire = Wire(many.endpoint, many.access_key, many.secret_key)
    for number in range(150):
        sock = wire.connect()
        sock.sendall(wire.put(f"/brief/{number}", b"body"))
        assert read_answer(sock).status == 200
        sock.close()
    wait_until(lambda: sum(spread(many, "CLOSE_WAIT").values()) == 0, timeout=30)  # idle ones end later
