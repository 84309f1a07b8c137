"""The row of series: windows of a Zarr array as torch batches, beside a Dataset that slices the array itself.

Law: one daemon is the S3 server of all; the same array, windows of one size, batches of one size, two workers
each; in shards, as small chunks are kept in buckets, and once more an object a chunk. Invariant: contenders
take turns (`bench.interleave`), loaders begin empty; the CPU time of clients with their workers and of the
server stands beside the rate.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.ready_process import StandingContender, measure_in_turn
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.results import Figure
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "zarr-windows"
OURS, NAIVE = "meshsdk", "zarr in a Dataset"
ALONE: Final = ", an object a chunk"
CONTENDERS: Final = (OURS, NAIVE, OURS + ALONE, NAIVE + ALONE)
LEAST: Final = 10.0
BUCKET: Final = "series"
CHANNELS, CHUNK, WIDTH = 8, 512, 256
SHARD: Final = 64  # chunks
BATCH, WORKERS = 128, 2
TEXT: Final = f"""\
{CHANNELS} channels of int32 in chunks of {CHANNELS} × {CHUNK} (zstd), {SHARD} per shard; batches of {BATCH}
windows of {CHANNELS} × {WIDTH}. *{NAIVE}* is zarr-python over obstore in a `torch.utils.data.DataLoader`
with {WORKERS} worker processes: a window is a slice of the array at a random place. Ours are at random places
within chunks. All contenders read from the same daemon. The figures are for the steady state: the array is
open, the workers run, and clocks run from a round's first batch to its last."""


def title(scale: Scale) -> str:
    return f"Windows of a Zarr series, {scale.series_chunks:,} chunks"


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    say(f"{NAME}: filling")
    _fill(server, scale.series_chunks)
    yield from measure_in_turn(
        NAME, CONTENDERS, lambda name: _contender(name, server, scale), scale.rounds, say
    )


def _contender(name: str, server: Server, scale: Scale) -> StandingContender:
    loader, place = name.removesuffix(ALONE), "alone" if name.endswith(ALONE) else "sharded"
    seconds, pid = str(scale.reading), str(server.child.process.pid)
    words = ["bench.window_reader", loader, place, server.endpoint, seconds, pid]
    return StandingContender(name, words, server)


def _fill(server: Server, chunks: int) -> None:
    import zarr  # costs half a second, and most runs have other rows

    assert server.account is not None
    random = np.random.default_rng(7)
    values = random.integers(0, 1 << 12, (CHANNELS, chunks * CHUNK), np.int32)
    values[0] = np.arange(chunks * CHUNK)
    stored: dict[str, Any] = {}
    group = zarr.create_group(zarr.storage.MemoryStore(stored))
    for name, shards in (("sharded", (CHANNELS, SHARD * CHUNK)), ("alone", None)):
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=(CHANNELS, CHUNK),
            shards=shards,
            dtype="int32",
            compressors=zarr.codecs.ZstdCodec(),
        )
        array[:] = values
    account = server.account
    with (
        connect(
            server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
        ) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        client.create_bucket(BUCKET)
        list(pool.map(lambda key: client.put(BUCKET, key, stored[key].to_bytes()), stored))
