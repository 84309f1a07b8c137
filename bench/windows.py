"""The row of series: windows of a Zarr array as torch batches, beside a Dataset that slices the array itself.

Law: one daemon is the S3 server of both; the same array, windows of one size, batches of one size, two
workers each. The naive Dataset takes windows anywhere; a second one keeps to a chunk, as ours does.
Invariant: rounds are interleaved, loaders begin empty; the CPU time of clients with their workers and of the
server stands beside the rate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import zarr

from bench.processes import cpu_seconds, family
from bench.results import Figure
from meshsdk.connecting import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "zarr-windows"
OURS, NAIVE, ALIGNED = "meshsdk", "zarr in a Dataset", "zarr in a Dataset, within chunks"
CONTENDERS: Final = (OURS, NAIVE, ALIGNED)
LEAST: Final = 10.0
BUCKET, PLACE = "series", "v1"
CHANNELS, CHUNK, WIDTH = 16, 1024, 256
BATCH, WORKERS = 64, 2
_SECONDS: Final = 2.0
TEXT: Final = f"""\
{CHANNELS} channels of int32 in chunks of {CHANNELS} × {CHUNK:,} (zstd), batches of {BATCH} windows of
{CHANNELS} × {WIDTH}. *zarr in a Dataset* is zarr-python over obstore in a `torch.utils.data.DataLoader` with
{WORKERS} worker processes; a window is a slice of the array at a random
place. *Within chunks* it keeps to one chunk, as ours does. All
read from the same daemon. Steady state: the array is open, the workers run, a round's loader begins empty."""


def title(scale: Scale) -> str:
    return f"Windows of a Zarr series, {scale.series_chunks:,} chunks"


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{NAME}: filling")
    _fill(server, scale.series_chunks)
    with ExitStack() as stack:
        running = {name: stack.enter_context(_Contender(name, server, scale)) for name in CONTENDERS}
        for name, contender in running.items():
            say(f"{NAME}: {name}, warming up")
            contender.wait()
        for number in range(scale.rounds):
            for name, contender in running.items():
                say(f"{NAME}: {name}, round {number + 1} of {scale.rounds}")
                yield contender.figure(number)


class _Contender:
    """A process that takes a round when it is told to."""

    def __init__(self, name: str, server: Server, scale: Scale) -> None:
        assert server.account is not None
        self._name, self._server = name, server
        keys = {
            "AWS_ACCESS_KEY_ID": server.account.access_key,
            "AWS_SECRET_ACCESS_KEY": server.account.secret_key,
            "AWS_REGION": "us-east-1",
        }
        seconds = str(min(_SECONDS, scale.seconds))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.windowing", name, server.endpoint, seconds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **keys},
        )

    def __enter__(self) -> _Contender:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(psutil.Error):
            for process in reversed(family(self._process.pid)):
                process.kill()
        self._process.communicate()

    def wait(self) -> None:
        """Until it is warm; one that failed says so when it is to take a round."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def take(self) -> dict[str, float]:
        """A round. Raises ValueError, with what the process said, when it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            before = self._clocks()
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            found: dict[str, float] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError, psutil.Error):
            assert self._process.stderr is not None
            raise ValueError(self._process.stderr.read()[-400:] or "it ended") from None
        workers, server = (after - then for after, then in zip(self._clocks(), before, strict=True))
        windows = found["windows"]
        return {
            "rate": found["rate"],
            "client_us": 1e6 * workers / windows,
            "server_us": 1e6 * server / windows,
        }

    def figure(self, number: int) -> Figure:
        try:
            return Figure(self._name, number, self.take())
        except ValueError as error:
            return Figure(self._name, number, {}, str(error))

    def _clocks(self) -> tuple[float, float]:
        """CPU seconds so far of this process with its workers, and of the server's."""
        return cpu_seconds(self._process.pid), cpu_seconds(self._server.child.process.pid)


def _fill(server: Server, chunks: int) -> None:
    assert server.account is not None
    stored: dict[str, Any] = {}
    array = zarr.create_array(
        zarr.storage.MemoryStore(stored),
        shape=(CHANNELS, chunks * CHUNK),
        chunks=(CHANNELS, CHUNK),
        dtype="int32",
        compressors=zarr.codecs.ZstdCodec(),
    )
    random = np.random.default_rng(7)
    values = random.integers(0, 1 << 12, (CHANNELS, chunks * CHUNK), np.int32)
    values[0] = np.arange(chunks * CHUNK)
    array[:] = values
    account = server.account
    with (
        connect(
            server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
        ) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        client.create_bucket(BUCKET)
        for done in [
            pool.submit(client.put, BUCKET, f"{PLACE}/{key}", value.to_bytes())
            for key, value in stored.items()
        ]:
            done.result()
