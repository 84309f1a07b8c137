"""A process that downloads objects in one of the ways of `bench.download_row`, a round when it is told to."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client

from bench.download_row import BOTO, BUCKET, CONNECTOR, OURS, WEED
from bench.fill_and_check import pattern
from bench.steady_rate import serve_rounds
from meshsdk import transfers
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    Download = Callable[[str, Path], object]
_REGION = "us-east-1"


def ours(endpoint: str) -> Download:
    client = connect(endpoint, region=_REGION)
    return lambda key, path: transfers.download(client, BUCKET, key, path)


def boto(endpoint: str) -> Download:
    client = boto3.client("s3", endpoint_url=endpoint, region_name=_REGION)
    return lambda key, path: client.download_file(BUCKET, key, str(path))


def connector(endpoint: str) -> Download:
    client = S3Client(_REGION, endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
    return lambda key, path: path.write_bytes(client.get_object(BUCKET, key).read())


WAYS = {OURS: ours, BOTO: boto, WEED: boto, CONNECTOR: connector}


def downloads(download: Download, keys: list[str], path: Path) -> Generator[Iterator[int], None, None]:
    """Rounds of downloads without end, each as its size."""

    def size_of(key: str) -> int:
        download(key, path)
        return path.stat().st_size

    while True:
        yield map(size_of, cycle(keys))


def main() -> None:
    """Look at every object, warm up, then a round a line."""
    name, endpoint, folder, path = *sys.argv[1:4], Path(sys.argv[4])
    size, count, seconds, server = int(sys.argv[5]), int(sys.argv[6]), float(sys.argv[7]), int(sys.argv[8])
    keys, download, body = [f"{folder}/{at}" for at in range(count)], WAYS[name](endpoint), pattern(size)

    def look(found: int) -> int:
        if found != size:
            raise SystemExit(f"{found} bytes, not {size}")
        return 1

    for key in keys:
        download(key, path)
        if path.read_bytes() != body:
            raise SystemExit(f"{key}: not what was put")
    serve_rounds(downloads(download, keys, path), look, seconds, server)


if __name__ == "__main__":
    main()
