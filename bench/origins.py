"""The rows of buckets with an origin: cold reads through a node beside reads of the origin itself.

Law: both sides ask the same proxy before the same SeaweedFS, 50 ms away with 100 MB/s a connection, by the
same client; every key is read once, so every read through the node is cold. What came is compared with what
was put. Memory that reads need is the machine's before the clock starts. Invariant: they
take turns (`bench.interleave`).
"""

from __future__ import annotations

import hashlib
import http.client
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bench import fill_and_check
from bench.interleave import order
from bench.presigned_requests import Request, headers
from bench.processes import cpu_seconds, free_ports
from bench.results import Figure
from bench.rows import KIB, MIB
from bench.servers import new_account, start_meshd
from meshsdk.admin import cluster_admin
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.processes import Children
    from bench.rows import Scale
    from bench.servers import Server

COLD, EIGHT, WHOLE = "cold", "cold-eight", "cold-1g"
NAMES: Final = (COLD, EIGHT, WHOLE)
ORIGIN, MESH = "the origin", "through meshd"
DELAY, RATE = 0.05, 100e6
LEAST, FIRST_MS, TIMES = 0.9, 5.0, 4.0
_SMALL, _LARGE, _READERS = 100 * KIB, 16 * MIB, 8
_SMALLS: Final = 10  # small keys a round
_SPARE: Final = 64 * MIB  # what the processes take beside the bytes
_BUCKET: Final = "origin"


def title(name: str, scale: Scale) -> str:
    return {
        COLD: f"Cold GET of {_LARGE // MIB} MiB, first byte of {_SMALL // KIB} KiB",
        EIGHT: f"{_READERS} readers of one cold object of {_LARGE // MIB} MiB",
        WHOLE: f"Cold GET of {scale.cold_bytes // MIB} MiB",
    }[name]


@dataclass(frozen=True, slots=True)
class Site:
    """The proxied origin and the node before it, as contenders; `log`: of the proxy's requests."""

    direct: Server
    slow: Server
    mesh: Server
    log: Path

    def requests(self, key: str) -> int:
        """GETs of a key that came to the origin."""
        lines = self.log.read_text(errors="replace").splitlines()
        return sum(line.startswith("GET ") and f"/{key}" in line for line in lines)


def build(children: Children, weed: Server, scratch: Path) -> Site:
    """A proxy before `weed`, a node of its own, a bucket of the node that stands for the bench's bucket."""
    assert weed.account is not None
    (scratch / "keys").mkdir(parents=True, exist_ok=True)
    account = weed.account
    secret = f"aws_access_key_id={account.access_key}\naws_secret_access_key={account.secret_key}\n"
    (scratch / "keys" / "weed").write_text(secret)
    [port] = free_ports(1)
    log = scratch / "proxy.log"
    argv = [
        sys.executable,
        "-m",
        "bench.delay_proxy",
        str(port),
        str(weed.port),
        str(DELAY),
        str(RATE),
        str(log),
    ]
    proxy = children.start("slowing", argv)
    proxy.wait_for_port(port)
    flags = ("--workers", "2", "--origin-credentials", str(scratch / "keys"))
    mesh = start_meshd("meshd-cache", *flags)(children, scratch / "node", new_account())
    fill_and_check.make_bucket(weed)
    assert mesh.account is not None
    access, secret = mesh.account.access_key, mesh.account.secret_key
    with connect(mesh.endpoint, access_key=access, secret_key=secret, region="us-east-1") as client:
        document = {
            "url": f"s3://{fill_and_check.BUCKET}",
            "endpoint": f"http://127.0.0.1:{port}",
            "credentials": "weed",
        }
        cluster_admin.create_bucket(client.transport, fill_and_check.BUCKET, document)
    return Site(weed, replace(weed, name=ORIGIN, port=port), mesh, log)


