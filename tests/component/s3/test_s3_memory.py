"""A worker's memory does not grow with the objects that pass through it, however slow their clients are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CLIENTS = 24
SENT = 8 * MIB
DECLARED = 256 * MIB
OBJECT = 48 * MIB
ALLOWED = 110 * MIB  # whole bodies in memory would be 24 × 8 and 24 × 48 MiB


@pytest.fixture(scope="module")
def lone() -> Iterator[Daemon]:
    with Daemon.start() as daemon:
        yield daemon


def test_slow_readers_and_writers(lone: Daemon) -> None:
    wire = Wire(lone.endpoint, lone.access_key, lone.secret_key)
    client = lone.client()
    client.create_bucket(Bucket="memory")
    client.put_object(Bucket="memory", Key="big", Body=os.urandom(OBJECT))
    worker = psutil.Process(lone.children()["worker-0"])
    before = worker.memory_info().rss
    readers = [wire.connect(receive_buffer=8192) for _ in range(CLIENTS)]
    writers = [wire.connect() for _ in range(CLIENTS)]
    peak, piece = before, os.urandom(MIB)
    for sock in readers:
        sock.sendall(wire.head("GET", "/memory/big"))
        assert sock.recv(9) == b"HTTP/1.1 "
    for number, sock in enumerate(writers):
        sock.sendall(wire.head("PUT", f"/memory/w{number}", headers={"content-length": str(DECLARED)}))
    for _ in range(SENT // MIB):
        for sock in writers:
            sock.sendall(piece)
        peak = max(peak, worker.memory_info().rss)
    assert peak - before < ALLOWED
    wire.close()
    client.put_object(Bucket="memory", Key="after", Body=b"fine")
    assert [o["Key"] for o in client.list_objects_v2(Bucket="memory")["Contents"]] == ["after", "big"]


def test_an_idle_node_is_small() -> None:
    """All its processes together; what they share counts once (proportional set size)."""
    with Daemon.start(workers=2) as daemon:
        pids = [daemon.pid, *daemon.children().values()]
        assert len(pids) >= 5  # supervisor, workers, coordinator, transforms
        assert sum(psutil.Process(pid).memory_full_info().pss for pid in pids) < 250 * MIB


def test_a_large_xml_body_is_not_taken_in(lone: Daemon) -> None:
    wire = Wire(lone.endpoint, lone.access_key, lone.secret_key)
    client = lone.client()
    client.create_bucket(Bucket="xml-bodies")
    head = wire.head("POST", "/xml-bodies?delete=", headers={"transfer-encoding": "chunked"})
    chunk = b"100000\r\n" + b"<" * MIB + b"\r\n"
    answer = wire.exchange(head + chunk * 3, method="POST")
    assert (answer.status, answer.code) == (400, "MaxMessageLengthExceeded")
    wire.close()
