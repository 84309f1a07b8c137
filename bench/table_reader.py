"""`python -m bench.table_reader LOADER ENDPOINT SECONDS SERVER`: rows of a table as batches of torch tensors.

Law: a line on stdin is a round: batches for so many seconds, from a loader that begins empty; then a line of
JSON. Clocks run from the first batch to the last, so that what is prepared and not taken counts for nobody.
Every batch is looked at: its first column has whole numbers, no two alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import torch

import meshsdk as mesh
from bench.steady_rate import serve_rounds
from bench.table_row import BATCH, BUCKET, COLUMNS, GROUP, OURS, PYARROW, RAY, SCANNER

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

NAMES = [f"c{at:02d}" for at in range(COLUMNS)]
_WINDOW = 4  # row groups whose rows are shuffled together
Batch = Mapping[str, Any]


def _filesystem(endpoint: str) -> Any:
    return pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1")


def plain(endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of what one writes with pyarrow."""
    files = _filesystem(endpoint)
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
            yield from _batches(pa.concat_tables(some))


def _batches(table: pa.Table) -> Iterator[Batch]:
    """Yield the rows of a table in random order, without the last few."""
    order = torch.randperm(table.num_rows)
    columns = {name: torch.from_numpy(table.column(name).to_numpy()) for name in NAMES}
    for at in range(0, table.num_rows - BATCH + 1, BATCH):
        yield {name: column[order[at : at + BATCH]] for name, column in columns.items()}


def scanned(endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of what one writes with the scanner of pyarrow.dataset, which reads ahead."""
    files = _filesystem(endpoint)
    paths = [info.path for info in files.get_file_info(pyarrow.fs.FileSelector(BUCKET))]
    while True:
        yield _scanned(files, paths)


def _scanned(files: Any, paths: list[str]) -> Iterator[Batch]:
    while True:
        random.shuffle(paths)
        table = pyarrow.dataset.dataset(paths, format="parquet", filesystem=files)
        held: list[Any] = []
        for batch in table.to_batches(columns=NAMES, batch_size=GROUP):
            held.append(batch)
            if sum(len(each) for each in held) >= _WINDOW * GROUP:
                yield from _batches(pa.Table.from_batches(held))
                held = []
        yield from _batches(pa.Table.from_batches(held, batch.schema))


def ray_data(endpoint: str) -> Generator[Iterator[Batch], None, None]:
    """Rounds of Ray Data's iterator of torch batches, on a Ray of its own with two CPUs."""
    ray = import_module("ray")
    ray.init(num_cpus=2, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    data = import_module("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    rows = data.read_parquet(BUCKET, filesystem=_filesystem(endpoint), columns=NAMES, shuffle="files")
    window = {"local_shuffle_buffer_size": _WINDOW * GROUP, "prefetch_batches": 2, "drop_last": True}
    while True:
        yield (batch for _ in iter(int, 1) for batch in rows.iter_torch_batches(batch_size=BATCH, **window))


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
    readers = {OURS: ours, PYARROW: plain, SCANNER: scanned, RAY: ray_data}
    serve_rounds(readers[loader](endpoint), look, seconds, server)


if __name__ == "__main__":
    main()