def measure(name: str, site: Site, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """The figures of a row."""
    for number in range(scale.rounds):
        say(f"{name}, round {number + 1} of {scale.rounds}")
        if name == COLD:
            yield from _cold(site, number)
        elif name == EIGHT:
            yield _eight(site, number)
        else:
            yield from _whole(site, number, scale.cold_bytes)


def _cold(site: Site, number: int) -> Iterator[Figure]:
    smalls = [f"cold/{number}/small-{each}" for each in range(_SMALLS)]
    small, large = fill_and_check.pattern(_SMALL), fill_and_check.pattern(_LARGE)
    fill_and_check.fill(site.direct, smalls, small)
    fill_and_check.fill(site.direct, [f"cold/{number}/large"], large, 1)
    for contender, server in order(((ORIGIN, site.slow), (MESH, site.mesh)), number):
        have_memory(_LARGE)
        read(server, "cold/none", 0)  # connections are there on both sides
        firsts = sorted(read(server, key, _SMALL, small).first for key in smalls)
        spent = _spent(server)
        whole = read(server, f"cold/{number}/large", _LARGE, large)
        metrics = {"gigabytes": _LARGE / whole.seconds / 1e9, "p50_ms": 1e3 * firsts[len(firsts) // 2]}
        metrics |= _cost(server, spent, _LARGE)
        yield Figure(contender, number, metrics, whole.problem)


def _eight(site: Site, number: int) -> Figure:
    key, body = f"eight/{number}", fill_and_check.pattern(_LARGE)
    fill_and_check.fill(site.direct, [key], body, 1)
    with ThreadPoolExecutor(_READERS) as pool:
        done = list(pool.map(lambda _: read(site.mesh, key, _LARGE, body), range(_READERS)))
    chunks = -(-_LARGE // (8 * MIB))
    metrics = {
        "rate": site.requests(key) / chunks,
        "gigabytes": _READERS * _LARGE / max(each.seconds for each in done) / 1e9,
    }
    return Figure(MESH, number, metrics, next((each.problem for each in done if each.problem), ""))


def _whole(site: Site, number: int, size: int) -> Iterator[Figure]:
    key, body = f"whole/{number}", fill_and_check.pattern(size)
    fill_and_check.fill(site.direct, [key], body, 1)
    for contender, server in order(((ORIGIN, site.slow), (MESH, site.mesh)), number):
        have_memory(size)
        spent = _spent(server)
        done = read(server, key, size, body)
        metrics = {"gigabytes": size / done.seconds / 1e9} | _cost(server, spent, size)
        yield Figure(contender, number, metrics, done.problem)


def _spent(server: Server) -> float:
    """Processor seconds of the node so far; 0 for the origin, of which only the proxy is measured."""
    return cpu_seconds(server.child.process.pid) if server.name == "meshd-cache" else 0.0


def _cost(server: Server, before: float, size: int) -> dict[str, float]:
    """What the node spent on so many bytes: fetching, keeping and sending them."""
    spent = _spent(server) - before
    return {"cpu_mib": 1e3 * spent / (size / MIB)} if spent else {}


def have_memory(size: int) -> None:
    """Free memory that the kernel has at hand for `size` bytes on their way. A virtual machine gives what is
    free back to its host; having it again takes milliseconds a MiB, many times what reading takes."""
    with closing(mmap.mmap(-1, size + size // 4 + _SPARE)) as ballast:
        for at in range(0, len(ballast), mmap.PAGESIZE):
            ballast[at] = 1


@dataclass(frozen=True, slots=True)
class Read:
    """One GET: seconds to the first byte and to the last; `problem` when it was not what was put."""

    first: float
    seconds: float
    problem: str


def read(server: Server, key: str, size: int, body: bytes = b"") -> Read:
    """A GET on a connection of its own, which is there before the clock starts."""
    request, room = Request("GET", fill_and_check.path_of(key)), memoryview(bytearray(b"\1") * size)
    signed = headers(request, server.host, server.account)
    with closing(http.client.HTTPConnection(server.host, timeout=120)) as connection:
        connection.connect()
        began = time.perf_counter()
        connection.request("GET", request.target, headers=signed)
        response = connection.getresponse()
        at = response.readinto(room[:1]) if size else len(response.read())
        first = time.perf_counter() - began
        while at < size and (got := response.readinto(room[at:])):
            at += got
        seconds = time.perf_counter() - began
    if size and (response.status != 200 or hashlib.sha256(room).digest() != hashlib.sha256(body).digest()):
        return Read(first, seconds, f"{response.status}: {at} bytes, not the {size} that were put")
    return Read(first, seconds, "")
