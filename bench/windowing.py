"""`python -m bench.windowing CONTENDER ENDPOINT SECONDS`: windows of a series as torch batches.

Law: a line on stdin is a round: batches for so many seconds, from a loader that begins empty; then a line of
JSON. Every batch is looked at: the first channel counts the steps, so a window that is none is an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
import zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore

import meshsdk as mesh
from bench.windows import ALIGNED, BATCH, BUCKET, CHUNK, NAIVE, OURS, PLACE, WIDTH, WORKERS
from meshsdk import ops

if TYPE_CHECKING:
    from collections.abc import Iterator


class Windows(torch.utils.data.Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """What one writes who has an array in a bucket: it is opened once a process, a window is a slice of it.
    `aligned`: of one chunk alone."""

    def __init__(self, endpoint: str, *, aligned: bool) -> None:
        self._endpoint, self._aligned = endpoint, aligned
        self._array: Any = None
        self._count = self._open().shape[1] // CHUNK
        self._array = None  # a worker opens its own

    def _open(self) -> Any:
        if self._array is None:
            store = S3Store(
                BUCKET,
                prefix=PLACE,
                endpoint=self._endpoint,
                region="us-east-1",
                client_options={"allow_http": True},
            )
            self._array = zarr.open_array(ObjectStore(store, read_only=True), mode="r")
        return self._array

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: int) -> torch.Tensor:
        room = CHUNK - WIDTH if self._aligned else CHUNK * self._count - WIDTH - CHUNK * index
        begin = CHUNK * index + random.randint(0, min(room, CHUNK - 1))
        return torch.from_numpy(self._open()[:, begin : begin + WIDTH])


def naive(endpoint: str, *, aligned: bool) -> Iterator[Iterator[torch.Tensor]]:
    """Rounds of a DataLoader, whose workers stay."""
    loader = torch.utils.data.DataLoader(
        Windows(endpoint, aligned=aligned),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    while True:
        yield (batch for _ in iter(int, 1) for batch in loader)


def ours(endpoint: str) -> Iterator[Iterator[torch.Tensor]]:
    """Rounds of a loader, each of a plan of its own."""
    with mesh.connect(endpoint) as client:
        ds = mesh.open(f"s3://{BUCKET}/{PLACE}", fields={"x": ""}, kind="chunks", client=client)
        ds = ds.map(ops.zarr_chunk("x", f"s3://{BUCKET}/{PLACE}/zarr.json"), ops.window("x", [None, WIDTH]))
        number = 0
        while True:
            number += 1
            with mesh.Loader(ds, BATCH, seed=number, tail="drop", prefetch_bytes=32 << 20) as loader:
                yield (batch["x"] for _ in iter(int, 1) for batch in loader)


def take(batches: Iterator[torch.Tensor], seconds: float) -> dict[str, float]:
    """Windows a second, of batches for so long."""
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        batch = next(batches)
        if tuple(batch.shape[2:]) != (WIDTH,) or not bool((batch[:, 0].diff(dim=1) == 1).all()):
            raise SystemExit(f"no windows: {tuple(batch.shape)}")
        done += int(batch.shape[0])
    taken = time.perf_counter() - begun
    return {"rate": done / taken, "windows": done}


def main() -> None:
    """Warm up, then a round a line."""
    contender, endpoint, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    rounds = ours(endpoint) if contender == OURS else naive(endpoint, aligned=contender == ALIGNED)
    assert contender in (OURS, NAIVE, ALIGNED)
    with closing(rounds):  # type: ignore[type-var]  # a generator
        take(next(rounds), seconds / 4)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for _ in iter(sys.stdin.readline, ""):
            sys.stdout.write(json.dumps(take(next(rounds), seconds)) + "\n")
            sys.stdout.flush()
    os._exit(0)  # workers that wait for a batch nobody takes


if __name__ == "__main__":
    main()
