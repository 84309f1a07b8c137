"""What small objects cost to store: `python -m bench.ingest`.

One PUT for each, by sixteen threads of boto3 and of the SDK, beside `Client.put_many`: objects a second, and
processor time of the daemons and of the client an object, on a standalone node and on a mesh of three. For
objects of up to 10 KiB on a standalone node, the bar of a PUT by boto3 is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import psutil

import meshsdk as mesh
from bench.interleave import turns
from bench.tables import verdict
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_THREADS: Final = 16
_BUCKET: Final = "ingest"
_MOST_US, _MOST_BYTES = 700, 10 << 10
"""The bar: microseconds of the daemon's CPU for a PUT by boto3, of an object of at most so many bytes."""
Objects = list[tuple[str, bytes]]


@contextmanager
def _nodes(number: int) -> Iterator[Sequence[Daemon]]:
    if number == 1:
        with Daemon.start() as daemon:
            yield [daemon]
        return
    with DaemonCluster.start(number) as found:
        yield list(found.nodes.values())


def _cpu_of(daemons: Sequence[Daemon]) -> float:
    """User and system seconds of the daemons and their children."""
    total = 0.0
    for daemon in daemons:
        main = psutil.Process(daemon.pid)
        for process in (main, *main.children(recursive=True)):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def _contenders(daemon: Daemon) -> dict[str, Callable[[Objects], object]]:
    s3 = daemon.client()
    client = mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)
    pool = ThreadPoolExecutor(_THREADS)
    return {
        "boto3": lambda objects: list(
            pool.map(lambda each: s3.put_object(Bucket=_BUCKET, Key=each[0], Body=each[1]), objects)
        ),
        "put": lambda objects: list(pool.map(lambda each: client.put(_BUCKET, *each), objects)),
        "put_many": lambda objects: client.put_many(_BUCKET, objects),
    }


def main() -> None:
    """Print a line for each way and number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=2000, help="for put_many ten times as many")
    parser.add_argument("--bytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", choices=(1, 3), default=[1, 3])
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    told: Callable[[str], None] = (lambda _: None) if given.quiet else print
    for number in given.nodes:
        opened: AbstractContextManager[Sequence[Daemon]] = _nodes(number)
        with opened as daemons, nullcontext(_contenders(daemons[0])) as contenders:
            daemons[0].client().create_bucket(Bucket=_BUCKET)
            found = defaultdict[str, list[tuple[float, float, float]]](list)
            for turn, name in turns(f"{number} nodes", contenders, given.rounds, told):
                count = given.objects * (10 if name == "put_many" else 1)
                body = os.urandom(given.bytes)
                objects = [(f"{name}/{turn}/{n:06}", body) for n in range(count)]
                began, server, own = time.perf_counter(), _cpu_of(daemons), time.process_time()
                contenders[name](objects)
                seconds = time.perf_counter() - began
                found[name].append(
                    (
                        count / seconds,
                        (_cpu_of(daemons) - server) / count,
                        (time.process_time() - own) / count,
                    )
                )
            for name, rounds in found.items():
                rate, server, own = (statistics.median(column) for column in zip(*rounds, strict=True))
                cost, bar = server * 1e6, ""
                if number == 1 and name == "boto3" and given.bytes <= _MOST_BYTES:
                    bar = f" ({verdict(cost, _MOST_US, at_most=True)})"
                print(
                    f"{number} nodes, {name:9} {rate:9,.0f} objects/s, microseconds of CPU an object: "
                    f"daemons {cost:6.0f}{bar}, client {own * 1e6:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
