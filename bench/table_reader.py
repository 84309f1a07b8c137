"""`python -m bench.table_reader LOADER ENDPOINT SECONDS SERVER`: rows of a table as batches of torch tensors.

Law: a line on stdin is a round: batches for so many seconds, from a loader that begins empty; then a line of
JSON. Clocks run from the first batch to the last, so that what is prepared and not taken counts for nobody.
Every batch is looked at: its first column has whole numbers, no two alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import torch

import meshsdk as mesh
from bench.steady_rate import serve_rounds
from bench.table_row import BATCH, BUCKET, COLUMNS, PYARROW

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

NAMES = [f"c{at:02d}" for at in range(COLUMNS)]
_WINDOW = 4  # row groups whose rows are shuffled together
Batch = Mapping[str, Any]


def plain(endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of what one writes with pyarrow."""
    files = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1")
    infos = files.get_file_info(pyarrow.fs.FileSelector(BUCKET))
    opened = [pq.ParquetFile(files.open_input_file(info.path), pre_buffer=True) for info in infos]
    groups = [(file, group) for file in opened for group in range(file.num_row_groups)]
    while True:
        yield _shuffled(groups)


def _shuffled(groups: list[tuple[Any, int]]) -> Iterator[Batch]:
    while True:
        random.shuffle(groups)
        for start in range(0, len(groups), _WINDOW):
            some = [file.read_row_group(group) for file, group in groups[start : start + _WINDOW]]
            table = pa.concat_tables(some)
            order = torch.randperm(table.num_rows)
            columns = {name: torch.from_numpy(table.column(name).to_numpy()) for name in NAMES}
            for at in range(0, table.num_rows - BATCH + 1, BATCH):
                yield {name: column[order[at : at + BATCH]] for name, column in columns.items()}


def ours(endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of a loader, each of a plan of its own."""
    with mesh.connect(endpoint) as client:
        ds = mesh.open(f"s3://{BUCKET}", columns=NAMES, kind="table", client=client)
        number = 0
        while True:
            number += 1
            with mesh.Loader(ds, BATCH, seed=number, tail="drop", prefetch_bytes=32 << 20) as loader:
                yield (batch for _ in iter(int, 1) for batch in loader)


def look(batch: Batch) -> int:
    """How many rows it has."""
    first = batch[NAMES[0]]
    if tuple(first.shape) != (BATCH,) or not bool((first == first.round()).all()):
        raise SystemExit(f"no rows: {tuple(first.shape)}")
    if any(tuple(batch[name].shape) != (BATCH,) for name in NAMES):
        raise SystemExit("a column is missing")
    return BATCH


def main() -> None:
    """Warm up, then a round a line."""
    loader, endpoint, seconds, server = *sys.argv[1:3], float(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rounds = plain(endpoint) if loader == PYARROW else ours(endpoint)
    serve_rounds(rounds, look, seconds, server)


if __name__ == "__main__":
    main()
