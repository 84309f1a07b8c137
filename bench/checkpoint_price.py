"""The price of checkpoints: PUT 10 KiB with `durability: relaxed`, with a checkpoint twice a second
against none for a day. Two daemons take turns. With `--get` the objects are read. With `--changes` one
connection makes a change every 50 ms beside that, so that each checkpoint has something to keep.

The figure is CPU time for a request, of all threads of a daemon, in nanoseconds of the scheduler: other
programs take cores from it, but do not add to it. It is the median of the ratios of many short pairs, with
the interval that contains the true median in 19 of 20 cases. Checkpoints are as many a second
whatever the rate, so a slow machine shows a price that is too high: the last line computes it for other
rates. Requests per second are shown, too.

python -m bench.checkpoint_price --pairs 60
python -m bench.checkpoint_price --pairs 200 --get --changes
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.daemons import Daemon

_CONNECTIONS = 16
_KEYS = 64
_BODY = random.Random(1).randbytes(10 << 10)
_OFF = 86_400
_PER_SECOND = 2  # checkpoints, with a sync-interval of a second
_RATES = (1000, 2000, 4000)
_CHANGE_SECONDS = 0.05
BUCKET = "price"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


_Kinds = tuple[list[bytes], list[bytes]]
"""Requests whose price is asked for, and changes beside them."""


def _requests(client: Any, method: str) -> list[bytes]:
    """Requests that were signed in advance, so that the client costs next to nothing."""
    found, body = [], _BODY if method == "PUT" else b""
    for number in range(_KEYS * _CONNECTIONS):
        asked = {"Bucket": BUCKET, "Key": f"k{number}"}
        parts = urlsplit(client.generate_presigned_url(f"{method.lower()}_object", asked))
        head = f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        found.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return found


async def _answer(reader: asyncio.StreamReader) -> None:
    """Read a response with its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = _LENGTH.search(head)
    if length and int(length[1]):
        await reader.readexactly(int(length[1]))


async def _connection(
    daemon: Daemon, requests: list[bytes], until: float, *, pause: float = 0.0, at_least: int = 0
) -> int:
    where, done = urlsplit(daemon.endpoint), 0
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    while done < at_least or time.monotonic() < until:
        writer.write(requests[done % len(requests)])
        await _answer(reader)
        done += 1
        if pause:
            await asyncio.sleep(pause)
    writer.close()
    await writer.wait_closed()
    return done


def _cpu_seconds(daemon: Daemon) -> float:
    """What the threads of its processes have used."""
    pids = (daemon.pid, *daemon.children().values())
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass
class _Turn:
    """One half of a pair."""

    requests: int
    seconds: float
    cpu: float

    @property
    def price(self) -> float:
        """Seconds of CPU for a request."""
        return self.cpu / self.requests


async def _turn(daemon: Daemon, kinds: _Kinds, seconds: float, *, at_least: int = 0) -> _Turn:
    """Request for so long, and `at_least` so often by each connection; make changes more slowly beside
    that."""
    requests, changes = kinds
    began, before = time.monotonic(), _cpu_seconds(daemon)
    until = began + seconds
    shares = [requests[number::_CONNECTIONS] for number in range(_CONNECTIONS)]
    beside = [_connection(daemon, changes, until, pause=_CHANGE_SECONDS)] if changes else []
    done = await asyncio.gather(
        *[_connection(daemon, share, until, at_least=at_least) for share in shares], *beside
    )
    return _Turn(sum(done[:_CONNECTIONS]), time.monotonic() - began, _cpu_seconds(daemon) - before)


def _median(ratios: list[float]) -> str:
    """The median, and the bounds of the true one with 95 % confidence, by order statistics."""
    ordered, count = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return f"{statistics.median(ordered):.3f} ({ordered[low]:.3f} to {ordered[high]:.3f})"


def _report(method: str, on: list[_Turn], off: list[_Turn]) -> None:
    pairs = list(zip(on, off, strict=True))
    print(f"CPU for a {method}, with checkpoints ÷ without: {_median([a.price / b.price for a, b in pairs])}")
    rates = [a.requests / a.seconds / (b.requests / b.seconds) for a, b in pairs]
    print(f"{method}/s, with ÷ without: {_median(rates)}")
    for name, turns in (("with", on), ("without", off)):
        requests, seconds = sum(each.requests for each in turns), sum(each.seconds for each in turns)
        cost = 1e6 * sum(each.cpu for each in turns) / requests
        print(f"{name}: {cost:.0f} µs of CPU for a {method}, {requests / seconds:.0f} {method}/s")
    price = statistics.median(each.price for each in off)
    each = statistics.median(a.cpu - b.price * a.requests for a, b in pairs) / statistics.median(
        _PER_SECOND * a.seconds for a in on
    )
    told = ", ".join(
        f"{100 * _PER_SECOND * each / (rate * price):.1f} % at {rate} {method}/s" for rate in _RATES
    )
    print(f"a checkpoint: {1e3 * each:.2f} ms of CPU: {told}")


def _prepared(daemon: Daemon, method: str, *, changes: bool) -> _Kinds:
    """The requests of a daemon that is warm and has all objects."""
    client = daemon.client()
    client.create_bucket(Bucket=BUCKET)
    puts = _requests(client, "PUT")
    asyncio.run(_turn(daemon, (puts, []), 2.0, at_least=_KEYS))
    if method == "PUT":
        return puts, []
    kinds = _requests(client, method), puts if changes else []
    asyncio.run(_turn(daemon, kinds, 2.0))
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each half of a pair")
    parser.add_argument("--get", action="store_true", help="the objects")
    parser.add_argument("--changes", action="store_true", help="beside the GETs")
    asked = parser.parse_args()
    method = "GET" if asked.get else "PUT"
    with tempfile.TemporaryDirectory() as place:
        relaxed = ["--durability", "relaxed", "--sync-interval"]
        daemons = [
            Daemon.start(Path(place) / name, args=[*relaxed, str(interval)], workers=2)
            for name, interval in (("on", 1), ("off", _OFF))
        ]
        try:
            prepared = [_prepared(daemon, method, changes=asked.changes) for daemon in daemons]
            turns: tuple[list[_Turn], list[_Turn]] = ([], [])
            for pair in range(asked.pairs):
                for which in (0, 1) if pair % 2 else (1, 0):
                    turn = _turn(daemons[which], prepared[which], asked.seconds, at_least=1)
                    turns[which].append(asyncio.run(turn))
        finally:
            for daemon in daemons:
                daemon.close()
    _report(method, *turns)


if __name__ == "__main__":
    main()
