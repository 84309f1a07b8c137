"""s3fs: fsspec over aiobotocore, what pandas, dask and zarr 2 read through."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec.asyn
import s3fs
from driving import PART, Driver, serve

if TYPE_CHECKING:
    from driving import Endpoint


class S3fs(Driver):
    name = "s3fs"
    missing = {"presign_put": "it signs URLs for reading"}  # noqa: RUF012

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.fs = s3fs.S3FileSystem(
            key=endpoint.access_key,
            secret=endpoint.secret_key,
            endpoint_url=endpoint.url,
            client_kwargs={"region_name": endpoint.region, "verify": endpoint.ca or None},
            default_cache_type="none",
            default_fill_cache=False,
            use_listings_cache=False,
        )
        self.fs.retries = 1

    def version(self) -> str:
        return str(s3fs.__version__)

    def make_bucket(self, bucket: str) -> None:
        self.fs.mkdir(bucket)

    def remove_bucket(self, bucket: str) -> None:
        self.fs.rmdir(bucket)

    def list_buckets(self) -> list[str]:
        return list(self.fs.ls("", detail=False))

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        extra: dict[str, Any] = {"ContentType": content_type} if content_type else {}
        extra |= {"Metadata": metadata} if metadata else {}
        self.fs.pipe_file(f"{bucket}/{key}", Path(path).read_bytes(), **extra)

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self.fs.put_file(path, f"{bucket}/{key}", chunksize=PART)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        with self.fs.open(f"{bucket}/{key}", "wb", block_size=PART) as out, Path(path).open("rb") as source:
            while piece := source.read(100_001):
                out.write(piece)

    def get(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self.fs.cat_file(f"{bucket}/{key}"))

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        Path(path).write_bytes(self.fs.cat_file(f"{bucket}/{key}", start=start, end=end))

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        info = self.fs.info(f"{bucket}/{key}")
        return {
            "size": info["size"],
            "etag": info["ETag"].strip('"'),
            "content_type": info["ContentType"],
            "metadata": self.fs.metadata(f"{bucket}/{key}"),
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        if not delimiter:
            keys = self.fs.find(f"{bucket}/{prefix}".rstrip("/"), maxdepth=None)
            return {"keys": [key.removeprefix(f"{bucket}/") for key in keys], "prefixes": []}
        found = self.fs.ls(f"{bucket}/{prefix}", detail=True)
        names = [(entry["type"], entry["name"].removeprefix(f"{bucket}/")) for entry in found]
        return {
            "keys": [name for kind, name in names if kind == "file"],
            "prefixes": [f"{name}/" for kind, name in names if kind == "directory"],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self.fs.copy(f"{bucket}/{key}", f"{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        # Not `rm`, which expands the patterns that some keys look like.
        fsspec.asyn.sync(self.fs.loop, self.fs._bulk_delete, [f"{bucket}/{key}" for key in keys])

    def presign_get(self, bucket: str, key: str) -> str:
        return str(self.fs.sign(f"{bucket}/{key}", expiration=600))

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        try:
            self.fs.pipe_file(f"{bucket}/{key}", Path(path).read_bytes(), mode="create")
        except FileExistsError:  # by the condition that the answer names
            return False
        return True

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        self.fs.put(f"{folder}/", f"{bucket}/{prefix}/", recursive=True)
        return None

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self.fs.get(f"{bucket}/{prefix}/", f"{folder}/", recursive=True)


if __name__ == "__main__":
    serve(S3fs)
