"""s3torchconnector: data sets and checkpoints for PyTorch over the AWS Common Runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import s3torchconnector
import torch
from driving import PART, Driver, serve
from s3torchconnector import (
    S3Checkpoint,
    S3ClientConfig,
    S3IterableDataset,
    S3MapDataset,
    S3ReaderConstructor,
)
from s3torchconnector._s3client import S3Client

if TYPE_CHECKING:
    from driving import Endpoint


class S3Torch(Driver):
    name = "s3torchconnector"
    missing = {  # noqa: RUF012
        "make_bucket": "it works inside a bucket that is there",
        "remove_bucket": "it works inside a bucket that is there",
        "list_buckets": "it works inside a bucket that is there",
        "presign_get": "it signs no URLs",
        "presign_put": "it signs no URLs",
        "put_if_absent": "it has no conditional upload",
        "put_if_match": "it has no conditional upload",
        "put": "it has a writer, no upload",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        os.environ.update(endpoint.environment())
        self.config = S3ClientConfig(force_path_style=True, part_size=PART, max_attempts=1)
        self.where = {"region": endpoint.region, "endpoint": endpoint.url, "s3client_config": self.config}
        self.client = S3Client(endpoint.region, endpoint=endpoint.url, s3client_config=self.config)

    def version(self) -> str:
        return str(s3torchconnector.__version__)

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        self.only_bytes(metadata, content_type, checksum)
        with self.client.put_object(bucket, key) as writer:
            writer.write(Path(path).read_bytes())

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self.put(bucket, key, path)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        with self.client.put_object(bucket, key) as writer, Path(path).open("rb") as source:
            while piece := source.read(100_001):
                writer.write(piece)

    def get(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self.client.get_object(bucket, key).read())

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        ranged = S3ReaderConstructor.range_based()
        with self.client.get_object(bucket, key, reader_constructor=ranged) as reader:
            reader.seek(start)
            Path(path).write_bytes(reader.read(end - start))

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        found = self.client.head_object(bucket, key)
        return {"size": found.size, "etag": found.etag.strip('"')}

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        pages = list(self.client.list_objects(bucket, prefix, delimiter, 400))
        return {
            "keys": [entry.key for page in pages for entry in page.object_info],
            "prefixes": [name for page in pages for name in page.common_prefixes],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self.client.copy_object(bucket, key, bucket, target)

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        for key in keys:
            self.client.delete_object(bucket, key)

    def own_work(self, bucket: str, prefix: str) -> str:
        checkpoint = S3Checkpoint(**self.where)
        state = {"weights": torch.arange(3_000_000), "step": 7}
        uri = f"s3://{bucket}/{prefix}/checkpoint"
        with checkpoint.writer(uri) as writer:
            torch.save(state, writer)
        with checkpoint.reader(uri) as reader:
            again = torch.load(reader)
        assert again["step"] == 7
        assert torch.equal(again["weights"], state["weights"])
        for number in range(20):
            with self.client.put_object(bucket, f"{prefix}/data/{number:02}") as writer:
                writer.write(bytes([number]) * number)
        for kind in (S3MapDataset, S3IterableDataset):
            data = kind.from_prefix(f"s3://{bucket}/{prefix}/data/", **self.where)
            assert [item.read() for item in data] == [bytes([number]) * number for number in range(20)]
        return "a checkpoint of 24 MB; map and iterable data sets with an empty sample"


if __name__ == "__main__":
    serve(S3Torch)
