"""CPU of the daemon for a sample without ops: `python -m bench.raw_samples --files 10 --lines 40000`.

The samples are lines of 60 bytes, shuffled, in batches of 1,024; with `--kind tar` members of archives, with
`--op cast` they are read as arrays of numbers and cast by one column op. CPU seconds are those of all
processes of the daemon, over two epochs. `--files 10 --lines 10000000 --bytes 16 --beside 10000` compares
100,000,000 samples with 100,000, in turns: what a sample costs should not depend on their number. Each goes
on where it was in the turn before, epoch after epoch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import meshsdk as mesh
from bench.interleave import turns
from bench.processes import cpu_seconds
from bench.tables import verdict
from meshsdk import ops
from tests.support.archive_files import tar_of
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ROWS: Final = 1024  # unless --rows says otherwise
_RATE, _OP_RATE, _CPU = 500_000, 300_000, 4.0
"""The bars: samples a second at least, without an op and with one; microseconds of CPU a sample at most,
without an op."""
_TURN: Final = 2000
"""Batches of a turn of --beside."""
_AHEAD: Final = 8 << 20
_LEAD: Final = 400
"""Bytes that a loader of --beside requests ahead, some 200 batches of small samples, and batches that are
read before those that count: what is ready when a turn begins costs nothing in it. With the default, 256 MiB,
a loader of many samples has thousands of batches prepared that no turn reads, and one of few samples those of
its epoch alone.
"""
_IDLE: Final = 0.02  # seconds of CPU in a fifth of a second, below which a daemon does nothing
_APART: Final = 10
"""The bar of --beside: per cent by which the rates differ at most."""


def main() -> None:
    """Print samples a second and microseconds of CPU a sample for each epoch, or for each number of
    samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--lines", type=int, default=40_000, help="of each file")
    parser.add_argument("--bytes", type=int, default=60, help="of a line")
    parser.add_argument("--kind", choices=("lines", "tar"), default="lines")
    parser.add_argument("--op", choices=("cast",), help="one column op: uint8 to float32")
    parser.add_argument("--rows", type=int, default=_ROWS, help="of a batch")
    parser.add_argument(
        "--batches", type=int, help="of each epoch; default: all; of a turn of --beside: 2,000"
    )
    parser.add_argument("--beside", type=int, metavar="LINES", help="compare with files of so many lines")
    parser.add_argument("--rounds", type=int, default=10, help="of --beside, after one that does not count")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--checkout", type=Path, help="another checkout, whose daemon is measured")
    given = parser.parse_args()
    daemon = Daemon(None, (), {}, given.workers)
    daemon.checkout = given.checkout
    with daemon:
        daemon.up()
        os.environ |= {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        }
        if given.beside is not None:
            _compare(daemon, given)
            return
        loader = _loader(daemon, "many", given.lines, given)
        for epoch in range(2):
            _tell(f"epoch {epoch}", _read(daemon, loader, epoch, given.batches, given.rows), given)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read: rows, seconds, and CPU seconds of the daemon and of this process."""

    rows: int
    seconds: float
    cpu: float
    own: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.rows / self.seconds

    @property
    def cost(self) -> float:
        """Microseconds of the daemon's CPU a sample."""
        return self.cpu / self.rows * 1e6


def _loader(daemon: Daemon, bucket: str, lines: int, given: argparse.Namespace) -> mesh.Loader:
    """Store the samples, open them and return a loader."""
    client = daemon.client()
    client.create_bucket(Bucket=bucket)
    ending = "tar" if given.kind == "tar" else "txt"
    for file in range(given.files):
        body = _file(given.kind, range(file * lines, (file + 1) * lines), given.bytes - 1)
        client.put_object(Bucket=bucket, Key=f"{file:09}.{ending}", Body=body)
    client.close()
    samples = mesh.open(f"s3://{bucket}", fields={"text": "txt"}, kind=given.kind)
    if given.op is not None:
        samples = samples.map(
            ops.frombuffer("text", "uint8", shape=[given.bytes - 1]), ops.cast("text", "float32")
        )
    ahead = None if given.beside is None else _AHEAD
    return mesh.Loader(samples, global_batch=given.rows, shuffle=True, seed=1, prefetch_bytes=ahead)


