"""Puts the digits and the photographs into the daemon over plain S3: with boto3, as any S3 program would, or
with the SDK, which speaks S3, too, where boto3 is not installed.

The 1,797 handwritten digits are PNG files; the held-out fifth of each class never takes part in training.
Their source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (its test set), UCI
Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0; the numbers are kept in `digits.npz`, in its
order.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from meshdemo.datasets import connect
from meshdemo.photographs import photographs
from meshdemo.screen import fact, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meshdemo.daemon import Daemon
    from meshdemo.scale import Scale

HELD_OUT_EVERY = 5
LEVELS = 16
"""The digits are 8×8 with grey levels 0 to 16."""
_FILE = Path(__file__).with_name("digits.npz")


@dataclass(frozen=True, slots=True)
class Digit:
    """One PNG; `key` says part, class and number: `train/3/00017.png`."""

    key: str
    png: bytes


def as_png(levels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return the levels as a gray PNG of 8×8."""
    out = io.BytesIO()
    Image.fromarray((levels * (255 / LEVELS)).round().astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def digits(limit: int | None = None) -> Iterator[Digit]:
    """Yield the digits (the first `limit`) in the source's order; every fifth of a class goes to `test/`."""
    with np.load(_FILE) as data:
        images, labels = data["levels"][:limit], data["labels"][:limit].tolist()
    seen = [0] * 10
    for number, (levels, label) in enumerate(zip(images, labels, strict=True)):
        part = "test" if seen[label] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        seen[label] += 1
        yield Digit(f"{part}/{label}/{number:05d}.png", as_png(levels))


THREADS = 8


class S3Calls(NamedTuple):
    """Two calls of an S3 client, for any threads. `create_bucket(bucket)`, `put(bucket, key, body)`."""

    client: str
    create_bucket: Callable[[str], object]
    put: Callable[[str, str, bytes], object]


def s3_calls(daemon: Daemon) -> S3Calls:
    """Return the calls of boto3 if it is installed, else those of the SDK."""
    if find_spec("boto3") is None:
        client = connect(daemon)
        return S3Calls("the SDK", client.create_bucket, client.put)
    import boto3
    from botocore.config import Config

    s3: Any = boto3.client(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
        config=Config(max_pool_connections=THREADS, s3={"addressing_style": "path"}),
    )
    return S3Calls(
        "boto3",
        lambda bucket: s3.create_bucket(Bucket=bucket),
        lambda bucket, key, body: s3.put_object(Bucket=bucket, Key=key, Body=body),
    )


def put_all(s3: S3Calls, bucket: str, objects: Iterable[tuple[str, bytes]], title: str, total: int) -> int:
    """Create the bucket and put every (key, body); returns the bytes written."""
    s3.create_bucket(bucket)

    def put(item: tuple[str, bytes]) -> int:
        s3.put(bucket, *item)
        return len(item[1])

    written = 0
    with progress() as bars, ThreadPoolExecutor(THREADS) as pool:
        task = bars.add_task(title, total=total, note="")
        for size in pool.map(put, objects):
            written += size
            bars.update(task, advance=1, note=f"{written / 1e6:.1f} MB")
    return written


def store(daemon: Daemon, scale: Scale) -> None:
    """Digits to `s3://digits/{train,test}/<class>/`, photographs to `s3://photos/<class>/`."""
    s3 = s3_calls(daemon)
    pngs = [(digit.key, digit.png) for digit in digits(scale.digits)]
    put_all(s3, "digits", pngs, "handwritten digits (PNG)", len(pngs))
    jpegs = ((photo.name, photo.jpeg) for photo in photographs(scale.photographs))
    put_all(s3, "photos", jpegs, "photographs (JPEG)      ", scale.photographs)
    fact(
        f"{len(pngs):,} digits in s3://digits, {scale.photographs} photographs in s3://photos, "
        f"put by {s3.client}"
    )
