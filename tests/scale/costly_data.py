"""Data for the costly requests, apart from them: the processes of the crowd import none of this."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from PIL import Image

from tests.scale.costly import PHOTOGRAPHS, ROWS

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

_SIDE = 1600
_DISTINCT = 4  # photographs that differ


def fill(daemon: Daemon, bucket: str) -> None:
    """Photographs, objects, an archive, an array and a table."""
    client = daemon.client()
    random = np.random.default_rng(7)
    photographs = [_photograph(random) for _ in range(_DISTINCT)]
    for number in range(PHOTOGRAPHS):
        body = photographs[number % _DISTINCT]
        client.put_object(Bucket=bucket, Key=f"photographs/{number:04d}.jpg", Body=body)
    for number in range(1000):
        client.put_object(Bucket=bucket, Key=f"many/{number:06d}", Body=b"")
    client.put_object(Bucket=bucket, Key="large", Body=os.urandom(8 << 20))
    client.put_object(Bucket=bucket, Key="members.tar", Body=_archive(10_000))
    numbers = random.standard_normal((16 * ROWS, 1024)).astype(np.float32)
    table, out = pa.table({"x": list(numbers)}), io.BytesIO()
    pq.write_table(table, out, compression="zstd", row_group_size=ROWS)
    client.put_object(Bucket=bucket, Key="tables/0.parquet", Body=out.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        array = zarr.open_group(folder, mode="w", zarr_format=3).create_array(
            "x", shape=numbers.shape, dtype=numbers.dtype, chunks=(1, 1024), shards=(ROWS, 1024)
        )
        array[:] = numbers
        for file in filter(Path.is_file, Path(folder).rglob("*")):
            key = f"arrays/{file.relative_to(folder)}"
            client.put_object(Bucket=bucket, Key=key, Body=file.read_bytes())


def _photograph(random: np.random.Generator) -> bytes:
    pixels, out = random.integers(0, 256, (_SIDE // 8, _SIDE // 8, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).resize((_SIDE, _SIDE)).save(out, "JPEG", quality=90)
    return out.getvalue()


def _archive(members: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(members):
            tar.addfile(tarfile.TarInfo(f"{number:06d}.txt"))
    return out.getvalue()
