"""Puts the digits and the photographs into the daemon over plain S3, with boto3, as any S3 program would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from demo.digits import digits
from demo.photographs import photographs
from demo.screen import fact, progress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from demo.daemon import Daemon
    from demo.scale import Scale

THREADS = 8


def client(daemon: Daemon) -> Any:
    """A stock S3 client."""
    return boto3.client(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
        config=Config(max_pool_connections=THREADS, s3={"addressing_style": "path"}),
    )


def put_all(s3: Any, bucket: str, objects: Iterable[tuple[str, bytes]], title: str, total: int) -> int:
    """Create the bucket and put every (key, body); returns the bytes written."""
    s3.create_bucket(Bucket=bucket)

    def put(item: tuple[str, bytes]) -> int:
        s3.put_object(Bucket=bucket, Key=item[0], Body=item[1])
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
    s3 = client(daemon)
    pngs = [(digit.key, digit.png) for digit in digits(scale.digits)]
    put_all(s3, "digits", pngs, "handwritten digits (PNG)", len(pngs))
    jpegs = ((photo.name, photo.jpeg) for photo in photographs(scale.photographs))
    put_all(s3, "photos", jpegs, "photographs (JPEG)      ", scale.photographs)
    fact(f"{len(pngs):,} digits in s3://digits, {scale.photographs} photographs in s3://photos, put by boto3")
