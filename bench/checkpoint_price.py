"""The price of checkpoints: PUT 10 KiB with `durability: relaxed`, with a checkpoint twice a second
against none for a day. Two daemons take turns.

The figure is CPU time for a PUT, of all threads of a daemon, in nanoseconds of the scheduler: other programs
take cores from it, but do not add to it. It is the median of the ratios of many short pairs, with the
interval that contains the true median in 19 of 20 cases. Checkpoints are as many a second whatever the rate,
so a slow machine shows a price that is too high: the last line computes it for other rates. Requests per
second are shown, too.

python -m bench.checkpoint_price --pairs 60
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.daemons import Daemon

_CONNECTIONS = 16
_KEYS = 64
_BODY = random.Random(1).randbytes(10 << 10)
_OFF = 86_400
_PER_SECOND = 2  # checkpoints, with a sync-interval of a second
_RATES = (1000, 2000, 4000)
BUCKET = "price"


def _requests(daemon: Daemon) -> list[bytes]:
    """Requests that were signed in advance, so that the client costs next to nothing."""
    client, found = daemon.client(), []
    client.create_bucket(Bucket=BUCKET)
    for number in range(_KEYS * _CONNECTIONS):
        url = client.generate_presigned_url("put_object", {"Bucket": BUCKET, "Key": f"k{number}"})
        parts = urlsplit(url)
        head = (
            f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(_BODY)}"
        )
        found.append(head.encode() + b"\r\n\r\n" + _BODY)
    return found


async def _connection(daemon: Daemon, requests: list[bytes], until: float) -> int:
    where, done = urlsplit(daemon.endpoint), 0
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    while time.monotonic() < until:
        writer.write(requests[done % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        done += 1
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

    puts: int
    seconds: float
    cpu: float

    @property
    def price(self) -> float:
        """Seconds of CPU for a PUT."""
        return self.cpu / self.puts


async def _turn(daemon: Daemon, requests: list[bytes], seconds: float) -> _Turn:
    """Write for so long."""
    began, before = time.monotonic(), _cpu_seconds(daemon)
    shares = [requests[number::_CONNECTIONS] for number in range(_CONNECTIONS)]
    done = await asyncio.gather(*[_connection(daemon, share, began + seconds) for share in shares])
    return _Turn(sum(done), time.monotonic() - began, _cpu_seconds(daemon) - before)


def _median(ratios: list[float]) -> str:
    """The median, and the bounds of the true one with 95 % confidence, by order statistics."""
    ordered, count = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return f"{statistics.median(ordered):.3f} ({ordered[low]:.3f} to {ordered[high]:.3f})"


def _report(on: list[_Turn], off: list[_Turn]) -> None:
    pairs = list(zip(on, off, strict=True))
    print(f"CPU for a PUT, with checkpoints ÷ without: {_median([a.price / b.price for a, b in pairs])}")
    rates = [a.puts / a.seconds / (b.puts / b.seconds) for a, b in pairs]
    print(f"PUT/s, with ÷ without: {_median(rates)}")
    for name, turns in (("with", on), ("without", off)):
        puts, seconds = sum(each.puts for each in turns), sum(each.seconds for each in turns)
        cost = 1e6 * sum(each.cpu for each in turns) / puts
        print(f"{name}: {cost:.0f} µs of CPU for a PUT, {puts / seconds:.0f} PUT/s")
    price = statistics.median(each.price for each in off)
    each = statistics.median(a.cpu - b.price * a.puts for a, b in pairs) / statistics.median(
        _PER_SECOND * a.seconds for a in on
    )
    told = ", ".join(f"{100 * _PER_SECOND * each / (rate * price):.1f} % at {rate} PUT/s" for rate in _RATES)
    print(f"a checkpoint: {1e3 * each:.2f} ms of CPU: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each half of a pair")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        relaxed = ["--durability", "relaxed", "--sync-interval"]
        daemons = [
            Daemon.start(Path(place) / name, args=[*relaxed, str(interval)], workers=2)
            for name, interval in (("on", 1), ("off", _OFF))
        ]
        try:
            prepared = [_requests(daemon) for daemon in daemons]
            for daemon, requests in zip(daemons, prepared, strict=True):
                asyncio.run(_turn(daemon, requests, 2.0))  # warms up
            turns: tuple[list[_Turn], list[_Turn]] = ([], [])
            for pair in range(asked.pairs):
                for which in (0, 1) if pair % 2 else (1, 0):
                    turns[which].append(asyncio.run(_turn(daemons[which], prepared[which], asked.seconds)))
        finally:
            for daemon in daemons:
                daemon.close()
    _report(*turns)


if __name__ == "__main__":
    main()
