"""A node that passes requests on, among real processes: its memory, and other nodes that hang or die."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import meshsdk
from meshd.util.clock import SystemClock
from tests.support.daemon_cluster import DaemonCluster
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CLIENTS = 24
SENT = 8 * MIB
DECLARED = 256 * MIB
OBJECT = 48 * MIB
ALLOWED = 96 * MIB  # whole bodies in memory would be 24 × 8 and 24 × 48 MiB
HIGHER_UP = 90_000  # too little to be spliced


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, args=("--drain-timeout", "1")) as mesh:
        client = mesh["n1"].client()
        client.create_bucket(Bucket="bench")
        client.close()
        yield mesh


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _elsewhere(mesh: DaemonCluster, prefix: str) -> str:
    """A key that n2 decides and n3 has, too."""
    number = 0
    while True:
        key = mesh.key_with_primary("n2", "bench", f"{prefix}-{number}")
        if [node.node_id for node in mesh.route_for("bench", key).read_set] == ["n2", "n3"]:
            return key
        number += 1


def _wire(mesh: DaemonCluster) -> Wire:
    return Wire(mesh["n1"].endpoint, mesh.access_key, mesh.secret_key)


@pytest.mark.parametrize("size", [OBJECT, HIGHER_UP])
def test_slow_readers_and_writers_cost_little_memory(mesh: DaemonCluster, size: int) -> None:
    wire, key, client = _wire(mesh), _elsewhere(mesh, f"big-{size}"), mesh["n1"].client()
    client.put_object(Bucket="bench", Key=key, Body=os.urandom(size))
    worker = psutil.Process(mesh["n1"].children()["worker-0"])
    before = worker.memory_info().rss
    readers = [wire.connect(receive_buffer=8192) for _ in range(CLIENTS)]
    writers = [wire.connect() for _ in range(CLIENTS)]
    peak, piece = before, os.urandom(MIB)
    for sock in readers:
        sock.sendall(wire.head("GET", f"/bench/{key}"))
        assert sock.recv(9) == b"HTTP/1.1 "
    for number, sock in enumerate(writers):
        target = f"/bench/{_elsewhere(mesh, f'w{number}')}"
        sock.sendall(wire.head("PUT", target, headers={"content-length": str(DECLARED)}))
    for _ in range(SENT // MIB):
        for sock in writers:
            sock.sendall(piece)
        peak = max(peak, worker.memory_info().rss)
    assert peak - before < ALLOWED
    wire.close()
    assert client.get_object(Bucket="bench", Key=key)["ContentLength"] == size
    client.close()


def test_a_node_that_hangs_is_not_waited_for(mesh: DaemonCluster) -> None:
    key, client, body = _elsewhere(mesh, "hangs"), mesh["n1"].client(), os.urandom(10_000)
    client.put_object(Bucket="bench", Key=key, Body=body)
    assert client.get_object(Bucket="bench", Key=key)["Body"].read() == body
    mesh.pause("n2")
    try:
        for _ in range(5):
            assert client.get_object(Bucket="bench", Key=key)["Body"].read() == body
    finally:
        mesh.resume("n2")
    mesh.await_state("n2", "up")
    # what it answers now, to requests that nobody waits for any more, reaches no client
    for _ in range(5):
        assert client.get_object(Bucket="bench", Key=key)["Body"].read() == body
    client.close()


def test_reads_do_not_wait_for_the_lease_of_a_silent_node() -> None:
    """As one whose cable is out: it is `up` for the whole test, and every read is answered by the other."""
    body, clock = os.urandom(10_000), SystemClock()
    with DaemonCluster.start(3, lease=120.0) as mesh:
        client = mesh["n1"].client()
        client.create_bucket(Bucket="bench")
        keys = [_elsewhere(mesh, f"silent-{number}") for number in range(20)]
        for key in keys:
            client.put_object(Bucket="bench", Key=key, Body=body)
        endpoint = f"{mesh['n1'].endpoint},{mesh['n2'].endpoint},{mesh['n3'].endpoint}"
        with meshsdk.connect(endpoint, access_key=mesh.access_key, secret_key=mesh.secret_key) as sdk:
            assert all(sdk.get("bench", key) == body for key in keys)
            assert all(_read(client, key) == body for key in keys)
            mesh.pause("n2")
            try:
                began = clock.monotonic()
                assert all(_read(client, key) == body for key in keys)
                assert all(sdk.get("bench", key) == body for key in keys)
                took = clock.monotonic() - began
                assert [node.state for node in mesh.map_of("n1").nodes] == ["up"] * 3
                assert took < 60.0, "in sum; 3.5 s were seen on two idle cores"
            finally:
                mesh.resume("n2")
        client.close()


def test_a_node_that_started_after_a_bucket_was_deleted_is_not_waited_for(mesh: DaemonCluster) -> None:
    """It has never heard of that change, yet knows all that the others know."""
    key, client, clock = _elsewhere(mesh, "deleted"), mesh["n1"].client(), SystemClock()
    client.put_object(Bucket="bench", Key=key, Body=b"1")
    client.create_bucket(Bucket="gone")
    client.delete_bucket(Bucket="gone")
    mesh.stop("n2")
    mesh.up("n2")
    mesh.await_healthy()
    took = []
    for _ in range(10):
        began = clock.monotonic()
        assert _read(client, key) == b"1"
        took.append(clock.monotonic() - began)
    assert min(took) < 0.9, "it waited a second for its table of buckets, each time"
    client.close()


def _read(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket="bench", Key=key)["Body"].read())


def test_a_node_that_dies_in_the_middle_of_an_answer(mesh: DaemonCluster) -> None:
    wire, key, client, body = _wire(mesh), _elsewhere(mesh, "dies"), mesh["n1"].client(), os.urandom(OBJECT)
    client.put_object(Bucket="bench", Key=key, Body=body)
    sock = wire.connect(receive_buffer=8192)
    sock.sendall(wire.head("GET", f"/bench/{key}"))
    got = sock.recv(9)
    assert got == b"HTTP/1.1 "
    mesh.kill("n2")
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(MIB):
            got += data
    assert len(got) < OBJECT  # a client can tell
    other = wire.connect()
    other.sendall(wire.head("GET", f"/bench/{key}"))
    assert read_answer(other).body == body
    mesh.up("n2")
    mesh.await_state("n2", "up")
    wire.close()
    client.close()
