"""Puts the digits and the photographs into the daemon over plain S3: with boto3, as any S3 program would, or
with the SDK, which speaks S3, too, where boto3 is not installed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdemo.datasets import connect
from meshdemo.digits import digits
from meshdemo.photographs import photographs
from meshdemo.screen import fact, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshdemo.daemon import Daemon
    from meshdemo.scale import Scale

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
