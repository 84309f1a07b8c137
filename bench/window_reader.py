"""`python -m bench.window_reader LOADER PLACE ENDPOINT SECONDS SERVER`: windows of a series as torch batches.

Law: a line on stdin is a round: batches for so many seconds, from a loader that begins empty; then a line of
JSON. Clocks run from the first batch to the last, so that what is prepared and not taken counts for nobody.
Every batch is looked at: the first channel counts the steps, so a window that is none is an error.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch
import zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore

import meshsdk as mesh
from bench.naive_loader import shuffled_rounds
from bench.steady_rate import serve_rounds
from bench.windows import BATCH, BUCKET, CHANNELS, CHUNK, OURS, WIDTH, WORKERS
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


class Windows(torch.utils.data.Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """What one writes who has an array in a bucket: opened once a process, a window is a slice of it."""

    def __init__(self, endpoint: str, place: str) -> None:
        self._endpoint, self._place = endpoint, place
        self._array: Any = None
        self._count = self._open().shape[1] // CHUNK
        self._array = None  # a worker opens its own

    def _open(self) -> Any:
        if self._array is None:
            store = S3Store(
                BUCKET,
                prefix=self._place,
                endpoint=self._endpoint,
                region="us-east-1",
                client_options={"allow_http": True},
            )
            self._array = zarr.open_array(ObjectStore(store, read_only=True), mode="r")
        return self._array

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: int) -> torch.Tensor:
        room = CHUNK * (self._count - index) - WIDTH
        begin = CHUNK * index + random.randint(0, min(room, CHUNK - 1))
        return torch.from_numpy(self._open()[:, begin : begin + WIDTH])


def ours(endpoint: str, place: str) -> Generator[Iterator[torch.Tensor], None, None]:
    """Rounds of a loader, each of a plan of its own."""
    with mesh.connect(endpoint) as client:
        ds = mesh.open(f"s3://{BUCKET}/{place}", fields={"x": ""}, kind="chunks", client=client)
        ds = ds.map(ops.zarr_chunk("x", f"s3://{BUCKET}/{place}/zarr.json"), ops.window("x", [None, WIDTH]))
        number = 0
        while True:
            number += 1
            with mesh.Loader(ds, BATCH, seed=number, tail="drop", prefetch_bytes=32 << 20) as loader:
                yield (batch["x"] for _ in iter(int, 1) for batch in loader)


def look(batch: torch.Tensor) -> int:
    """How many windows it has."""
    if tuple(batch.shape) != (BATCH, CHANNELS, WIDTH) or not bool((batch[:, 0].diff(dim=1) == 1).all()):
        raise SystemExit(f"no windows: {tuple(batch.shape)}")
    return BATCH


def main() -> None:
    """Warm up, then a round a line."""
    loader, place, endpoint, seconds, server = *sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    rounds = (
        ours(endpoint, place) if loader == OURS else shuffled_rounds(Windows(endpoint, place), BATCH, WORKERS)
    )
    serve_rounds(rounds, look, seconds, server)


if __name__ == "__main__":
    main()
