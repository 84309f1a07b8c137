"""New connections go to the worker that has the fewest, wherever they come from and whoever left."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import pytest

from meshd.testing.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def many() -> Iterator[Daemon]:
    with Daemon.start(workers=3) as daemon:
        yield daemon


def connect(daemon: Daemon) -> socket.socket:
    """A connection that a worker has taken: it answered on it."""
    host, _, port = daemon.endpoint.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return sock


def spread(daemon: Daemon) -> Counter[str]:
    """How many connections each worker has."""
    port = int(daemon.endpoint.rpartition(":")[2])
    found: Counter[str] = Counter()
    for name, pid in daemon.children().items():
        if name.startswith("worker"):
            every = psutil.Process(pid).net_connections("tcp")
            found[name] = sum(c.status == "ESTABLISHED" and c.laddr.port == port for c in every)
    return found


def difference(counts: Counter[str]) -> int:
    return max(counts.values()) - min(counts.values())


def test_connections_are_spread_evenly(many: Daemon) -> None:
    open_ones = [connect(many) for _ in range(10)]
    counts = spread(many)
    assert (len(counts), sum(counts.values())) == (3, 10)
    assert difference(counts) <= 1
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
    open_ones += [connect(many) for _ in range(3)]
    assert spread(many) == {"worker-0": 3, "worker-1": 3, "worker-2": 3}
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