def _file(kind: str, numbers: Iterable[int], width: int) -> bytes:
    if kind == "tar":
        return tar_of({f"{number:09}.txt": b"%0*d" % (width, number) for number in numbers})
    return b"".join(b"%0*d\n" % (width, number) for number in numbers)


def _read(daemon: Daemon, loader: mesh.Loader, epoch: int, batches: int | None, rows: int) -> _Reading:
    loader.set_epoch(epoch)
    began, used, own = time.monotonic(), cpu_seconds(daemon.pid), time.process_time()
    count = rows * sum(1 for _ in itertools.islice(loader, batches))
    took, cpu = time.monotonic() - began, cpu_seconds(daemon.pid) - used
    return _Reading(count, took, cpu, time.process_time() - own)


def _epochs(loader: mesh.Loader) -> Iterator[mesh.Batch]:
    """Yield the batches of one epoch after the other."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def _turn(daemon: Daemon, batches: Iterator[mesh.Batch], count: int) -> _Reading:
    """Read so many batches, and then wait until the daemon has prepared those that follow."""
    for _ in itertools.islice(batches, min(_LEAD, count)):
        pass
    began, used, own = time.monotonic(), cpu_seconds(daemon.pid), time.process_time()
    rows = sum(batch.rows for batch in itertools.islice(batches, count))
    took, cpu = time.monotonic() - began, cpu_seconds(daemon.pid) - used
    own = time.process_time() - own
    busy = 1.0
    while busy > _IDLE:
        before = cpu_seconds(daemon.pid)
        time.sleep(0.2)
        busy = cpu_seconds(daemon.pid) - before
    return _Reading(rows, took, cpu, own)


def _tell(name: str, done: _Reading, given: argparse.Namespace) -> None:
    rate, cost = (_RATE, _CPU) if given.op is None else (_OP_RATE, None)
    bar = verdict(done.cost, cost, at_most=True)
    print(
        f"{name}: {done.rows:,} samples, {done.rate:,.0f}/s ({verdict(done.rate, rate)}), "
        f"{done.cost:.2f} us of the daemon's CPU a sample{f' ({bar})' if bar else ''}, "
        f"{done.own / done.rows * 1e6:.2f} us of this process",
        flush=True,
    )


def _compare(daemon: Daemon, given: argparse.Namespace) -> None:
    """Read as many batches of few samples as of many, in turns."""
    few, many = (f"{given.files * lines:,} samples" for lines in (given.beside, given.lines))
    loaders = {
        few: _loader(daemon, "few", given.beside, given),
        many: _loader(daemon, "many", given.lines, given),
    }
    batches = given.batches or _TURN
    streams = {name: _epochs(loader) for name, loader in loaders.items()}
    found = defaultdict[str, list[_Reading]](list)
    for number, name in turns("raw samples", loaders, given.rounds + 1, lambda _: None):
        done = _turn(daemon, streams[name], batches)
        if number:  # the first round maps files and opens pages
            found[name].append(done)
    rates, costs = dict[str, float](), dict[str, float]()
    for name, rounds in found.items():
        rates[name] = statistics.median(done.rate for done in rounds)
        # The clock of CPU time has ticks of 10 ms, which is much of one round.
        costs[name] = sum(done.cpu for done in rounds) / sum(done.rows for done in rounds) * 1e6
        cost = f"{costs[name]:.2f} us of the daemon's CPU a sample"
        print(f"{name}: {rates[name]:,.0f}/s, the median of {given.rounds} rounds; {cost}")
    apart = 100 * (rates[many] / rates[few] - 1)
    bar = verdict(abs(apart), _APART, at_most=True)
    dearer = costs[many] / costs[few] if costs[few] else 1.0
    print(f"{many} beside {few}: rate {apart:+.1f} % (apart {bar}), {dearer:.2f} times the CPU a sample")


if __name__ == "__main__":
    main()
