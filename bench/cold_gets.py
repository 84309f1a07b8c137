"""Large GETs that are not in the page cache, from a rotational disk: `python -m bench.cold_gets`.

Each contender has its objects on the same emulated drive (`bench.rotational_drive`), and they take turns, A B
B A. `--checkout` adds the daemon of another checkout. The client is one thread per connection, which receives
into a buffer and drops it. Seeks and seconds of the drive are counted by the drive.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from bench.interleave import turns
from bench.presigned_requests import Account, Request, head
from bench.processes import Children
from bench.rotational_drive import rotational_drive
from bench.servers import SERVERS, new_account
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.rotational_drive import RotationalDrive

MIB: Final = 1 << 20
BUCKET: Final = "cold"
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A server with its objects on the drive."""

    name: str
    host: str
    account: Account


@dataclass(frozen=True, slots=True)
class Way:
    """What is requested at the same time: (object, first byte) of each GET; `size` bytes, by `clients`."""

    name: str
    clients: int
    asked: tuple[tuple[int, int], ...]
    size: int


def ways(count: int, size: int, part: int) -> list[Way]:
    """Return the ways to read `count` objects of `size` bytes."""
    whole = tuple((number, 0) for number in range(count))
    ranges = tuple((0, first) for first in range(0, size, part))
    return [
        Way("one GET", 1, whole[:1], size),
        Way(f"{count} GETs at once", count, whole, size),
        Way(f"one object in ranges of {part // MIB} MiB, 8 at once", 8, ranges, part),
    ]


def main() -> None:
    """Print a line for each way and contender, medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64, help="of an object")
    parser.add_argument("--part", type=int, default=8, help="MiB of a range")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--drive", type=int, default=12, help="GiB")
    parser.add_argument("--checkout", type=Path, help="another checkout, whose daemon is measured, too")
    parser.add_argument("--seaweedfs", action="store_true")
    given = parser.parse_args()
    size = given.mib * MIB
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cold-gets-")))
        drive = stack.enter_context(rotational_drive(root / "drive", size=given.drive << 30))
        found = [_daemon(stack, "meshd", drive, root, given.workers, None)]
        if given.checkout is not None:
            found.append(_daemon(stack, "meshd, other checkout", drive, root, given.workers, given.checkout))
        if given.seaweedfs:
            account = new_account()
            children = stack.enter_context(Children(root / "logs"))
            server = SERVERS["seaweedfs"].start(children, drive.path / "weed", account)
            found.append(Contender("SeaweedFS", server.host, account))
        for contender in found:
            _fill(contender, given.objects, size)
        for way in ways(given.objects, size, given.part * MIB):
            _compare(drive, found, way, given.rounds)


def _daemon(
    stack: ExitStack, name: str, drive: RotationalDrive, root: Path, workers: int, checkout: Path | None
) -> Contender:
    folder = "ours" if checkout is None else "other"
    where = ("--disk", str(drive.path / folder), "--index-dir", str(root / folder / "index"))
    daemon = Daemon(root / folder / "data", where, {}, workers)
    daemon.checkout = checkout
    stack.enter_context(daemon)
    daemon.up()
    account = Account(daemon.access_key, daemon.secret_key)
    return Contender(name, daemon.endpoint.removeprefix("http://"), account)


def _fill(contender: Contender, count: int, size: int) -> None:
    _send(contender, Request("PUT", f"/{BUCKET}", length=0))
    block = Random(1).randbytes(MIB)
    for number in range(count):
        request = Request("PUT", f"/{BUCKET}/{number:03}", length=size, payload_hash="UNSIGNED-PAYLOAD")
        _send(contender, request, block, size // MIB)


def _compare(drive: RotationalDrive, found: Sequence[Contender], way: Way, rounds: int) -> None:
    taken: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in found}
    by_name = {each.name: each for each in found}
    for _, name in turns(way.name, by_name, rounds, lambda _: None):
        taken[name].append(_read(drive, by_name[name], way))
    for name, figures in taken.items():
        rate, seeks, busy = (statistics.median(each) for each in zip(*figures, strict=True))
        rates = ", ".join(f"{each[0]:.0f}" for each in figures)
        print(
            f"{way.name:44} {name:24} {rate:6.1f} MB/s ({rates}) {seeks:6.3f} seeks/MiB "
            f"{busy:5.2f} s of disk ÷ of media",
            flush=True,
        )


def _read(drive: RotationalDrive, contender: Contender, way: Way) -> tuple[float, float, float]:
    """Read once, cold: MB/s, seeks per MiB, and seconds of the disk by seconds of media."""
    drive.drop_caches()
    drive.delay(True)
    before, began = drive.stats(), time.perf_counter()
    try:
        with ThreadPoolExecutor(way.clients) as pool:
            done = list(pool.map(lambda asked: _get(contender, asked[0], asked[1], way.size), way.asked))
        seconds = time.perf_counter() - began
        spent = drive.stats() - before
    finally:
        drive.delay(False)
    assert set(done) == {way.size}, done
    total = sum(done)
    return total / seconds / 1e6, spent.seeks * MIB / total, spent.disk_s / spent.media_s


def _get(contender: Contender, number: int, first: int, size: int) -> int:
    lines = head(Request("GET", f"/{BUCKET}/{number:03}"), contender.host, contender.account)
    ranged = f"Range: bytes={first}-{first + size - 1}\r\n\r\n".encode()
    with _connected(contender) as connection:
        connection.sendall(lines[:-2] + ranged)
        return _drop_body(connection)


def _send(contender: Contender, request: Request, block: bytes = b"", times: int = 0) -> None:
    with _connected(contender) as connection:
        connection.sendall(head(request, contender.host, contender.account))
        for _ in range(times):
            connection.sendall(block)
        _drop_body(connection)


def _connected(contender: Contender) -> socket.socket:
    host, _, port = contender.host.partition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def _drop_body(connection: socket.socket) -> int:
    """Receive an answer; return the bytes of its body."""
    buffer = bytearray(MIB)
    received = connection.recv(65536)
    while b"\r\n\r\n" not in received:
        more = connection.recv(65536)
        if not more:
            raise ConnectionError(received[:300].decode("latin-1"))
        received += more
    lines, _, body = received.partition(b"\r\n\r\n")
    names = [line.partition(b":") for line in lines.lower().split(b"\r\n")[1:]]
    lengths = [int(value) for name, _, value in names if name == b"content-length"]
    if not lines.startswith(b"HTTP/1.1 2"):
        raise ConnectionError(received[:300].decode("latin-1"))
    left = (lengths[0] if lengths else 0) - len(body)
    while left:
        count = connection.recv_into(buffer, min(left, MIB))
        if not count:
            raise ConnectionError(f"an answer ended {left} bytes too early")
        left -= count
    return lengths[0] if lengths else 0


if __name__ == "__main__":
    main()
