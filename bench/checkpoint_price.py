"""The price of checkpoints: PUT 10 KiB with `durability: relaxed`, with a checkpoint four times a second
against none for a day. Two daemons take turns; the figure is the median of the ratios of the pairs.

python -m bench.checkpoint_price --pairs 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.daemons import Daemon

_CONNECTIONS = 16
_KEYS = 64
_BODY = random.Random(1).randbytes(10 << 10)
_OFF = 86_400
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
    """What its processes have used."""
    ticks = 0
    for pid in (daemon.pid, *daemon.children().values()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _rate(daemon: Daemon, requests: list[bytes], seconds: float) -> float:
    """PUTs per second."""
    began = time.monotonic()
    shares = [requests[number::_CONNECTIONS] for number in range(_CONNECTIONS)]
    done = await asyncio.gather(*[_connection(daemon, share, began + seconds) for share in shares])
    return sum(done) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
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
                asyncio.run(_rate(daemon, requests, 2.0))  # warms up
            before = [_cpu_seconds(daemon) for daemon in daemons]
            rates: list[list[float]] = [[], []]
            for pair in range(asked.pairs):
                for which in (0, 1) if pair % 2 else (1, 0):
                    rates[which].append(asyncio.run(_rate(daemons[which], prepared[which], asked.seconds)))
            used = [_cpu_seconds(daemon) - at for daemon, at in zip(daemons, before, strict=True)]
        finally:
            for daemon in daemons:
                daemon.close()
    ratios = sorted(on / off for on, off in zip(*rates, strict=True))
    quarter = len(ratios) // 4
    print(
        f"median of {len(ratios)} ratios {statistics.median(ratios):.3f}, "
        f"middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
    )
    for name, found, cpu in zip(("with", "without"), rates, used, strict=True):
        cost = 1e6 * cpu / (sum(found) * asked.seconds)
        print(f"{name} checkpoints: {statistics.median(found):.0f} PUT/s, {cost:.0f} µs of CPU each")


if __name__ == "__main__":
    main()
