"""The price of checkpoints: PUT 10 KiB with `durability: relaxed`, with a checkpoint twice a second
against none for a day. Two daemons take turns. With `--get` the objects are read. With `--changes` one
connection makes a change every 50 ms beside that, so that each checkpoint has something to keep.

The figure is CPU time for a request, of all threads of a daemon, in nanoseconds of the scheduler: other
programs take cores from it, but do not add to it. It is the median of the ratios of many short pairs, with
the interval that contains the true median in 19 of 20 cases. Two daemons that do the same differ by some
percent for as long as they run, so each round starts new ones, and the interval is that of the rounds'
medians; `--same` shows how much two daemons without checkpoints differ. Checkpoints are as many a second
whatever the rate, so a slow machine shows a price that is too high: the last line computes it for other
rates. Requests per second are shown, too, and the part of the coordinator, which takes the checkpoints.

python -m bench.checkpoint_price --rounds 12 --pairs 20
python -m bench.checkpoint_price --rounds 12 --pairs 20 --get --changes
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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.interleave import order
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


def _cpu_seconds(daemon: Daemon) -> tuple[float, float]:
    """What the threads of its processes have used, and those of its coordinator."""
    used = {}
    for name, pid in (("supervisor", daemon.pid), *daemon.children().items()):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        used[name] = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return sum(used.values()), sum(cpu for name, cpu in used.items() if name.startswith("coordinator"))


@dataclass
class _Turn:
    """One half of a pair."""

    requests: int
    seconds: float
    cpu: float
    coordinator: float

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
    after = _cpu_seconds(daemon)
    return _Turn(
        sum(done[:_CONNECTIONS]), time.monotonic() - began, after[0] - before[0], after[1] - before[1]
    )


def _median(ratios: list[float]) -> str:
    """The median, and the bounds of the true one with 95 % confidence, by order statistics."""
    ordered, count = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return f"{statistics.median(ordered):.3f} ({ordered[low]:.3f} to {ordered[high]:.3f})"


def _of_rounds(ratios: list[float], rounds: int) -> list[float]:
    """The median of each round."""
    count = len(ratios) // rounds
    return [statistics.median(ratios[at : at + count]) for at in range(0, len(ratios), count)]


def _report(method: str, on: list[_Turn], off: list[_Turn], rounds: int) -> None:
    pairs = list(zip(on, off, strict=True))
    prices = [a.price / b.price for a, b in pairs]
    told = _median(_of_rounds(prices, rounds) if rounds > 1 else prices)
    print(f"CPU for a {method}, with checkpoints ÷ without: {told}")
    rates = [a.requests / a.seconds / (b.requests / b.seconds) for a, b in pairs]
    told = _median(_of_rounds(rates, rounds) if rounds > 1 else rates)
    print(f"{method}/s, with ÷ without: {told}")
    own, cpu = (
        [sum(each.coordinator / each.seconds for each in turns) / len(turns) for turns in (on, off)],
        sum(each.cpu / each.seconds for each in off) / len(off),
    )
    print(
        f"coordinator: {1e3 * (own[0] - own[1]):.2f} ms/s more, {100 * (own[0] - own[1]) / cpu:.2f} % of all"
    )
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
    parser.add_argument("--rounds", type=int, default=1, help="each with new daemons, and so many pairs")
    parser.add_argument("--same", action="store_true", help="no checkpoints in both")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each half of a pair")
    parser.add_argument("--get", action="store_true", help="the objects")
    parser.add_argument("--changes", action="store_true", help="beside the GETs")
    asked = parser.parse_args()
    method = "GET" if asked.get else "PUT"
    turns: tuple[list[_Turn], list[_Turn]] = ([], [])
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as place, ExitStack() as ending:
            daemons = {}
            for which in order((1, 0), number):
                interval = _OFF if which or asked.same else 1
                args = ["--durability", "relaxed", "--sync-interval", str(interval)]
                daemons[which] = Daemon.start(Path(place) / str(which), args=args, workers=2)
                ending.callback(daemons[which].close)
            kinds = {which: _prepared(each, method, changes=asked.changes) for which, each in daemons.items()}
            for pair in range(asked.pairs):
                for which in order((1, 0), pair):
                    turn = _turn(daemons[which], kinds[which], asked.seconds, at_least=1)
                    turns[which].append(asyncio.run(turn))
    _report(method, *turns, asked.rounds)


if __name__ == "__main__":
    main()
