"""Objects that lie on a disk in no order of key, and what is in them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any


@cache
def contents(count: int, size: int) -> dict[str, bytes]:
    """The objects: file names in order, each with `size` random bytes."""
    return {f"{number:04d}.bin": random.Random(number).randbytes(size) for number in range(count)}


def put_scattered(client: Any, bucket: str, files: dict[str, bytes]) -> None:
    """Create the bucket and put the files below `train/`: by four writers, in no order of key."""
    client.create_bucket(Bucket=bucket)

    def put(name: str) -> None:
        client.put_object(Bucket=bucket, Key=f"train/{name}", Body=files[name])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, random.Random(1).sample(list(files), len(files))))
