"""CPU of the daemon for a sample without ops: `python -m bench.raw_samples --files 10 --lines 40000`.

The samples are lines of 60 bytes, shuffled, in batches of 1,024. CPU seconds are those of all processes of
the daemon, over two epochs. `--files 10 --lines 10000000 --bytes 16 --batches 400` reads the first batches of
100,000,000 samples, to compare with `--lines 10000`: what a sample costs does not depend on their number.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Final

import meshsdk as mesh
from bench.processes import cpu_seconds
from bench.tables import verdict
from tests.support.daemons import Daemon

_ROWS: Final = 1024  # unless --rows says otherwise
_RATE, _CPU = 500_000, 4.0
"""The bars: samples a second at least, microseconds of CPU a sample at most."""


def main() -> None:
    """Print samples a second and microseconds of CPU a sample for each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--lines", type=int, default=40_000, help="of each file")
    parser.add_argument("--bytes", type=int, default=60, help="of a line")
    parser.add_argument("--rows", type=int, default=_ROWS, help="of a batch")
    parser.add_argument("--batches", type=int, help="of each epoch; default: all")
    parser.add_argument("--checkout", type=Path, help="another checkout, whose daemon is measured")
    given = parser.parse_args()
    daemon = Daemon(None, (), {}, 1)
    daemon.checkout = given.checkout
    with daemon:
        daemon.up()
        client = daemon.client()
        client.create_bucket(Bucket="many")
        for file in range(given.files):
            numbers = range(file * given.lines, (file + 1) * given.lines)
            body = b"".join(b"%0*d\n" % (given.bytes - 1, number) for number in numbers)
            client.put_object(Bucket="many", Key=f"{file:09}.txt", Body=body)
        client.close()
        os.environ |= {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        }
        samples = mesh.open("s3://many", fields={"text": "txt"}, kind="lines")
        loader = mesh.Loader(samples, global_batch=given.rows, shuffle=True, seed=1)
        for epoch in range(2):
            loader.set_epoch(epoch)
            began, used = time.monotonic(), cpu_seconds(daemon.pid)
            rows = given.rows * sum(1 for _ in itertools.islice(loader, given.batches))
            took, cpu = time.monotonic() - began, cpu_seconds(daemon.pid) - used
            rate, each = rows / took, cpu / rows * 1e6
            cost = f"{each:.1f} us of CPU a sample ({verdict(each, _CPU, at_most=True)})"
            print(f"{rows:,} samples, {rate:,.0f}/s ({verdict(rate, _RATE)}), {cost}", flush=True)


if __name__ == "__main__":
    main()
