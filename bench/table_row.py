"""The row of tables: shuffled batches of 12 columns of float64 as torch tensors, beside pyarrow and Ray Data.

Law: one daemon is the S3 server of all; the same Parquet files, batches of one size. Invariant: contenders
take turns (`bench.interleave`), loaders begin empty; the CPU time of clients and of the server stands beside
the rate.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.ready_process import StandingContender, measure_in_turn
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.results import Figure
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "tables"
OURS, PYARROW, SCANNER, RAY = "meshsdk", "pyarrow", "pyarrow.dataset", "Ray Data"
CONTENDERS: Final = (OURS, PYARROW, SCANNER, RAY)
NO_RAY: Final = "Ray Data is not installed: `pip install 'ray[data]'` (620 MB on disk with what it needs)"
LEAST: Final = 1_000_000.0
BUCKET: Final = "tables"
COLUMNS, BATCH, GROUP, FILE_ROWS = 12, 8192, 65536, 250_000
TEXT: Final = f"""\
{COLUMNS} columns of float64 without nulls in Parquet files of 250,000 rows (snappy, row groups of
{GROUP:,}); a batch is {COLUMNS} tensors of {BATCH:,} rows. *{OURS}* is `kind="table"` with `shuffle=True`, a
permutation of all rows. *{PYARROW}* reads row groups from the same daemon over S3, in an order of chance
and with its own threads, and shuffles the rows within four of them, as a loader without a server must.
*{SCANNER}* is its scanner over files in an order of chance, with its own read-ahead and the same shuffling;
*{RAY}*, where it is installed, is `iter_torch_batches` with a local shuffle buffer of as many rows. The
figures are for the steady state: files are open and converted, and clocks run from a round's first batch to
its last."""


def title(scale: Scale) -> str:
    return f"Tables, {scale.table_rows:,} rows of {COLUMNS} columns"


def measure(server: Server, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill, start a process for each contender, then rounds in turn."""
    names = [name for name in CONTENDERS if name != RAY or find_spec("ray") is not None]
    if RAY not in names:
        say(f"{NAME}: {NO_RAY}")
    say(f"{NAME}: filling")
    _fill(server, scale.table_rows)
    yield from measure_in_turn(NAME, names, lambda name: _contender(name, server, scale), scale.rounds, say)


def _contender(name: str, server: Server, scale: Scale) -> StandingContender:
    seconds, pid = str(scale.reading), str(server.child.process.pid)
    return StandingContender(name, ["bench.table_reader", name, server.endpoint, seconds, pid], server)


def _fill(server: Server, rows: int) -> None:
    import pyarrow as pa  # costs half a second, and most runs have other rows
    import pyarrow.parquet as pq

    assert server.account is not None
    random, account = np.random.default_rng(7), server.account
    with connect(
        server.endpoint, access_key=account.access_key, secret_key=account.secret_key, region="us-east-1"
    ) as client:
        client.create_bucket(BUCKET)
        for number, start in enumerate(range(0, rows, FILE_ROWS)):
            count = min(FILE_ROWS, rows - start)
            first = np.arange(start, start + count, dtype=np.float64)
            columns = {"c00": first} | {f"c{at:02d}": random.random(count) for at in range(1, COLUMNS)}
            out = io.BytesIO()
            pq.write_table(pa.table(columns), out, row_group_size=GROUP, compression="snappy")
            client.put(BUCKET, f"{number:03d}.parquet", out.getvalue())
