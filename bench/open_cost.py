"""What `open` of many samples costs, first and again: `python -m bench.open_cost --samples 10000000`.

The source has ten files of lines, ten tars (`--kind tar`), or one object a sample (`--kind objects`). CPU
seconds and memory are those of all processes of the daemon; memory counts shared pages once, and the page
cache not at all. At the end, batches of a full shuffle of lines or members are read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import meshsdk as mesh
from bench.processes import cpu_seconds, memory_bytes
from bench.tables import verdict
from tests.support.archive_files import tar_of
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILES: Final = 10
_ADDED: Final = 1000
_ROWS: Final = 1024
_BATCH: Final = 10_000  # objects put at once
_RETRY: Final = (202, 429, 503)
_BARS: Final = {"again": 0.3, "one file added": 0.3, "after a restart": 1.0}
"""Seconds that `open` may take: after a file was added, more than that file takes alone."""
_FIRST_BATCH: Final = 1.0  # seconds
_GROWTH: Final = 300  # MiB of all processes, of 100,000,000 lines


def main() -> None:
    """Print a line for each `open`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=("lines", "tar", "objects"), default="lines")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--checkout", type=Path, help="another checkout, whose daemon is measured")
    given = parser.parse_args()
    daemon = Daemon(None, (), {}, given.workers)
    daemon.checkout = given.checkout
    with daemon:
        daemon.up()
        client = daemon.client()
        client.create_bucket(Bucket="many")
        make, ending = (_tar, "tar") if given.kind == "tar" else (_lines, "txt")
        if given.kind == "objects":
            _put_objects(daemon, given.samples)
        for number in range(0 if given.kind == "objects" else _FILES):
            body = make(number, given.samples // _FILES)
            client.put_object(Bucket="many", Key=f"{number:09}.{ending}", Body=body)
        idle = memory_bytes(daemon.pid)
        for note in ("first", "again", "again", "again"):
            _open(daemon, given.kind, note)
        client.create_bucket(Bucket="alone")
        other = make(_FILES + 1, _ADDED)  # of the same bytes there would be a page already
        client.put_object(Bucket="alone", Key=f"added.{ending}", Body=other)
        alone = _open(daemon, given.kind, "that file alone", bucket="alone")
        client.put_object(Bucket="many", Key=f"added.{ending}", Body=make(_FILES, _ADDED))
        _open(daemon, given.kind, "one file added", beyond=alone)
        for note in ("again", "again"):
            _open(daemon, given.kind, note)
        client.close()
        daemon.restart()
        for note in ("after a restart", "again"):
            _open(daemon, given.kind, note)
        if given.kind != "objects":
            _read(daemon, given.kind, given.batches)
        grown = (memory_bytes(daemon.pid) - idle) / (1 << 20)
        print(f"{'memory':16} {grown:,.0f} MiB more than before; {verdict(grown, _GROWTH, at_most=True)}")


def _read(daemon: Daemon, kind: Any, batches: int) -> None:
    os.environ |= {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    samples = mesh.open("s3://many", fields={"text": "txt"}, kind=kind)
    loader = mesh.Loader(samples, global_batch=_ROWS, shuffle=True, seed=1)
    began, used = time.monotonic(), cpu_seconds(daemon.pid)
    reading = iter(loader)
    next(reading)
    first = time.monotonic() - began
    rows = _ROWS * (1 + sum(1 for _ in itertools.islice(reading, batches - 1)))
    took, cpu = time.monotonic() - began, cpu_seconds(daemon.pid) - used
    cost = f"{took:8.3f} s {cpu:8.2f} s of CPU {memory_bytes(daemon.pid) >> 20:6} MiB"
    told = f"the first after {first:.3f} s; {verdict(first, _FIRST_BATCH, at_most=True)}"
    print(f"{'batches':16} {rows:>11,} samples {cost}; {told}", flush=True)


def _put_objects(daemon: Daemon, count: int) -> None:
    client = mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)
    for first in range(0, count, _BATCH):
        numbers = range(first, min(count, first + _BATCH))
        client.put_many("many", [(f"{number:09}.txt", b"%d" % number) for number in numbers])


def _lines(number: int, count: int) -> bytes:
    return b"".join(b"%d\n" % (number * count + line) for line in range(count))


def _tar(number: int, count: int) -> bytes:
    names = (f"{number * count + member:09}.txt" for member in range(count))
    return tar_of({name: name[:9].encode() for name in names})


@contextmanager
def _peak_memory(pid: int) -> Iterator[list[int]]:
    """Collect the memory of all processes every 50 ms."""
    found, ended = [memory_bytes(pid)], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            found.append(memory_bytes(pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


def _open(daemon: Daemon, kind: str, note: str, *, bucket: str = "many", beyond: float = 0) -> float:
    """Open a bucket, and return the seconds it took; a bar allows `beyond` more."""
    wanted = {"source": f"s3://{bucket}", "kind": kind, "fields": {"text": {"ext": ["txt"]}}}
    began, used = time.monotonic(), cpu_seconds(daemon.pid)
    with _peak_memory(daemon.pid) as peak:
        answer = daemon.request("POST", "/-/snapshots", json.dumps(wanted).encode())
        while answer.status in _RETRY:
            time.sleep(0.1)
            answer = daemon.request("POST", "/-/snapshots", json.dumps(wanted).encode())
    took, cpu = time.monotonic() - began, cpu_seconds(daemon.pid) - used
    found = json.loads(answer.body)
    memory = f"{memory_bytes(daemon.pid) >> 20:6} MiB, at most {max(peak) >> 20} meanwhile"
    allowed = _BARS.get(note)
    bar = verdict(took, None if allowed is None else round(allowed + beyond, 3), at_most=True)
    cost = f"{took:8.3f} s {cpu:8.2f} s of CPU {memory}"
    print(f"{note:16} {found['samples']:>11,} samples {cost}{'; ' if bar else ''}{bar}", flush=True)
    return took


if __name__ == "__main__":
    main()
